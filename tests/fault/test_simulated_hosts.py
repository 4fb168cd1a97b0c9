"""Jobs over several hosts on a virtual clock: cables that are cut, hosts that stand still, come, go; see `simulator`.

Each seed is another job: ``python -m tests.fault.simulate SEED --hosts --story`` tells what happens in it. More of it:
``python -m tests.campaigns simulated-hosts``.
"""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from ms_kungfu.elastic import state_transfer
from ms_kungfu.launcher import control
from ms_kungfu.launcher.agent import agent, segments, succession
from ms_kungfu.launcher.agent import workers as host_workers
from ms_kungfu.launcher.controller import broker, context, reachability, remote, workers
from ms_kungfu.launcher.state import lost_hosts
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.start_error import StartError
from tests.fault.schedules import (
    Schedule,
    broken_in,
    first_violation,
    run,
    schedule_of_hosts,
    story,
    variations,
    violation_of,
)
from tests.fault.simulator import host
from tests.fault.simulator.hosts_world import HOST_TIMEOUT_S, HostsSetup, HostsWorld
from tests.fault.simulator.setting import Happening, Violation

BATCHES = 4
KINDS = 40  # the first seeds, which the test of their kinds plays


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_course_of_events_breaks_a_promise(batch: int, everything: bool) -> None:
    broken = broken_in(batch, BATCHES, range(KINDS, 600 if everything else 60), schedule_of_hosts)
    if broken is not None:
        pytest.fail(broken, pytrace=False)


def test_a_seed_gives_the_same_course_each_time() -> None:
    for seed in (5, 77):
        assert story(schedule_of_hosts(seed)) == story(schedule_of_hosts(seed))


def test_the_courses_are_of_many_kinds() -> None:
    schedules = [schedule_of_hosts(seed) for seed in range(400)]
    kinds = {happening.kind for schedule in schedules for happening in schedule.happenings}
    assert kinds >= {"cut", "isolate", "pause host", "reset", "kill launcher", "host leaves", "host joins", "resize"}
    told: list[str] = []
    outcomes = [run(schedule, told) for schedule in schedules[:KINDS]]
    assert sum(outcome.exit_code == 0 for outcome in outcomes) > 25
    for sentence in ("host lost: ", "no message came from", "host left: ", "host joined: "):
        assert any(sentence in line for line in told), sentence


def test_pause_that_ends_a_first_call_breaks_no_promise() -> None:
    violation = violation_of(schedule_of_hosts(81544))
    assert violation is None, f"{violation}\n{story(schedule_of_hosts(81544))}"


# ---- a protocol that is broken is found out, in few schedules and with a short story ----


def follow_a_wish_before_all_hosts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ended the job once."""
    monkeypatch.setattr(context.JobContext, "has_begun", property(lambda self: True))


def try_the_first_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call between two hosts that fails ends the job, while it costs a later version a moment."""

    async def choose_first(self, cluster):
        try:
            await self.commit_version(cluster)
        except OSError as error:
            raise StartError(str(error)) from error

    monkeypatch.setattr(workers.WorkerManager, "_commit_first", choose_first)


def leave_what_is_superseded_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts keep parts of a version that no controller knows any more."""

    def close(self):
        if self._is_made:
            real(self)

    real = remote.SpreadSegment.close
    monkeypatch.setattr(remote.SpreadSegment, "close", close)


def tell_of_a_lost_host_before_its_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_host(self, host, processes, reason):
        self._segments.lose_host(host)
        real(self, host, processes, reason)

    real = broker.Broker.lose_host
    monkeypatch.setattr(broker.Broker, "lose_host", lose_host)


def tell_each_host_of_deaths_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host enters the deaths of its own workers first."""

    def tell_exited(self, event):
        for segment in self._before_exit.__self__.open.values():
            for rank in segment.ranks():
                holder = segment._board.attached.get(rank) if segment._transport is not None else None
                if holder is not None and holder.key == event.key:
                    segment.mark_lost(rank, "it has ended", True, True)
        real(self, event)

    real = host_workers.HostWorkers._tell_exited
    monkeypatch.setattr(host_workers.HostWorkers, "_tell_exited", tell_exited)


def let_leases_run_on_while_one_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(self, now, heard):
        return [who for who, when in heard.items() if now >= when + self._limit_s]

    monkeypatch.setattr(lost_hosts.Leases, "run_out", run_out)


def never_give_up_who_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability.Reachability, "_evict_who_is_apart", lambda self: None)


def obey_a_head_that_isnt_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is cut off goes on for ever, and so do its connections."""
    monkeypatch.setattr(agent.Agent, "_watch_controller", lambda self, channel, leases: None)
    monkeypatch.setattr(control.Channel, "set_silence", lambda self, seconds: None)


def take_the_links_from_workers_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host that wakes did: its workers failed with an error of the program's, just before they were ended."""

    def close(self):
        if self in asked:
            real(self)
        asked.append(self)

    real, asked = host.Guard.close, []
    monkeypatch.setattr(host.Guard, "close", close)


