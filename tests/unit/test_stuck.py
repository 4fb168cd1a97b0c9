"""Which process keeps the others waiting, from who sleeps for whom. Pure."""

from __future__ import annotations

from ms_kungfu.launcher.stuck import StuckWatch, stuck_among, waits_between_hosts


def test_rank_that_an_overdue_one_waits_for_is_stuck() -> None:
    assert stuck_among({0, 1, 2}, [(0, 1, True), (2, 1, False)]) == {1: [0]}
    assert stuck_among({0, 1, 2}, [(0, 1, True), (2, 1, True)]) == {1: [0, 2]}


def test_nothing_is_stuck_before_a_wait_is_overdue() -> None:
    assert stuck_among({0, 1, 2}, [(0, 1, False), (2, 1, False)]) == {}


def test_rank_that_waits_itself_leads_to_the_stuck_one() -> None:
    assert stuck_among({0, 1, 2}, [(0, 1, True), (1, 2, False)]) == {2: [0]}


def test_circle_has_no_stuck_rank() -> None:
    assert stuck_among({0, 1}, [(0, 1, True), (1, 0, True)]) == {}
    assert stuck_among({0, 1, 2}, [(0, 1, True), (1, 2, False), (2, 1, False)]) == {}


def test_dead_rank_is_neither_stuck_nor_overdue() -> None:
    assert stuck_among({0, 2}, [(0, 1, True), (2, 1, True)]) == {}
    assert stuck_among({1, 2}, [(0, 1, True)]) == {}


def test_stuck_rank_of_another_host_is_found_behind_both_links() -> None:
    # Host a has ranks 0 and 1, host b 2 and 3; rank 3 doesn't come.
    told = {"a": [(0, -1, True), (1, -1, True)], "b": [(2, 3, True), (-1, 3, False)]}
    ranks = {"a": [0, 1], "b": [2, 3]}
    assert stuck_among({0, 1, 2, 3}, waits_between_hosts(told, ranks)) == {3: [0, 1, 2]}


def test_only_rank_of_another_host_is_found_though_no_rank_there_waits() -> None:
    told = {"a": [(0, -1, True)], "b": [], "c": [(2, -1, True)]}
    ranks = {"a": [0], "b": [1], "c": [2]}
    assert stuck_among({0, 1, 2}, waits_between_hosts(told, ranks)) == {1: [0, 2]}


def test_hosts_that_wait_for_nobody_of_theirs_have_no_stuck_rank() -> None:
    """The network keeps them: no program does."""
    told: dict[str, list[tuple[int, int, bool]]] = {"a": [(0, -1, True)], "b": [(1, -1, True)]}
    assert stuck_among({0, 1}, waits_between_hosts(told, {"a": [0], "b": [1]})) == {}


def test_stuck_rank_is_confirmed_by_looks_for_a_while() -> None:
    watch: StuckWatch[int] = StuckWatch(sure_s=1.0)
    assert watch.look(10.0, {1}) == []
    assert watch.look(10.9, {1}) == []
    assert watch.look(11.0, {1}) == [1]


def test_rank_that_arrives_is_not_confirmed() -> None:
    watch: StuckWatch[int] = StuckWatch(sure_s=1.0)
    watch.look(10.0, {1})
    assert watch.look(10.5, set()) == []
    assert watch.look(11.5, {1}) == []
