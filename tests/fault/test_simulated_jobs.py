"""Thousands of courses of joins, deaths, hangs, resizes and delays, on a virtual clock; see `simulator`.

Each seed is another job: ``python -m tests.fault.simulate SEED --story`` tells what happens in it. More of them:
``python -m tests.campaigns simulated-jobs``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from ms_kungfu import membership
from ms_kungfu.dataset import sharding
from ms_kungfu.elastic import state_transfer
from ms_kungfu.elastic.asynchronous import AsynchronousSteps
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.launcher.controller import broker, ending
from ms_kungfu.launcher.state import versions
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.membership import joining, step_agreement
from tests.conftest import long
from tests.fault.schedules import (
    Schedule,
    broken_in,
    first_violation,
    run,
    schedule_of,
    shrunk,
    story,
    violation_of,
)
from tests.fault.simulator import collectives
from tests.fault.simulator.setting import Happening, Setup
from tests.fault.simulator.world import World

BATCHES = 4
KINDS = 60  # the first seeds, which the test of their kinds plays


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_course_of_events_breaks_a_promise(batch: int, everything: bool) -> None:
    broken = broken_in(batch, BATCHES, range(KINDS, 2000 if everything else 200), schedule_of)
    if broken is not None:
        pytest.fail(broken, pytrace=False)


def test_a_seed_gives_the_same_course_each_time() -> None:
    for seed in (5, 45):
        assert story(schedule_of(seed)) == story(schedule_of(seed))


def test_the_courses_are_of_many_kinds() -> None:
    schedules = [schedule_of(seed) for seed in range(400)]
    kinds = {happening.kind for schedule in schedules for happening in schedule.happenings}
    assert kinds >= {"kill member", "kill newcomer", "stop", "resize", "evict", "terminate", "server loses all"}
    outcomes = [run(schedule) for schedule in schedules[:KINDS]]
    assert sum(outcome.exit_code == 0 for outcome in outcomes) > 40
    assert sum(outcome.deaths > 1 for outcome in outcomes) > 10
    for schedule, outcome in zip(schedules, outcomes):
        assert outcome.exit_code or outcome.steps > (5 if schedule.setup.step_s < 0.1 else 2), schedule
    assert sum(schedule.setup.asynchronous for schedule in schedules) > 80


# ---- prestarted workers ----

AHEAD = Setup(size=1, schedule=((6, 2), (13, 4)), wait=True, prepare_s=0.1)


def test_workers_of_a_schedule_are_ready_before_its_entry() -> None:
    for seed in range(20):
        told: list[str] = []
        run(Schedule(seed, AHEAD, ()), told)
        story = "\n".join(told)
        for version in (1, 2):
            wanted, committed = (story.index(f"cluster {what}: version={version}") for what in ("desired", "committed"))
            assert "worker started: " not in story[wanted:committed], story
            assert (
                story[:wanted].count("worker ready: ") == story[:committed].count("standby used: ") == 2 * version - 1
            ), story
        assert story.count("standby used: ") == 3


def test_no_worker_is_prestarted_without_memory_for_it() -> None:
    for processes, ahead in ((2, 0), (3, 1), (4, 2), (5, 3)):
        told: list[str] = []
        run(Schedule(1, replace(AHEAD, processes=processes), ()), told)
        story = "\n".join(told)
        assert story.count("standby used: ") == ahead, story
        assert ("no memory for a standby" in story) == (ahead < 3)
        assert "cluster committed: version=2 workers=4" in story


# ---- what was wrong once ----

STORIES = [
    # A worker that is told to leave still has its port when the next one dies and is replaced.
    (Setup(size=4, recover=Recover.REPLACE), (Happening(0.18, "terminate", 0), Happening(0.25, "kill member", 6))),
    # The only other one dies while a worker leaves.
    (Setup(size=2, recover=Recover.REPLACE), (Happening(0.251, "kill member", 7), Happening(0.252, "terminate", 0))),
    # The workers that would stay die, and the one that was to go is the last with the state.
    (
        Setup(size=3),
        (Happening(0.039, "resize", 2), Happening(0.15, "kill member", 6), Happening(0.15, "kill member", 2)),
    ),
    # All workers with the state die or leave when a joining worker is just admitted.
    (
        Setup(size=3, recover=Recover.REPLACE, prepare_s=0.1),
        (Happening(0.926, "kill member", 1), Happening(1.213, "evict", 7), Happening(1.28, "kill member", 0)),
    ),
    # A newcomer that was started for the newest version dies, and an older one means another process by its peer ID.
    (
        Setup(size=3, step_s=0.6),
        (
            Happening(0.83, "resize", 5),
            Happening(0.88, "resize", 1),
            Happening(1.08, "resize", 5),
            Happening(1.12, "resize", 1),
            Happening(1.17, "resize", 2),
            Happening(1.2, "resize", 5),
            Happening(2.17, "kill newcomer", 0),
        ),
    ),
    (
        Setup(size=2, step_s=0.6, prepare_s=1.0),
        (
            Happening(0.9, "resize", 1),
            Happening(1.1, "resize", 3),
            Happening(1.2, "resize", 4),
            Happening(1.7, "kill newcomer", 0),
        ),
    ),
    # The only worker that would stay dies when all have agreed on it, and others have the state.
    (
        Setup(size=3, step_s=0.3),
        (Happening(0.9, "resize", 1), Happening(1.0, "resize", 5), Happening(1.05, "kill member", 0)),
    ),
    # The same, where no request wants more: one is there in the end.
    (Setup(size=2, step_s=0.3, recover=Recover.REPLACE), (Happening(0.9, "resize", 1), Happening(1.0, "kill lone"))),
    # A wish for what the launcher is about to write because of a death: it is a wish all the same.
    (
        Setup(size=2, recover=Recover.REPLACE, external=True),
        (Happening(0.9, "resize", 1), Happening(0.91, "kill member", 1)),
    ),
    # Joining workers of a request don't take the slot of a failed one, which is in that request.
    (
        Setup(size=3, recover=Recover.REPLACE, external=True),
        (Happening(0.9, "kill member", 1), Happening(0.88, "resize", 5)),
    ),
    # A newcomer dies when the members have agreed on it, or are about to.
    (
        Setup(size=2, step_s=0.6),
        (Happening(0.286, "resize", 3), Happening(0.796, "kill lone", 2), Happening(0.847, "kill newcomer", 2)),
    ),
    (
        Setup(size=2, recover=Recover.REPLACE, external=True),
        (Happening(0.286, "resize", 4), Happening(0.8, "server away", 0, 2.0), Happening(0.85, "kill newcomer", 1)),
    ),
    # Workers are told to leave where others die, and all but one.
    (Setup(size=4, min_size=2), (Happening(0.3, "terminate", 0), Happening(0.31, "kill member", 1))),
    (Setup(size=3), (Happening(0.3, "terminate", 0), Happening(0.3, "terminate", 1))),
    # A wish that was a mistake, and one that has no room at all.
    (Setup(size=2), (Happening(0.5, "resize", 8), Happening(0.6, "resize", 2), Happening(0.9, "resize", 3))),
    (Setup(size=2), (Happening(0.5, "resize", 9), Happening(0.6, "resize", 3))),
    # No descriptor is left for the shared memory of a new version.
    (
        Setup(size=2),
        (Happening(0.5, "no descriptors", 0, 1.0), Happening(0.6, "resize", 3), Happening(0.9, "kill member", 1)),
    ),
    # A process that can't be killed, for a while or for ever: a member, and one that is not needed any more.
    (Setup(size=3), (Happening(0.5, "freeze", 1, 25.0),)),
    (Setup(size=3, recover=Recover.REPLACE), (Happening(0.5, "freeze", 0),)),
    (Setup(size=1), (Happening(0.9, "resize", 4), Happening(1.2, "freeze", 2), Happening(1.3, "resize", 2))),
    # A worker that was prestarted for a schedule fails: while it starts, when it is ready, when it is just wanted.
    *(
        (replace(AHEAD, recover=recover, wait=wait), (Happening(when, "kill newcomer", 0),))
        for recover, wait in ((Recover.SHRINK, True), (Recover.REPLACE, False))
        for when in (0.26, 0.4, 0.65)
    ),
    # Another client wants another size, and the lowest rank dies, which has sent the schedule.
    (AHEAD, (Happening(0.4, "resize", 3), Happening(0.9, "resize", 1))),
    (
        replace(AHEAD, size=2, schedule=((6, 4),)),
        (Happening(0.3, "kill member", 0), Happening(0.5, "kill newcomer", 1)),
    ),
    # A checkpoint is lost with its writer.
    (
        Setup(size=3, recover=Recover.REPLACE, checkpoint_every=4),
        (Happening(0.1, "kill at", 0, 0, "in a checkpoint"),),
    ),
]


def stories(seeds: int) -> Iterator[Schedule]:
    """Each of them with other delays, and a little earlier or later."""
    for seed in range(seeds):
        for setup, happenings in STORIES:
            rng = random.Random(seed)
            moved = [replace(h, at=h.at + rng.uniform(0, 0.03)) for h in happenings]
            yield Schedule(seed, setup, tuple(sorted(moved, key=lambda h: h.at)))


def test_courses_that_failed_once_break_no_promise() -> None:
    for schedule in stories(3):
        violation = violation_of(schedule)
        assert violation is None, f"{violation}\n{story(schedule)}"


@pytest.mark.parametrize("wait", [False, True])
def test_size_that_the_server_lost_unread_is_written_again(wait: bool) -> None:
    """The workers wrote it, and the launcher had not read it yet."""
    setup = Setup(size=2, external=True, schedule=((5, 4),), wait=wait, samples=240, prepare_s=0.5)
    for hundredth in range(70, 110):
        loss = Happening(hundredth / 100, "server loses all", 0, 1.0)
        world = World(70750, setup, (loss,))
        world.run()
        assert world.broker.versions.current.size == 4, story(Schedule(70750, setup, (loss,)))


@pytest.mark.parametrize(
    ("kind", "before", "prepare_s"),
    [
        ("server loses all", Happening(1.7, "resize", 3), 3.0),  # whose workers are still starting
        ("server is as at first", Happening(0.5, "resize", 2), 0.5),
    ],
)
def test_a_size_that_is_asked_for_while_the_server_forgets_comes_true(kind, before, prepare_s) -> None:
    """The workers, which ask for it, and the launcher, which writes the cluster to the server, come at one moment."""
    for seed in range(30):
        setup = Setup(size=1, external=True, schedule=((14, 4),), samples=240, step_s=0.1, prepare_s=prepare_s)
        outage = Happening(2.0, kind, 0, 0.5 + 0.03 * seed)
        schedule = Schedule(seed, setup, (before, outage))
        world = World(schedule.seed, schedule.setup, schedule.happenings)
        world.run()
        assert world.broker.versions.current.size == 4, story(schedule)


# ---- a worker that loops for ever, or for long ----


@pytest.mark.parametrize("recover", [Recover.SHRINK, Recover.REPLACE])
def test_stuck_worker_is_ended_before_the_others_give_up(recover: Recover) -> None:
    for seed, (who, at) in enumerate(itertools.product(range(3), (0.9, 1.13, 1.37))):
        schedule = Schedule(seed, Setup(size=3, recover=recover, samples=240), (Happening(at, "loop", who),))
        outcome = run(schedule)
        assert (outcome.exit_code, outcome.deaths) == (0, 1), story(schedule)


def test_worker_that_arrives_late_is_ended_or_goes_on() -> None:
    """Never do the others fail, whenever it comes: also between the decision to end it and its end."""
    outcomes, spared = set(), 0
    for tenths in range(270, 312, 2):
        schedule = Schedule(tenths, Setup(size=2, samples=240), (Happening(0.9, "loop", 1, tenths / 10),))
        told: list[str] = []
        outcome = run(schedule, told)
        assert outcome.exit_code == 0, story(schedule)
        outcomes.add(outcome.deaths)
        spared += outcome.deaths == 0 and any("no rank waits for worker 1" in line for line in told)
    assert outcomes == {0, 1}
    assert spared > 0


def test_worker_that_is_stuck_a_second_time_is_logged_again() -> None:
    happenings = Happening(0.9, "loop", 1, 29.0), Happening(31.0, "loop", 1, 29.0)
    schedule = Schedule(0, Setup(size=2, recover=Recover.FAIL, samples=240), happenings)
    told: list[str] = []
    assert run(schedule, told).exit_code == 0, story(schedule)
    lines = [line.partition("stuck worker: ")[2].split()[-1] for line in told if "stuck worker: " in line]
    assert lines == ["action=none", "more"] * 2, "\n".join(told)


@pytest.mark.parametrize("recover", [Recover.SHRINK, Recover.REPLACE])
def test_job_with_all_workers_terminated_ends_in_one_way(recover: Recover) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        happenings = [Happening(0.5 + rng.uniform(0, 0.1), "terminate all")]
        if seed % 3 == 0:
            happenings.append(Happening(happenings[0].at + rng.uniform(-0.3, 0.0), "resize", rng.randrange(1, 5)))
        setup = Setup(size=1 + seed % 4, recover=recover, min_size=2 if seed % 4 == 3 else 1)
        schedule = Schedule(seed, setup, tuple(sorted(happenings, key=lambda h: h.at)))
        outcome = run(schedule)
        assert outcome.exit_code == 143, f"{outcome.reason}\n{story(schedule)}"
        assert outcome.reason.startswith("interrupted by SIGTERM at worker "), outcome.reason


def test_a_failed_worker_is_replaced_after_growth_by_schedule() -> None:
    grown = Setup(size=1, schedule=((4, 2),), wait=True, recover=Recover.REPLACE, samples=120)
    for seed in range(4):
        told: list[str] = []
        run(Schedule(seed, grown, (Happening(3.0, "kill member", seed % 2),)), told)
        _, _, after = "\n".join(told).partition("a new worker is started")
        assert " workers=2 step=" in after, "\n".join(told)


@pytest.mark.parametrize("external", [False, True])
def test_a_deleted_cluster_is_put_back_before_anything_fails(external: bool) -> None:
    later = 22.0 if external else 2.5  # a launcher looks once a long poll whether an external server has its cluster
    happenings = Happening(0.8, "delete cluster"), Happening(later, "resize", 4)
    for seed in range(2):
        told: list[str] = []
        run(Schedule(seed, Setup(size=2, external=external, samples=120), happenings), told)
        assert " workers=4 step=" in "\n".join(told), "\n".join(told)


# ---- a protocol that is broken is found out, in few schedules and with a short story ----


def forget_the_finished_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation is done again whenever a member has died, also where its part is finished."""

    def attempt(self, key, members, brings, root):
        if any(rank in self.segment.deaths for rank in members if rank != root):
            raise collectives.Lost
        return real(self, key, members, brings, root)

    real = collectives.Core._attempt
    monkeypatch.setattr(collectives.Core, "_attempt", attempt)