def give_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner gives what it has, to itself and the others of its host."""
    real = state_transfer.from_the_nearest
    monkeypatch.setattr(state_transfer, "from_the_nearest", lambda root, content: real(root, lambda: 0))


THREE = HostsSetup(size=6, recover=Recover.REPLACE)
BREAKAGES = {
    follow_a_wish_before_all_hosts_are_there: (THREE, (Happening(0.01, "resize", 4),)),
    try_the_first_version_once: (HostsSetup(hosts=3, size=6), (Happening(0.05, "reset", 2, 0.0, "control"),)),
    leave_what_is_superseded_while_it_is_made: (
        THREE,
        (Happening(0.8, "resize", 3), Happening(0.81, "resize", 5)),
    ),
    tell_of_a_lost_host_before_its_deaths: (THREE, (Happening(0.8, "kill launcher", 1),)),
    tell_each_host_of_deaths_in_an_order_of_its_own: (
        THREE,
        (Happening(0.8, "kill member", 2), Happening(0.801, "kill member", 4)),
    ),
    let_leases_run_on_while_one_stands_still: (THREE, (Happening(0.8, "pause all", 0, 2 * HOST_TIMEOUT_S),)),
    never_give_up_who_is_apart: (THREE, (Happening(0.8, "cut", 3, 4 * HOST_TIMEOUT_S, "both ways"),)),
    obey_a_head_that_isnt_heard: (THREE, (Happening(0.8, "isolate", 1, 12 * HOST_TIMEOUT_S),)),
    take_the_links_from_workers_that_run: (THREE, (Happening(0.8, "isolate", 1, 4 * HOST_TIMEOUT_S),)),
    give_without_a_look: (THREE, (Happening(0.8, "resize", 3), Happening(1.2, "resize", 6))),
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_broken_protocol_is_found_out(breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(monkeypatch)
    print(f"{breakage.__name__}: {first_violation(variations(*BREAKAGES[breakage], 40, 0.05))}")


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_intact_protocol_keeps_every_promise(breakage) -> None:
    for schedule in variations(*BREAKAGES[breakage], 2, 0.05):
        violation = violation_of(schedule)
        assert violation is None, f"{violation}\n{story(schedule)}"


def test_a_first_version_that_can_never_be_made_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make(*_):
        raise OSError("no memory")

    monkeypatch.setattr(segments.HostSegment, "make", make)
    told: list[str] = []
    with pytest.raises(Violation, match="hasn't begun: the shared memory of 6 workers can't be made: .*no memory"):
        run(Schedule(0, THREE, ()), told)
    tried = [line for line in told if line.endswith('no memory" action=retry')]
    assert tried, told
    assert len(tried) <= THREE.hosts, "once for each that says so"


@pytest.mark.parametrize(("pause_s", "is_excused"), [(4.0, False), (6.0, True)])
def test_missing_host_is_excused_only_by_a_pause_beyond_its_call(
    pause_s: float, is_excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(self, wait_s):
        if self.options.host.name == "10.0.0.3":
            raise StartError("it doesn't call")
        return await real(self, wait_s)

    real = succession.Succession.first
    monkeypatch.setattr(succession.Succession, "first", first)
    violation = violation_of(Schedule(0, THREE, (Happening(0.05, "pause all", 0, pause_s),)))
    assert (violation is None) == is_excused, violation
    assert is_excused or "the job hasn't begun: no message came from 10.0.0.3" in str(violation)


def test_schedule_beyond_the_slots_left_waits_and_training_goes_on() -> None:
    """A host fails, and the size of the next entry fits on no others."""
    setup = HostsSetup(size=3, hosts=2, slots=2, recover=Recover.SHRINK, schedule=((6, 3), (9, 4)), samples=120)
    for seed in range(5):
        told: list[str] = []
        outcome = run(Schedule(seed, setup, (Happening(0.7, "kill launcher", 1),)), told)
        assert outcome.exit_code == 0, "\n".join(told)
        assert "host lost: " in "\n".join(told)
        assert "resize waits: workers=" in "\n".join(told), "\n".join(told)


def test_entry_that_takes_back_a_size_being_written_is_followed() -> None:
    """The entry of the next step has the size that there is, and the one before may be on its way to the store."""
    setup = HostsSetup(size=1, hosts=2, slots=2, recover=Recover.SHRINK, schedule=((7, 3), (8, 1)))
    for seed in range(8):
        run(Schedule(seed, setup, ()))


@pytest.mark.parametrize("at", [1.5, 2.0, 2.51])
def test_interrupted_job_ends_with_a_checkpoint_of_its_last_step(at: float) -> None:
    """Both hosts' workers hear of it in one step, which all end; no checkpoint is due before."""
    setup = HostsSetup(size=4, hosts=2, slots=2, checkpoint_every=1000, step_s=0.2, samples=100_000)
    world = HostsWorld(0, setup, (Happening(at, "interrupt", 1),), [])
    assert world.run().exit_code == 128 + signal.SIGINT
    assert list(world.checkpoints) == [max(world.steps)]
