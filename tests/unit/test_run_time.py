"""Deadlines leave pauses of the process out: clock, event loop, connections. Clocks are given, or jump."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from ms_kungfu._run_loop import RunTimeLoop
from ms_kungfu._run_time import MOST_GAP_S, SLICE_S, RunClock, run_time
from ms_kungfu.broker_protocol import Connection
from ms_kungfu.cluster_store.exchange import exchange
from ms_kungfu.launcher.state.lost_hosts import Leases

PAUSE_S = 3600.0


class Clock:
    """A real clock that can jump, as a process finds it that was stopped."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What `run_time` counts by."""
    made = Clock()
    monkeypatch.setattr(run_time, "_monotonic", made)
    run_time()
    return made


def test_pause_counts_as_one_gap() -> None:
    now = 100.0
    clock = RunClock(lambda: now)
    begun = clock()
    now += SLICE_S
    assert clock() - begun == SLICE_S
    now += MOST_GAP_S  # the longest that counts in full
    assert clock() - begun == SLICE_S + MOST_GAP_S
    now += PAUSE_S
    assert clock() - begun == SLICE_S + 2 * MOST_GAP_S
    now += SLICE_S
    assert clock() - begun == 2 * SLICE_S + 2 * MOST_GAP_S


def test_pause_that_is_cut_still_is_one_for_leases() -> None:
    now = 0.0
    clock = RunClock(lambda: now)
    leases = Leases(4.0)
    heard = {"host": clock()}
    assert leases.run_out(clock(), heard) == []
    now += PAUSE_S
    assert leases.run_out(clock(), heard) == []
    for _ in range(9):  # it has all of its time again
        now += 0.4
        assert leases.run_out(clock(), heard) == []
    now += 0.5
    assert leases.run_out(clock(), heard) == ["host"]


def test_timer_of_loop_is_not_due_behind_a_pause(clock: Clock) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        told: list[str] = []
        loop.call_later(MOST_GAP_S + 60.0, told.append, "long")
        loop.call_later(0.1, told.append, "short")
        clock.ahead += PAUSE_S
        await asyncio.sleep(0.2)
        return told

    loop = RunTimeLoop()
    try:
        assert loop.run_until_complete(main()) == ["short"]
    finally:
        loop.close()


def test_idle_loop_reads_its_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what has passed while nothing happened would be taken for a pause."""
    reads: list[float] = []
    loop = RunTimeLoop(lambda: (reads.append(time.monotonic()), run_time())[1])
    try:
        loop.run_until_complete(asyncio.sleep(3 * SLICE_S))
    finally:
        loop.close()
    assert len(reads) >= 3  # by the number of slices; how far apart they are is the machine's


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def answer_behind_a_pause(clock: Clock, there: socket.socket, answer: bytes) -> threading.Thread:
    """Both ends are stopped for long, then this one answers."""

    def run() -> None:
        time.sleep(SLICE_S / 2)  # its deadline has begun
        clock.ahead += PAUSE_S
        time.sleep(2 * SLICE_S)  # the waiting end looks again before the answer is there
        there.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_broker_connection_waits_on_behind_a_pause(clock: Clock, ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    connection = Connection(here, MOST_GAP_S + 60.0)
    thread = answer_behind_a_pause(clock, there, struct.pack(">I", 2) + b"{}")
    assert connection.receive_bytes() == (b"{}", [])
    thread.join()


def test_broker_connection_ends_at_its_limit(ends: tuple[socket.socket, socket.socket]) -> None:
    connection = Connection(ends[0], 1.2 * SLICE_S)
    begun = time.monotonic()
    with pytest.raises(socket.timeout):
        connection.receive_bytes()
    assert time.monotonic() - begun >= 1.2 * SLICE_S


def test_broker_connection_sends_what_takes_many_slices(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte once, though the other end reads less in a slice than is sent."""
    monkeypatch.setattr("ms_kungfu.broker_protocol.SLICE_S", 0.01)
    here, there = ends
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    got: list[bytes] = []

    def read() -> None:
        time.sleep(0.1)
        got.append(Connection(there, 60.0).receive_bytes()[0])

    thread = threading.Thread(target=read)
    thread.start()
    message = "".join(map(str, range(12000))).encode()
    Connection(here, 60.0).send_bytes(message)
    thread.join()
    assert got == [message]


def test_http_answer_is_awaited_behind_a_pause(clock: Clock, ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    connection = http.client.HTTPConnection("anywhere")
    connection.connect = lambda: setattr(connection, "sock", here)  # type: ignore[method-assign]
    thread = answer_behind_a_pause(clock, there, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell")
    response, body = exchange(connection, "GET", "/config", None, {}, MOST_GAP_S + 60.0)
    assert (response.status, body) == (200, b"well")
    thread.join()


def test_forked_child_reads_the_clock_that_another_thread_was_reading() -> None:
    with run_time._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            run_time()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
