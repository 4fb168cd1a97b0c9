"""Which process keeps the others waiting, and how the launcher finds it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ms_kungfu import env
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.hanging import HangingWorkers
from ms_kungfu.launcher.controller.process_facts import ProcessFacts
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.segments import Segments
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.stuck import (
    StuckWatch,
    stuck_among,
    stuck_reason,
    stuck_sure_s,
    told_each_s,
    waits_between_hosts,
)
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire.messages import Registered


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


def test_hosts_that_wait_for_no_own_rank_have_no_stuck_rank() -> None:
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


def test_waits_between_hosts_grow_linearly() -> None:
    hosts = [f"host{i}" for i in range(100)]
    told = {host: [(rank, -1, True)] for rank, host in enumerate(hosts)}
    assert len(waits_between_hosts(told, {host: [rank] for rank, host in enumerate(hosts)})) <= 3 * len(hosts)


# ---- what the launcher does with it ----

WORKERS = tuple(PeerID("a", 10000 + i) for i in range(3))


def facts(waits: list[tuple[int, int, bool]]) -> ProcessFacts:
    """Of one version, in which the ranks tell these."""
    unused: Any = None
    versions = ClusterVersions()
    versions.admit(Cluster(WORKERS, (), 0))
    versions.commit_version(0)
    segments = Segments(versions, False, unused)
    segments.open[0] = SimpleNamespace(awaited=lambda: waits)  # type: ignore[assignment]
    return ProcessFacts(versions, segments, unused)


def test_broker_names_stuck_process_and_the_ranks_that_wait() -> None:
    alive = [(worker, 0) for worker in WORKERS]
    assert facts([(0, 1, True), (2, 1, True)]).stuck(alive) == {(WORKERS[1], 0): [0, 2]}


def test_broker_looks_at_no_process_while_no_wait_is_overdue() -> None:
    looked: list[int] = []

    class Alive(list[tuple[PeerID, int]]):
        def __iter__(self) -> Any:
            looked.append(1)
            return super().__iter__()

    assert facts([(0, 1, False), (2, 1, False)]).stuck(Alive((worker, 0) for worker in WORKERS)) == {}
    assert looked == []


def test_report_of_a_host_is_no_look_for_stuck_workers() -> None:
    """The launcher looks at all hosts together: a look for each report would be quadratic in the hosts."""
    later: list[tuple[float, Any]] = []
    agent: Any = SimpleNamespace(
        is_over=lambda: False, _stopped={}, processes=[], _stuck_look_s=0.5,
        _loop=SimpleNamespace(call_later=lambda seconds, what: later.append((seconds, what))),
    )  # fmt: skip
    looks: list[int] = []
    agent._look_for_the_stuck = lambda: looks.append(1)
    agent._look_for_stalls = lambda: None
    agent.keep_looking_for_the_stuck = "again"
    for host in ("a", "b", "c"):
        HangingWorkers.look_at(agent, host, HangWatch(10.0), 1.0, [], lambda key: False)
    assert looks == []
    HangingWorkers.keep_looking_for_the_stuck(agent)
    assert (looks, later) == ([1], [(0.5, "again")])


@pytest.mark.parametrize("timeout_s", [0.5, 4.0, 9.6, 600.0])
def test_host_tells_of_its_ranks_twice_before_one_is_confirmed(timeout_s: float) -> None:
    class RegisteredError(Exception):
        pass

    def send(message: Registered) -> None:
        raise RegisteredError(message.look_s)

    hosts: Any = SimpleNamespace(
        options=SimpleNamespace(cores_per_worker=None, peer_timeout_s=10.0, secret=""), lease=None,
        _start=SimpleNamespace(writer="job", secret=""),
        machine=SimpleNamespace(environ={env.COLLECTIVE_TIMEOUT.name: str(timeout_s)}),
    )  # fmt: skip
    channel: Any = SimpleNamespace(send=send)
    registration: Any = None
    with pytest.raises(RegisteredError) as registered:
        asyncio.run(RemoteHosts._let_in(hosts, channel, registration, ""))
    assert registered.value.args[0] == told_each_s(1.0, timeout_s) < stuck_sure_s(timeout_s)


@pytest.mark.parametrize(("waiting", "named"), [([0], "rank 0 waits"), ([0, 2], "ranks 0, 2 wait")])
def test_reason_names_the_ranks_that_wait_and_the_limit(waiting: list[int], named: str) -> None:
    reason = stuck_reason(waiting, "KUNGFU_JOIN_TIMEOUT", 5.0)
    limit = "before the 5 s of KUNGFU_JOIN_TIMEOUT were over"
    assert reason == f"did not reach the collective in which {named} and was killed {limit}"


@pytest.mark.parametrize(
    ("has_joined", "limit"), [(True, ("KUNGFU_COLLECTIVE_TIMEOUT", 60.0)), (False, ("KUNGFU_JOIN_TIMEOUT", 5.0))]
)
def test_wait_for_worker_names_join_timeout_until_it_joins(has_joined: bool, limit: tuple[str, float]) -> None:
    agent: Any = SimpleNamespace(
        broker=SimpleNamespace(is_ready=lambda peer, incarnation: has_joined),
        join_timeout_s=5.0,
        machine=SimpleNamespace(environ={env.COLLECTIVE_TIMEOUT.name: "60"}),
    )
    process = Process(0, "", "127.0.0.1", PeerID("127.0.0.1", 10000))
    assert HangingWorkers._limit_of_waits_for(agent, process) == limit


def test_rank_that_waits_for_no_rank_in_particular_is_not_stuck() -> None:
    """For a staging buffer, say: it names itself."""
    assert stuck_among({0, 1}, [(0, 1, True), (1, 1, False)]) == {}
    told = {"a": [(0, -1, True)], "b": [(1, 1, False)]}
    assert stuck_among({0, 1}, waits_between_hosts(told, {"a": [0], "b": [1]})) == {}
