"""What happens to a controller that has just taken the lease, and that the others look for: on a virtual clock.

An outsider has found that these went wrong; random courses (`test_simulated_leadership.py`) come to such moments
rarely.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from ms_kungfu.cluster_store import StoreUnreachableError
from ms_kungfu.launcher.controller import startup
from ms_kungfu.launcher.state.leader_snapshot import TimeToAsk
from ms_kungfu.launcher.state.policy import Recover, Standing
from ms_kungfu.launcher.wire.messages import CpuIsa
from tests.conftest import long
from tests.fault.schedules import Schedule, story, variations, violation_of
from tests.fault.simulator import cluster_store
from tests.fault.simulator.hosts_world import HOST_TIMEOUT_S, HostsSetup, HostsWorld
from tests.fault.simulator.machine import Machine
from tests.fault.simulator.setting import JOIN_TIMEOUT_S, Happening, Violation

JOB = HostsSetup(size=8, hosts=4, recover=Recover.SHRINK, moves=True, samples=200)
KILL = Happening(0.9, "kill head")


def run(schedule: Schedule) -> HostsWorld:
    """To its end, which has to be a good one."""
    world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, [])
    try:
        outcome = world.run()
    except Violation as violation:
        pytest.fail(f"{violation}\n{story(schedule)}", pytrace=False)
    assert outcome.exit_code == 0, story(schedule)
    return world


def longest_gap(world: HostsWorld) -> float:
    return max(after - before for before, after in zip(world.commits, world.commits[1:]))


@pytest.mark.parametrize("seconds", [long(0.95), 1.02, long(1.1), long(1.3)])  # host-timeouts
def test_paused_new_controller_declares_no_host_lost(seconds: float) -> None:
    """Its hosts have called it meanwhile, and wait."""
    pause = Happening(0.0, "pause head", 0, seconds * HOST_TIMEOUT_S, term=2)
    for schedule in variations(JOB, (KILL, pause), 5, 0.15):
        world = run(schedule)
        assert len(world.lost_at) <= 2, story(
            schedule
        )  # the first controller, and this one where another took its lease


def test_new_controller_paused_after_hosts_arrive_leaves_them_to_another() -> None:
    """They have left it, and come to another one only. It stands still for so nearly the timeout that some stay."""
    ends = (Happening(2.25, "head leaves", 1), Happening(2.45, "head leaves", 10))
    pause = Happening(0.16, "pause head", 0, 0.95 * HOST_TIMEOUT_S, term=2)
    job = replace(JOB, recover=Recover.REPLACE, samples=48)
    for schedule in list(variations(job, (*ends, pause), 12, 0.05))[9:]:  # the last of them gave a healthy host up
        assert len(run(schedule).lost_at) <= 2, story(schedule)


def test_pause_of_all_hosts_during_takeover_loses_no_host() -> None:
    pause = Happening(0.0, "pause all", 0, 1.5 * HOST_TIMEOUT_S, term=2)
    for schedule in variations(JOB, (KILL, pause), 5, 0.3):
        assert {host.name for host in run(schedule).lost_at} <= {"10.0.0.1"}, story(schedule)


@pytest.mark.parametrize("seconds", [0.0, 3 * HOST_TIMEOUT_S])
def test_lost_second_controller_loses_no_other_host(seconds: float) -> None:
    """The caller doesn't wait for it longer than the third host waits for the caller."""
    second = Happening(0.0, "pause head" if seconds else "kill head", 0, seconds, term=2)
    for schedule in variations(JOB, (KILL, second), 5, 0.3):
        world = run(schedule)
        assert len(world.lost_at) == 2, story(schedule)
        assert longest_gap(world) < 3.2 * HOST_TIMEOUT_S, story(schedule)


@pytest.mark.parametrize(("every_s", "away_s"), [long(1.0, 0.3), (1.9, 0.6)])
def test_a_dead_host_is_given_up_while_the_store_comes_and_goes(every_s: float, away_s: float) -> None:
    flaps = tuple(Happening(2.2 + every_s * n, "server away", 0, away_s) for n in range(30))
    deaths = (KILL, Happening(0.91, "switch off", 1, 500.0))
    setup = HostsSetup(size=6, hosts=3, recover=Recover.SHRINK, moves=True, samples=200)
    (schedule,) = variations(setup, (*deaths, *flaps), 1, 0.0)
    assert longest_gap(run(schedule)) < 5 * HOST_TIMEOUT_S, story(schedule)


