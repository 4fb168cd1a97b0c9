"""Whose heartbeat stands still, on a clock that the tests make up."""

from ms_kungfu.launcher.hangs import HangWatch


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
