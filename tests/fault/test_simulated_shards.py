"""Steps that are deals of shards, and steps with several reductions, in simulated jobs; see `simulator`.

Whatever happens the weights are those of one worker to which nothing happens. Random courses with shards are among
those of test_simulated_jobs.py; here a worker dies at each place of a step, and rules are broken that have to be seen.
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
from ms_kungfu.dataset import batches, sharding
from ms_kungfu.dataset.batches import Batches, ShardBatches
from ms_kungfu.dataset.dealing import Dealing
from ms_kungfu.dataset.recording import Recording
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic.determinism_probe import DeterminismProbe
from ms_kungfu.elastic.shard_loop import ShardLoop
from ms_kungfu.elastic.straggler_weights import StragglerWeights
from ms_kungfu.elastic.undo import LastStep
from ms_kungfu.launcher.state.policy import Recover
from tests.fault.schedules import PLACES_IN_A_STEP, Schedule, first_violation, schedule_of, story
from tests.fault.simulator import shards
from tests.fault.simulator.setting import Happening, Setup, Violation
from tests.fault.simulator.world import World

PLACES_IN_A_CHANGE = ("asks", "is answered", "joining", "joined", "before its word in kungfu/state/root")
PLACES_WHERE_SOMEBODY_IS_NEW = ("kungfu/shards/new", "kungfu/shards/hashes")
SHARDED = Setup(size=3, recover=Recover.REPLACE, shards=6, global_batch=12, samples=31, step_s=0.06, seed=1)


def deaths_at_each_place(seed: int) -> Iterator[tuple[str, Schedule]]:
    """One worker dies there, or one there and another one anywhere a moment later, while a size is wanted perhaps."""
    rng = random.Random(seed)
    for place in PLACES_IN_A_STEP:
        who, at, times = rng.randrange(3), rng.choice((0.0, 0.4, 0.7, 1.2)), rng.choice((0, 0, 1, 2))
        if place.endswith(PLACES_WHERE_SOMEBODY_IS_NEW):
            at, times = 0.0, 0
        happenings = [Happening(at, "kill at", who, times, place)]
        if rng.random() < 0.7:
            happenings.append(Happening(at, "kill at", (who + 1) % 3, 0, rng.choice(PLACES_IN_A_STEP)))
        if rng.random() < 0.5 or place in PLACES_IN_A_CHANGE:
            happenings.append(Happening(rng.choice((0.3, 0.9)), "resize", rng.choice((1, 2, 4, 5))))
        setup = replace(
            SHARDED, sums=rng.choice((1, 2)), uneven=rng.random() < 0.5, size=rng.choice((2, 3, 4)),
            shards=rng.choice((2, 3, 4, 6, 12)), recover=rng.choice((Recover.REPLACE, Recover.SHRINK)),
        )  # fmt: skip
        if rng.random() < 0.4:  # they go on for some steps before there is a version without the dead
            setup = replace(setup, external=True)
            happenings.append(Happening(at, "server away", 0, 1.5))
        yield place, Schedule(seed, setup, tuple(sorted(happenings, key=lambda h: h.at)))


def test_a_death_anywhere_in_a_step_takes_nothing_from_it(everything: bool) -> None:
    struck: set[str] = set()
    for seed in range(40):
        for place, schedule in deaths_at_each_place(seed):
            if seed >= 4 and not everything and place in struck:  # more seeds only for places that weren't reached yet
                continue
            world = World(schedule.seed, schedule.setup, schedule.happenings)
            try:
                world.run()
            except Violation as violation:
                pytest.fail(f"{place}: {violation}\n{story(schedule)}", pytrace=False)
            struck |= {where for kind, where in world.trapped}
    assert struck == set(PLACES_IN_A_STEP)


def test_a_new_job_goes_on_from_a_checkpoint_at_another_size() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        setup = replace(
            SHARDED, checkpoint_every=rng.choice((2, 3)), size=rng.choice((1, 2, 3, 5)), sums=rng.choice((1, 2)),
            shards=rng.choice((3, 4, 6)),
        )  # fmt: skip
        first = World(seed, setup, (Happening(0.4, "resize", rng.randint(1, 4)), Happening(3.0, "kill all")))
        assert first.run().exit_code == 137
        assert first.checkpoints
        again = replace(setup, resume=True, size=rng.choice((1, 2, 4)))
        second = World(seed, again, (Happening(0.3, "kill at", 0, 0, "in a leaf"),), before=first)
        assert second.run().exit_code == 0
        assert min(second.steps) == max(first.checkpoints) + 1


def test_shards_changed_by_a_policy_change_for_all_and_for_joining_workers() -> None:
    """At a step, whichever rank dies around it; a joining worker and a resumed job have them from the members."""
    dealt = set()
    for seed in range(40):
        rng = random.Random(seed)
        first = rng.choice((0, 1, 2))
        resharded = ((first, *rng.choice(((12, 4), (10, 5), (9, 3)))), (first + rng.choice((1, 3)), 8, 4))
        setup = replace(
            SHARDED, resharded=resharded, size=rng.choice((1, 2, 3)), sums=rng.choice((1, 2)), checkpoint_every=3,
            recover=rng.choice((Recover.REPLACE, Recover.SHRINK)), uneven=rng.random() < 0.5,
        )  # fmt: skip
        place = rng.choice(
            (*PLACES_IN_A_STEP[:-5], "before its word in kungfu/policy", "after its word in kungfu/policy")
        )
        happenings = [
            Happening(rng.choice((0.2, 0.5, 0.9)), "kill at", rng.randrange(3), rng.choice((0, 1)), place),
            Happening(rng.choice((0.1, 0.4, 0.8)), "resize", rng.choice((2, 3, 4, 5))),
            Happening(2.5, "kill all"),
        ]
        happenings = happenings if setup.size > 1 else happenings[1:]
        happenings.sort(key=lambda happening: happening.at)
        world = World(seed, setup, tuple(happenings))
        real = world.committed

        def committed(program, epoch, step, share, common, real=real):
            dealt.add((common["global_batch"], common["shards"]))
            real(program, epoch, step, share, common)

        world.committed = committed
        schedule = Schedule(seed, setup, tuple(happenings))
        try:
            world.run()
            if world.checkpoints:
                World(seed, replace(setup, resume=True, size=2), (), before=world).run()
        except Violation as violation:
            pytest.fail(f"{violation}\n{story(schedule)}", pytrace=False)
    assert {(12, 4), (10, 5), (9, 3), (8, 4)} <= dealt


def test_slow_worker_gets_fewer_shards_until_a_resize_resets_the_weights() -> None:
    steps: dict[int, dict[tuple[int, int], list[int]]] = {}  # by the cluster version
    world = World(3, replace(SHARDED, shards=12, size=4), (Happening(0.2, "slow", 1, 3.0), Happening(3.2, "resize", 3)))
    real = world.committed

    def committed(program, epoch, step, share, common):
        steps.setdefault(common["version"], {})[epoch, step.number] = common["weights"]
        real(program, epoch, step, share, common)

    world.committed = committed
    assert world.run().exit_code == 0
    dealt = {version: list(weights.values()) for version, weights in steps.items()}
    assert sorted(dealt) == [0, 1]
    assert dealt[0][:2] == [[], []]
    assert len(dealt[0][-1]) == 4
    assert min(dealt[0][-1]) == dealt[0][-1][1] < 200
    # The ranks are others, whatever their weights were.
    assert dealt[1][:2] == [[], []]
    assert len(dealt[1][2]) == 3


# ---- rules that are broken are found out ----


def deal_by_weights_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were agreed in an earlier cluster version."""
    monkeypatch.setattr(Dealing, "weights", lambda self, dealt: list(self._weights))