def settle_each_group_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self, names, contribution):
        results = [self.run(name, contribution) for name in names]
        self.committed_in.append(results[-1][1] + 1)
        return [brought for brought, _ in results]

    monkeypatch.setattr(collectives.Core, "commit", commit)


def adopt_what_oneself_has_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    real = collectives.Core.all_reduce

    def all_reduce(self, name, input, output, op, dtype=-1):
        own = int(input[0])
        real(self, name, input, output, op, dtype)
        output[0] = own

    monkeypatch.setattr(collectives.Core, "all_reduce", all_reduce)


def count_a_dead_workers_share_as_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sharding.EpochCursor.commit
    monkeypatch.setattr(sharding.EpochCursor, "commit", lambda self, participants=None: real(self, None))


def let_newcomers_begin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = joining.enter_first

    def enter_first(member, granted):
        real(member, granted)
        if not member.detached:
            member.received = member.core.state_root() == member.core.size()

    monkeypatch.setattr(joining, "enter_first", enter_first)


def go_over_to_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any member makes the version that was agreed on the committed one, whichever members are left in it."""

    def would_commit(self, request):
        return self.clusters.get(request.version) if request.member_of == self.committed else None

    monkeypatch.setattr(versions.ClusterVersions, "would_commit", would_commit)
    monkeypatch.setattr(versions.ClusterVersions, "_keeps_the_state", lambda self, cluster: True)
    monkeypatch.setattr(versions.ClusterVersions, "_supersede", lambda self: None)


def choose_first_and_make_the_segment_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members hear of a version before it has shared memory."""

    def announce(self):
        version, committed = self.versions.preparable(), self.versions.committed
        if version is not None and committed is not None and version > max(committed, self._prepared):
            self._prepared = version
            self._segments.open[committed].announce(version)

    monkeypatch.setattr(broker.Broker, "_prepare", announce)


