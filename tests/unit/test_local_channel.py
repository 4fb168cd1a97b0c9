"""A connection within a launcher: order, end and limits are those of one between hosts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Callable

import pytest

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.launcher.channel import LocalChannel
from ms_kungfu.launcher.wire import messages as m


def run(test: Callable[[LocalChannel, LocalChannel], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(*LocalChannel.pair()), 60)

    asyncio.run(main())


def test_messages_of_threads_and_loop_arrive_in_the_order_of_the_calls() -> None:
    async def test(one: LocalChannel, other: LocalChannel) -> None:
        for number in range(0, 200, 2):
            thread = threading.Thread(target=one.send, args=(m.Interrupted(1 + number % 60),))
            thread.start()
            thread.join()  # the loop hears of it later, and must not be overtaken by what it sends itself
            one.send(m.Interrupted(61))
        told = [await other.receive(m.FROM_HOST) for _ in range(200)]
        assert told[1::2] == [m.Interrupted(61)] * 100
        assert told[::2] == [m.Interrupted(1 + number % 60) for number in range(0, 200, 2)]

    run(test)


def test_a_message_is_copied() -> None:
    async def test(one: LocalChannel, other: LocalChannel) -> None:
        worker = m.Worker(1, "127.0.0.1:10000", 0, 0, "log", 0)
        one.send(m.Agent(m.Registration("h", "1", "2", {}, [0]), report=m.ResyncReport([worker], {}, [])))
        worker.code = 3
        told = await other.receive(m.FIRST_WORDS)
        assert isinstance(told, m.Agent)
        assert told.report is not None
        assert told.report.workers[0].code is None

    run(test)


def test_the_end_comes_behind_what_was_sent_and_nothing_behind_the_end() -> None:
    async def test(one: LocalChannel, other: LocalChannel) -> None:
        one.send(m.Leave())
        one.end()
        one.send(m.Leave())
        other.send(m.Leave())
        assert await other.receive(m.FROM_HOST) == m.Leave()
        for end in (one, other):
            with pytest.raises(ConnectionError):
                await end.receive(m.FROM_HOST)

    run(test)


def test_waiting_receiver_learns_of_the_close() -> None:
    async def test(one: LocalChannel, other: LocalChannel) -> None:
        waiting = asyncio.ensure_future(other.receive(m.FROM_HOST))
        await asyncio.sleep(0)
        one.close()
        with pytest.raises(ConnectionError):
            await waiting

    run(test)


def test_message_of_the_wrong_direction_is_refused() -> None:
    async def test(one: LocalChannel, other: LocalChannel) -> None:
        one.send(m.End(0, None))
        with pytest.raises(ProtocolError):
            await other.receive(m.FROM_HOST)

    run(test)