def test_lease_acquired_without_an_answer_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller before it isn't waited for any longer then, nor is this host taken for it."""

    def swap(self, seen, snapshot, holder="", lease=0):
        done = real(self, seen, snapshot, holder, lease)
        if lease and done[0] and len(unanswered) < 2:  # the first controller's goes well
            unanswered.append(holder)
            if len(unanswered) == 2:
                raise StoreUnreachableError("the answer is lost")
        return done

    real = cluster_store.LeadershipKeys.swap
    monkeypatch.setattr(cluster_store.LeadershipKeys, "swap", swap)
    for schedule in variations(JOB, (KILL,), 6, 0.2):
        unanswered: list[str] = []
        world = run(schedule)
        assert longest_gap(world) < 2 * HOST_TIMEOUT_S, story(schedule)
        assert [host.name for host in world.lost_at] == ["10.0.0.1"]


def test_replacements_of_a_new_controller_get_the_same_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that had the job alone has wide instructions that are slow."""

    async def cpu_isa(self, wanted):
        slow = self._host.name == "10.0.0.1"
        return CpuIsa("AVX2" if slow else "AVX512_CORE", "AVX512_CORE", "it is slow" if slow else "")

    monkeypatch.setattr(Machine, "cpu_isa", cpu_isa)
    kill = Happening(8.0, "kill member", 1)
    for schedule in variations(replace(JOB, recover=Recover.REPLACE), (KILL, kill), 3, 0.15):
        world = run(schedule)
        workers = [process.environ for process in world.everybody if "KUNGFU_INCARNATION" in process.environ]
        assert {environ.get("ONEDNN_MAX_CPU_ISA") for environ in workers} == {"AVX2"}, story(schedule)
        assert any(environ["KUNGFU_INCARNATION"] != "0" for environ in workers), story(schedule)


def test_lease_is_kept_while_a_commit_waits_for_space_in_the_store() -> None:
    full = Happening(1.0, "fill store", 0, 3 * HOST_TIMEOUT_S)
    setup = HostsSetup(size=6, hosts=3, recover=Recover.SHRINK, moves=True, samples=200)
    for schedule in variations(setup, (Happening(0.97, "resize", 4), full), 6, 0.05):
        assert run(schedule).terms == 1, story(schedule)


def test_workers_go_on_while_a_version_waits_for_a_store_that_is_away() -> None:
    """They hear of it when it can be chosen. Where the store goes between the two they wait: seldom."""
    setup = HostsSetup(size=6, hosts=3, recover=Recover.SHRINK, moves=True, samples=300)
    wish = (Happening(0.5, "resize", 4), Happening(2.5, "resize", 6), Happening(2.55, "server away", 0, 6.0))
    gaps = [longest_gap(run(schedule)) for schedule in variations(setup, wish, 10, 0.2)]
    assert sum(gap > 2.0 for gap in gaps) <= 3, gaps


def test_launchers_end_if_the_keys_of_the_job_are_deleted() -> None:
    """Deleted by a client, or lost with etcd's data. Nothing can be decided any more, nor looked up."""
    setup = HostsSetup(size=6, hosts=3, recover=Recover.SHRINK, moves=True, samples=40)
    for schedule in variations(setup, (Happening(0.9, "delete keys"),), 4, 0.5):
        world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, [])
        assert world.run().exit_code == 1, story(schedule)
        assert all("the store has lost the job's keys" in host.outcome.words for host in world.hosts), story(schedule)


def test_next_controller_reports_the_whole_past_of_the_job() -> None:
    for schedule in variations(JOB, (Happening(0.5, "resize", 6), KILL), 4, 0.0):
        told = run(schedule).job.context.history.changes
        assert [change.version for change in told] == list(range(len(told))), story(schedule)
        assert told[0].why == "the job's start"
        assert told[-1].chosen_at is not None, "who is left trains in it"


@pytest.mark.parametrize("who", ["worker", "guard"])
@pytest.mark.parametrize("later_s", [0.0, long(0.003), long(0.01)])
def test_worker_that_fails_after_the_resync_report_is_noticed(who: str, later_s: float) -> None:
    """The next controller has the report, and the host hasn't its welcome."""
    for number in range(3):
        dies = Happening(0.0, f"kill reporter's {who}", number, later_s)
        for schedule in variations(JOB, (dies, KILL), 3, 0.2):
            run(schedule)