def measure_on_over_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members compare speeds at other steps than joining workers."""

    def step_end(self, version, size, shards, weights, counts=True):
        self._version = version
        return real(self, version, size, shards, weights, counts)

    real = StragglerWeights.step_end
    monkeypatch.setattr(StragglerWeights, "step_end", step_end)


def weigh_the_step_but_not_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines go on with the shards that they were dealt before."""

    def weigh(self, weights):
        changes = self.changes
        real(self, weights)
        self.changes = changes

    real = Dealing.weigh
    monkeypatch.setattr(Dealing, "weigh", weigh)


def deal_to_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data doesn't hear of a death in a step."""

    monkeypatch.setattr(Dealing, "deal_to", lambda self, living: None)


def begin_with_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set that begins in a cluster deals to all that this has begun with."""

    def present(self):
        before, found = self.dealt, real(self)
        if self.dealt is not before:
            found = self.dealt = replace(found, members=tuple(range(found.size)))
        return found

    real = Dealing.present
    monkeypatch.setattr(Dealing, "present", present)


def give_a_dead_workers_shards_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without shards, though others have computed them."""

    def commit(self, participants=None):
        return real(self, membership.current().core.sharded_members())

    real = sharding.EpochCursor.commit
    monkeypatch.setattr(sharding.EpochCursor, "commit", commit)