def wait_for_who_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending.EndOfWorkers, "_give_up_on", lambda self, process: None)


def count_sync_points_over_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that stay have been to more sync points than there were in the version, and joining workers have not."""

    def enter(member, granted, has_state):
        been_to = member.sync_points
        real(member, granted, has_state)
        member.sync_points = been_to

    real = joining.enter
    monkeypatch.setattr(joining, "enter", enter)
    monkeypatch.setattr(step_agreement, "enter", enter)


def hand_over_what_a_joiner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    real = state_transfer.from_lowest_rank
    monkeypatch.setattr(
        state_transfer,
        "from_lowest_rank",
        lambda receive, able=True: real(receive, True, preferred=membership.size() - 1),
    )


def leave_a_lost_checkpoint_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointing, "make_up", lambda self, step: None)


def go_on_from_ones_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous workers come together, and each goes on with its own step."""
    monkeypatch.setattr(AsynchronousSteps, "_take_position", lambda self, furthest: None)


BREAKAGES = [
    forget_the_finished_word,
    settle_each_group_by_itself,
    adopt_what_oneself_has_heard_of,
    count_a_dead_workers_share_as_trained,
    long(let_newcomers_begin_alone),
    count_sync_points_over_versions,
    go_over_to_the_dead,
    choose_first_and_make_the_segment_then,
    wait_for_who_cannot_be_killed,
    hand_over_what_a_joiner_has,
    leave_a_lost_checkpoint_lost,
    go_on_from_ones_own_place,
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_broken_protocol_is_found_out(breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(monkeypatch)
    told, random_ones = stories(40), map(schedule_of, range(200))
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(told, random_ones))
    print(f"{breakage.__name__}: {first_violation(schedule for schedule in in_turn if schedule is not None)}")


def test_shrinking_leaves_only_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    count_a_dead_workers_share_as_trained(monkeypatch)
    harmless = [Happening(0.2 + 0.1 * i, "slow", i, 0.3) for i in range(5)]
    kills = [Happening(0.3 + 0.02 * i, "kill member", i) for i in range(4)]
    many = Schedule(1, replace(Setup(), size=4, recover=Recover.REPLACE), tuple(sorted([*harmless, *kills], key=str)))
    assert violation_of(many) is not None
    assert all(happening.kind == "kill member" for happening in shrunk(many).happenings)
