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
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.states import WorkerState
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


class Loop:
    """A loop with a time of its own, which keeps its timers."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[tuple[float, Any, tuple[Any, ...]]]()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, what: Any, *args: Any) -> None:
        self.timers.append((self.now + seconds, what, args))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [each for each in self.timers if each[0] <= self.now]
        self.timers = [each for each in self.timers if each[0] > self.now]
        for _, what, args in due:
            what(*args)


def watched(monkeypatch: pytest.MonkeyPatch, gave_up: dict[str, str], recover: Recover, stuck: list[int]) -> Any:
    """Return the HangingWorkers of one running worker, for which the ranks in `stuck` wait for too long."""
    loop, worker = Loop(), WORKERS[1]
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    process = Process(0, "", "a", worker, rank=1, pid=7, state=WorkerState.RUNNING)
    requests: list[int] = []
    killed: list[str] = []

    def kill(process: Process, reason: str) -> None:
        process.to(WorkerState.KILLED)
        killed.append(reason)

    known = SimpleNamespace(
        heartbeat=lambda peer, incarnation: (), gave_up=lambda peer, incarnation: gave_up.get("why", ""),
        stuck=lambda alive: {(worker, 0): list(stuck)} if stuck else {}, set_ending=lambda *args: None,
    )  # fmt: skip
    found: Any = HangingWorkers(
        options=SimpleNamespace(recover=recover, peer_timeout_s=10.0), machine=SimpleNamespace(environ={}),
        broker=SimpleNamespace(facts=known, is_ready=lambda *args: True), processes=[process],
        agents={"a": SimpleNamespace(ask_for_stack=requests.append)},
        ending=SimpleNamespace(kill=kill), join_timeout_s=5.0,
        is_over=lambda: False, emit=lambda event: None,
    )  # type: ignore[arg-type]  # fmt: skip
    found._look_for_stalls = lambda: None
    found.keep_looking_for_the_stuck()
    return SimpleNamespace(hanging=found, loop=loop, process=process, requests=requests, killed=killed)


def seconds_pass(job: Any, count: int) -> None:
    for _ in range(10 * count):
        job.loop.pass_time(0.1)
        job.hanging.look_at("a", HangWatch(10.0), job.loop.now, [], lambda key: False)


@pytest.mark.parametrize("is_stuck_first", [False, True])
def test_failing_worker_that_others_wait_for_is_noted_once(
    is_stuck_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its state doesn't alternate between stuck and failing: one stack, two warnings, one timer."""
    gave_up = {} if is_stuck_first else {"why": "Ctrl-C"}
    job = watched(monkeypatch, gave_up, Recover.FAIL, [0])
    seconds_pass(job, 3)
    gave_up["why"] = "Ctrl-C"
    seconds_pass(job, 5)
    assert job.process.state is WorkerState.STUCK
    assert job.requests == [0]
    assert sorted(line.partition(":")[0] for line in caplog.messages) == ["stuck worker", "worker failing"]
    seconds_pass(job, 7)
    (reason,) = job.killed
    assert reason.startswith("could not go on (Ctrl-C)")


def test_failing_worker_that_is_no_longer_stuck_is_failing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [0]
    job = watched(monkeypatch, {"why": "Ctrl-C"}, Recover.FAIL, waiting)
    seconds_pass(job, 3)
    assert job.process.state is WorkerState.STUCK
    waiting.clear()
    seconds_pass(job, 1)
    assert job.process.state is WorkerState.FAILING
    assert len(job.requests) == 1


def test_failing_worker_that_others_wait_for_ends_before_they_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = watched(monkeypatch, {"why": "Ctrl-C"}, Recover.SHRINK, [0])
    seconds_pass(job, 4)
    assert job.killed == [stuck_reason([0], "KUNGFU_COLLECTIVE_TIMEOUT", env.COLLECTIVE_TIMEOUT.get({}))]
    assert len(job.requests) == 1


def test_rank_that_waits_for_no_rank_in_particular_is_not_stuck() -> None:
    """For a staging buffer, say: it names itself."""
    assert stuck_among({0, 1}, [(0, 1, True), (1, 1, False)]) == {}
    told = {"a": [(0, -1, True)], "b": [(1, 1, False)]}
    assert stuck_among({0, 1}, waits_between_hosts(told, {"a": [0], "b": [1]})) == {}