def record_what_is_only_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard that all compute for comparison is on the record of every rank."""

    def batch(self, shard):
        found = real(self, shard)
        if shard in self._looked_at:
            self._dataset._recording.deliver(self._looked_at.pop(shard))
        return found

    real = ShardBatches.batch
    monkeypatch.setattr(ShardBatches, "batch", batch)


def record_what_was_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what was computed: a dead worker's shards are on no record."""

    def batch(self, shard):
        found = real(self, shard)
        self._looked_at.clear()
        return found

    def deliver(self, share):
        if self._delivered and any(first < last_of for first, _ in share for _, last_of in self._delivered[-1]):
            return
        deliver_really(self, share)

    real, deliver_really = ShardBatches.batch, Recording.deliver
    monkeypatch.setattr(ShardBatches, "batch", batch)
    monkeypatch.setattr(Recording, "deliver", deliver)


def compute_what_one_had_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has brought all its shards waits for the sum, also if another one has died."""

    def make(core, first, compute):
        for shard in core.missing_shards():
            core.take_shard(shard)
            loss, over = compute(shard)
        while not over:
            core.take_no_shard()
            loss, over = compute(first)
        return loss

    monkeypatch.setattr(ShardLoop, "_make", staticmethod(make))


def end_the_step_with_ones_own_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is committed though a shard is missing, which another rank owes."""

    def make(core, first, compute):
        for shard in core.missing_shards():
            core.take_shard(shard)
            loss, _ = compute(shard)
        return loss

    monkeypatch.setattr(ShardLoop, "_make", staticmethod(make))


def bring_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def hashes(compute):
        core = membership.current().core
        if 0 in core.missing_shards():
            core.take_shard(0)
            compute(0)
        return [0, 0, 0]

    monkeypatch.setattr(DeterminismProbe, "_hashes", staticmethod(hashes))


def draw_by_what_is_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers are keyed by the steps that this process has seen."""

    def next_key(self):
        seen[self._dataset] = seen.get(self._dataset, -1) + 1
        return real(self)[0], seen[self._dataset]

    seen: dict[Shares, int] = {}
    real = ShardBatches.next_key
    monkeypatch.setattr(ShardBatches, "next_key", next_key)


def count_a_short_shard_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches.shards, "last_share", lambda length, unit: 1.0)


def read_a_dead_workers_shard_from_the_epochs_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_(self, where, size):
        return real(self, where if where.size > self._dataset._cursor.unit else where - where[0], size)

    real = Batches._open
    monkeypatch.setattr(Batches, "_open", open_)


def undo_a_step_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with several reductions."""

    def ended(self, step):
        return real(self, step) and not membership.lost_ranks()

    real = LastStep.ended
    monkeypatch.setattr(LastStep, "ended", ended)


# Of what the simulator has in the place of ops_src/shards: that it would see it there.


def add_up_by_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's sum, then those of the ranks in their order."""

    def total(self, nodes, node=None):
        values = list(nodes.values())
        while len(values) > 1:
            values[:2] = [shards.plus(*values[:2])]
        return values[0]

    monkeypatch.setattr(shards.Tree, "sum", total)


def forget_a_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a dead worker."""

    def lose(dealt, rank):
        dealt[rank] = dealt[rank][:-1]
        real(dealt, rank)

    real = shards.lose
    monkeypatch.setattr(shards, "lose", lose)


def deal_a_leaf_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(dealt, rank):
        lost = dealt[rank]
        real(dealt, rank)
        for other in sorted(dealt)[:2]:
            dealt[other] = sorted({*dealt[other], *lost[:1]})

    real = shards.lose
    monkeypatch.setattr(shards, "lose", lose)


def deal_to_whoever_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is known here to have died gets nothing, whatever the others know."""
    real = shards.Step._move_to
    monkeypatch.setattr(
        shards.Step, "_move_to", lambda self, generation: real(self, max(generation, len(self._segment.deaths)))
    )


