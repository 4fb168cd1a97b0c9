"""Whose heartbeat stands still, on a clock that the tests make up."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ms_kungfu.launcher.state.hangs import HangWatch, is_starved, is_stopped, waits_for_a_core


def looks(watch, *rows):
    """What each look at (time, counts) finds."""
    return [watch.hung(now, beats) for now, beats in rows]


def test_a_worker_whose_count_stands_still_for_the_limit_hangs():
    watch = HangWatch(3.0)
    assert watch.period_s < 1.0
    found = looks(watch, *((t, {1: (t,), 2: (5,)}) for t in range(1, 6)))
    assert found == [[], [], [], [2], [2]]


def test_rank_that_has_not_begun_to_count_does_not_hang():
    watch = HangWatch(1.0)
    assert looks(watch, *((t, {1: ()}) for t in range(10))) == [[]] * 10


def test_rank_stopped_before_it_counts_hangs_after_the_limit():
    watch = HangWatch(2.0)
    found = [watch.hung(t, {1: (), 2: ()}, stopped) for t, stopped in enumerate([[1], [1, 2], [1], [1, 2]])]
    assert found == [[], [], [1], [1]]


def test_rank_that_was_stopped_and_continues_starts_afresh():
    watch = HangWatch(2.0)
    for t, (beat, stopped) in enumerate([((), [1]), ((), [1]), ((), []), ((), [1]), ((), [1]), ((1,), []), ((2,), [])]):
        assert watch.hung(t, {1: beat}, stopped) == []
    assert [watch.hung(7 + t, {1: (2,)}, []) for t in range(3)] == [[], [1], [1]]


def test_a_process_is_stopped_between_two_signals():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        assert is_stopped(child.pid)
        os.kill(child.pid, signal.SIGCONT)
        os.waitpid(child.pid, os.WCONTINUED)
        assert not is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid)


def test_rank_waiting_for_a_core_does_not_hang_unless_it_stands_still():
    watch = HangWatch(2.0)
    asked = []
    starved = {1}
    looks = [watch.hung(t, {1: (5,), 2: (t + 1,)}, (), lambda k: asked.append(k) or k in starved) for t in range(9)]
    assert looks == [[]] * 9
    assert set(asked) == {1}, "whose count moves isn't asked about"
    starved.clear()
    assert [watch.hung(t, {1: (5,)}, (), starved.__contains__) for t in (9, 10)] == [[], [1]]


TWO_THREADS = """
import sys, threading, time
from pathlib import Path

def run(name, spins):
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    barrier.wait()
    while True:
        while spins:
            pass
        time.sleep(60)

barrier = threading.Barrier(3)
for name in ("kungfu-beat", "another"):
    threading.Thread(target=run, args=(name, name == sys.argv[1]), daemon=True).start()
barrier.wait()
print("ready", flush=True)
time.sleep(60)
"""


def becomes(look, pid, expected):
    """Whether most looks say so, at once or soon: a thread that goes to sleep waits for a core to do so, too."""
    deadline = time.monotonic() + 60
    while (sum(look(pid) for _ in range(100)) > 50) != expected:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("spins", ["kungfu-beat", "another", "none"])
def test_the_counting_thread_alone_tells_whether_a_worker_gets_no_core(spins, script):
    command = [sys.executable, "-c", TWO_THREADS, spins]
    if script:
        command = ["sh", "-c", '"$@"; exit', "sh", *command]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout.readline() == b"ready\n"
        # A thread that spins is always runnable, on a core or not.
        assert becomes(is_starved, child.pid, spins == "kungfu-beat")
        if not script:
            assert becomes(waits_for_a_core, child.pid, spins != "none")
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert not is_starved(child.pid)
    assert not waits_for_a_core(child.pid)


def test_any_of_its_counts_is_enough_and_a_new_version_starts_afresh():
    watch = HangWatch(2.0)
    assert (
        looks(watch, (0, {1: (7, 0)}), (1, {1: (7, 1)}), (2, {1: (7, 1)}), (3, {1: (1,)}), (4, {1: (1,)})) == [[]] * 5
    )
    assert watch.hung(5, {1: (1,)}) == [1]


def test_time_in_which_the_launcher_itself_stood_still_does_not_count():
    watch = HangWatch(30.0)
    assert looks(watch, (0, {1: (1,)}), (1, {1: (2,)}), (1000, {1: (2,)})) == [[], [], []]
    assert looks(watch, *((1000 + t, {1: (2,)}) for t in range(1, 28))) == [[]] * 27
    assert watch.hung(1028, {1: (2,)}) == [1]


def test_the_limit_is_of_each_worker():
    watch = HangWatch(2.0)
    assert looks(watch, (0, {1: (1,)}), (1, {1: (1,), 2: (1,)}), (2, {1: (1,), 2: (1,)}), (3, {2: (1,)})) == [
        [],
        [],
        [1],
        [2],
    ]