def test_a_host_that_dies_behind_its_report_does_not_end_the_job() -> None:
    """While another one is still awaited; it has a part of a version that isn't chosen."""
    setup = replace(JOB, step_s=0.3, samples=300)
    comes = Happening(0.9, "resize", 6), Happening(0.95, "kill head")
    for number, other in ((0, 0), (1, 2), (2, 1)):
        dies = Happening(0.0, "kill reporter", number, 0.2)
        waits = Happening(0.0, "pause host", other, 1.0, term=2)
        for schedule in variations(setup, comes, 5, 0.5):
            run(replace(schedule, happenings=(dies, *schedule.happenings, waits)))


def test_joining_host_is_not_rejected_by_a_reelected_controller() -> None:
    """It had joined, which wasn't on record yet, as the controller stood still; it comes between two controllers of one
    host."""
    setup = replace(JOB, size=2, hosts=2, slots=2, samples=12, step_s=0.1, prepare_s=0.0, groups=("grad",))
    happenings = (
        Happening(0.889, "fill store", 0, 2.0), Happening(1.007, "kill launcher", 9),
        Happening(1.105, "kill member", 7), Happening(1.12, "host joins", 10),
        Happening(1.325, "pause host", 10, 4.8),
    )  # fmt: skip
    for schedule in variations(setup, happenings, 40, 0.3, 25):
        violation = violation_of(schedule)
        assert violation is None, f"{violation}\n{story(schedule)}"


def test_commit_that_a_controller_left_unwritten_is_not_reported() -> None:
    setup = HostsSetup(size=6, hosts=3, recover=Recover.SHRINK, moves=True, samples=200)
    full = Happening(0.65, "fill store", 0, 4.0)
    goes = Happening(1.6, "head leaves"), Happening(1.7, "head leaves")  # at the second SIGTERM at once
    for schedule in variations(setup, (Happening(0.6, "resize", 4), full, *goes), 8, 0.25):
        violation = violation_of(schedule)
        assert violation is None, f"{violation}\n{story(schedule)}"


def test_host_that_left_and_returned_stays_if_the_controller_fails() -> None:
    """Under the name under which it was granted to leave."""
    leaves, comes = Happening(0.6, "terminate", 5), Happening(2.5, "resize", 8)
    for schedule in variations(replace(JOB, samples=400), (leaves, comes, Happening(5.0, "kill head")), 3, 0.1):
        current = run(schedule).job.context.manager.broker.versions.current
        assert current.size == 6, story(schedule)  # without the controller's two


@pytest.mark.parametrize(("kind", "codes"), [("host leaves", {0}), ("interrupt", {128 + signal.SIGINT})])
def test_signal_without_a_leader_is_answered_by_the_next_controller(kind: str, codes: set[int]) -> None:
    """A host leaves after a step; a Ctrl-C ends all of them. The next controller doesn't wait in vain for the host."""
    for at in (1.2, 1.8, 2.4):
        for schedule in variations(JOB, (KILL, Happening(at, kind, 1)), 3, 0.3):
            world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, [])
            world.run()
            assert {host.outcome.code for host in world.hosts[1:]} == codes, story(schedule)
            assert len(world.lost_at) <= 1, story(schedule)
            assert longest_gap(world) < 2 * HOST_TIMEOUT_S, story(schedule)


def test_next_controller_knows_the_workers_that_train_already() -> None:
    for schedule in variations(JOB, (Happening(0.9, "head leaves"),), 3, 0.1):
        world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, [])
        known: list[bool] = []

        def look(world: HostsWorld = world, known: list[bool] = known) -> None:
            agent = world.job.context.manager
            for process in agent.processes.of_standing(Standing.MEMBER):
                known.append(agent.broker.is_ready(process.peer, process.incarnation))

        world.loop.at(3.0, look)
        world.run()
        assert known == [True] * 6, story(schedule)


@pytest.mark.parametrize(
    "happenings", [(), (KILL,), (Happening(0.9, "interrupt", 1),), (Happening(0.25, "interrupt", 0),)]
)
def test_ended_job_has_released_the_lease(happenings: tuple[Happening, ...]) -> None:
    """Or the next one of its name would wait for the end of the lease."""
    for schedule in variations(replace(JOB, samples=40), happenings, 3, 0.2):
        world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, [])
        world.run()
        assert world.server.leadership.now.snapshot["end"], story(schedule)
        assert world.server.leadership.look().holder == "", story(schedule)


@pytest.mark.parametrize("at", [0.8, 1.3, 3.0])  # as the controller dies, while no host has the lease, when one has it
def test_host_joining_while_the_controller_fails_finds_the_next_one(at: float) -> None:
    setup = HostsSetup(size=6, hosts=3, recover=Recover.SHRINK, moves=True, samples=200)
    for schedule in variations(setup, (KILL, Happening(at, "host joins", 3)), 4, 0.2):
        world = run(schedule)
        assert len(world.hosts) == 4, story(schedule)
        joined = world.hosts[-1]
        assert joined.outcome.code == 0, f"{joined.outcome.words}\n{story(schedule)}"
        assert joined.program._host is not None, "it has never been let in"


