"""Whose heartbeat stands still, on a clock that the tests make up."""

import os
import signal
import subprocess
import sys

from ms_kungfu.launcher.hangs import HangWatch, is_stopped


def looks(watch, *rows):
    """What each look at (time, counts) finds."""
    return [watch.hung(now, beats) for now, beats in rows]


def test_a_worker_whose_count_stands_still_for_the_limit_hangs():
    watch = HangWatch(3.0)
    assert watch.period_s < 1.0
    found = looks(watch, *((t, {1: (t,), 2: (5,)}) for t in range(1, 6)))
    assert found == [[], [], [], [2], [2]]


def test_who_has_not_begun_to_count_does_not_hang():
    watch = HangWatch(1.0)
    assert looks(watch, *((t, {1: ()}) for t in range(10))) == [[]] * 10


def test_who_is_stopped_before_it_has_begun_to_count_hangs_after_the_limit():
    watch = HangWatch(2.0)
    found = [watch.hung(t, {1: (), 2: ()}, stopped) for t, stopped in enumerate([[1], [1, 2], [1], [1, 2]])]
    assert found == [[], [], [1], [1]]


def test_who_was_stopped_and_goes_on_starts_afresh():
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