def wait_though_one_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has got a dead worker's shards waits for the sum first."""

    def part(self, generation, group):
        self._move_to(generation)
        missing, self.missing = self.missing, list
        try:
            return real(self, generation, group)
        finally:
            self.missing = missing

    real = shards.Step._part
    monkeypatch.setattr(shards.Step, "_part", part)


BREAKAGES = [
    deal_by_weights_of_other_ranks,
    measure_on_over_versions,
    weigh_the_step_but_not_the_data,
    deal_to_the_dead,
    begin_with_the_dead,
    give_a_dead_workers_shards_back,
    record_what_is_only_looked_at,
    record_what_was_dealt,
    compute_what_one_had_at_first,
    end_the_step_with_ones_own_shards,
    bring_what_is_compared,
    draw_by_what_is_known_here,
    count_a_short_shard_as_a_whole_one,
    read_a_dead_workers_shard_from_the_epochs_begin,
    undo_a_step_of_shards,
    add_up_by_owners,
    forget_a_leaf,
    deal_a_leaf_twice,
    deal_to_whoever_is_here,
    wait_though_one_owes,
]


def sharded_schedules() -> Iterator[Schedule]:
    told = (schedule for seed in range(100) for _, schedule in deaths_at_each_place(seed))
    random_ones = (schedule for schedule in map(schedule_of, range(400)) if schedule.setup.shards is not None)
    return itertools.chain.from_iterable(zip(told, random_ones))


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_broken_rule_of_shards_is_found_out(breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(monkeypatch)
    print(f"{breakage.__name__}: {first_violation(sharded_schedules())}")


# ---- steps with several reductions ----


def update_though_somebody_died_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is never undone."""
    monkeypatch.setattr(LastStep, "ended", lambda self, step: bool(self._reductions.take_commits()))


def undo_nothing_but_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(self):
        real(self)
        self._kept, self._host = self._kept and [], []

    real = LastStep.begins
    monkeypatch.setattr(LastStep, "begins", begins)


def lose_the_samples_of_an_undone_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "take_back", lambda self, participants: self.commit(participants))


UNDOING = [update_though_somebody_died_between, undo_nothing_but_the_count, lose_the_samples_of_an_undone_step]


def schedules_of_several_reductions() -> Iterator[Schedule]:
    places = ("before the reduction", "after the reduction", "before its word in grad/0", "after its word in grad/1")
    for seed in range(200):
        rng = random.Random(seed)
        setup = Setup(size=rng.choice((2, 3, 4)), recover=Recover.REPLACE, reductions=rng.choice((2, 3)), step_s=0.06)
        happenings = [Happening(0.3, "kill at", rng.randrange(3), rng.randrange(3), rng.choice(places))]
        if seed % 2:
            happenings.append(Happening(0.3, "kill at", 8, rng.randrange(9), rng.choice(places)))
        if seed % 3 == 0:
            happenings.append(Happening(0.2, "resize", rng.randint(2, 5)))
        yield Schedule(seed, setup, tuple(sorted(happenings, key=lambda h: h.at)))


def test_a_step_in_which_a_worker_dies_between_two_reductions_is_undone() -> None:
    undone = 0
    for schedule in itertools.islice(schedules_of_several_reductions(), 40):
        told: list[str] = []
        world = World(schedule.seed, schedule.setup, schedule.happenings, told)
        try:
            world.run()
        except Violation as violation:
            pytest.fail(f"{violation}\n{story(schedule)}", pytrace=False)
        undone += any("step undone: " in line for line in told)
    assert undone > 8


@pytest.mark.parametrize("breakage", UNDOING, ids=lambda breakage: breakage.__name__)
def test_a_broken_rule_of_undoing_is_found_out(breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(monkeypatch)
    print(f"{breakage.__name__}: {first_violation(schedules_of_several_reductions())}")