def test_job_without_a_controller_waits_for_an_unreachable_store() -> None:
    """Longer than it would wait for a controller."""
    away = Happening(0.95, "server away", 0, 2 * JOIN_TIMEOUT_S)
    for schedule in variations(replace(JOB, samples=400), (KILL, away), 3, 0.05):
        world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, [])
        world.outages.append((0.9, 1.0 + 3 * JOIN_TIMEOUT_S))  # in which no host can go on without the controller's two
        assert world.run().exit_code == 0, story(schedule)


def test_job_writes_nothing_before_it_has_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of one name that begin together the one that is refused has changed nothing."""

    def first_of(options, store):
        holders.append(store._world.server.leadership.look().holder)
        return real(options, store)

    holders: list[str] = []
    real = startup._first_of
    monkeypatch.setattr(startup, "_first_of", first_of)
    (schedule,) = variations(replace(JOB, samples=12), (), 1, 0.0)
    run(schedule)
    assert holders == ["10.0.0.1"]


def test_time_to_ask_is_time_in_which_the_store_answers() -> None:
    time = TimeToAsk(lease_s=8.0)
    for now in (0.0, 2.0, 4.0):
        time.answered(now)
    assert time.seconds == 4.0
    time.failed(6.0)
    time.answered(9.0)
    assert time.seconds == 4.0  # nothing is known of what was between
    time.answered(11.0)
    assert time.seconds == 6.0


@pytest.mark.parametrize("answers", [True, False])
def test_time_to_ask_restarts_after_a_pause_of_the_controller(answers: bool) -> None:
    time = TimeToAsk(lease_s=8.0)
    time.answered(0.0)
    time.answered(4.0)
    assert not time.has_stood_still(10.0)
    assert time.has_stood_still(11.0)
    (time.answered if answers else time.failed)(11.0)
    assert time.seconds == 0.0
    assert time.has_stood_still(12.0)
    assert not time.has_stood_still(14.0)


class Dashboard:
    """A live page that only keeps what it gets, and that always has a client."""

    has_clients = True

    def __init__(self, job, **options):
        self.job, self.options = job, options
        self.events, self.samples, self.has_ended = [], [], False
        self.start = lambda: None
        self.add, self.sample = self.events.append, self.samples.append

    async def stop(self):
        self.has_ended = True


def serve_dashboards(monkeypatch: pytest.MonkeyPatch, make) -> None:
    options = HostsWorld._options
    monkeypatch.setattr(HostsWorld, "_options", lambda world: replace(options(world), dashboard="127.0.0.1:8000"))
    monkeypatch.setattr(Machine, "make_dashboard", make)


def test_job_goes_on_without_a_dashboard_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(machine, job, **options):
        dashboard = Dashboard(job, **options)
        dashboard.start = fail
        return dashboard

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    serve_dashboards(monkeypatch, make)
    for schedule in variations(JOB, (KILL,), 2, 0.0):
        told: list[str] = []
        world = HostsWorld(schedule.seed, schedule.setup, schedule.happenings, told)
        assert world.run().exit_code == 0, story(schedule)
        assert [line.partition("] ")[2] for line in told if "dashboard" in line] == [
            'dashboard failed: address=127.0.0.1:8000 error="can\'t start new thread". The job goes on without it'
        ] * 2  # of the first controller, and of the one that takes over


def test_next_controller_serves_the_dashboard_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Dashboard] = []

    def make(machine, job, **options):
        made.append(Dashboard(job, **options))
        return made[-1]

    serve_dashboards(monkeypatch, make)
    for schedule in variations(JOB, (KILL,), 2, 0.0):
        made.clear()
        run(schedule)
        first, second = made
        assert [(each.options["host"], each.options["port"]) for each in made] == [("127.0.0.1", 8000)] * 2
        assert second.options["first_event"] > first.options["first_event"] + len(first.events)
        assert [type(event).__name__ for event in second.events[:2]] == ["LogBegan", "LeaderChanged"]
        assert second.has_ended
        states = [[rank["state"] for rank in sample["ranks"]] for sample in second.samples]
        assert any(len(each) == 6 for each in states), "the survivors' lanes"
        assert second.samples[-1]["status"]["cluster"]["size"] == 6
