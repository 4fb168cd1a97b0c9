"""The ledger and its audit where steps are deals of shards: all of a step is trained, whichever rank dies in it."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kungfu import _core
from ms_kungfu.dataset import audit, ledger, shards
from ms_kungfu.dataset.sharding import EpochCursor, count, part
from tests.conftest import examples
from tests.unit.test_ledger import at, change, fake_runtime, verdict  # noqa: F401  # fake_runtime: a fixture

SHARDS, UNIT = 8, 3


class Worker:
    made = 0

    def __init__(self, folder, walk):
        Worker.made += 1
        self.uid, self.walk = Worker.made, walk
        self.ledger = ledger.Ledger(folder, 0, sharded=True)

    def write(self, what, *arguments):
        ledger.runtime.uid = lambda: self.uid
        getattr(self.ledger, what)(*arguments)


def lose(deal, rank):
    """As ops_src/shards/partition.cc has it."""
    lost, done = deal.pop(rank), 0
    for place, other in enumerate(sorted(deal), 1):
        until = len(lost) * place // len(deal)
        deal[other] = sorted(deal[other] + lost[done:until])
        done = until


def train_step(members, deaths, count_of_shards, weights, sums, rng):
    """The shards delivered to each living rank, in their order; deaths are spread over the sums of the step."""
    delivered = {rank: [] for rank in members}
    deaths = list(deaths)
    for number in range(sums):
        living = [rank for rank in members if rank in delivered]
        own = [weights[members.index(rank)] for rank in living] if weights else []
        deal = {rank: list(_core.partition_shards(count_of_shards, living, own, rank)) for rank in living}
        dying = deaths if number == sums - 1 else [rank for rank in deaths if rng.random() < 0.5]
        for rank in [None, *dying]:
            if rank is not None:
                lose(deal, rank)
                del delivered[rank]
            for other, own in deal.items():
                delivered[other] += [s for s in own or [count_of_shards - 1] if s not in delivered[other]]
        deaths = [rank for rank in deaths if rank not in dying]
    return delivered


def simulate(folder, rng, total, epochs, restless=True, workers=None, sums=1):
    """Trains `epochs` under random resizes and deaths; how many samples the dead owed in the steps they died in."""
    Worker.made = 0
    walk = EpochCursor(total)
    walk.unit = UNIT
    living = {rank: Worker(folder, walk) for rank in range(workers or rng.randint(1, 10))}
    version, size, members, owed = 0, len(living), sorted(living), 0
    common = {"global_batch": SHARDS * UNIT, "drop_remainder": False, "total": total, "seed": 3, "shuffle": True}
    common.update(shards=SHARDS, sums=sums)
    while True:
        step = walk.take(SHARDS * UNIT, members)
        epoch = walk.epoch
        if step is None:
            for rank, worker in living.items():
                worker.write("end", walk, rank, {**common, "version": version, "size": size})
            walk.end_epoch()
            if walk.epoch == epochs:
                return owed
            continue
        walk.commit()
        length = count(step.batch)
        number = shards.count(length, UNIT)
        weights = [rng.randint(1, 4) for _ in members] if restless and rng.random() < 0.3 else []
        # Some have died since the step before; some die in this one, some before they record it, some after that.
        before, unrecorded, after = [rank for rank in members if rank not in living], [], []
        if restless and rng.random() < 0.4:
            for rank in rng.sample(sorted(living), rng.randint(0, len(living) - 1)):
                rng.choice((before, unrecorded, after)).append(rank)
        owed += sum(
            min(UNIT, length - shard * UNIT)
            for rank in before
            for shard in _core.partition_shards(number, members, weights, rank)
        )
        delivered = train_step(members, before, number, weights, sums, rng)
        for rank, own in delivered.items():
            if rank not in unrecorded:
                share = [r for s in own for r in part(step.batch, s * UNIT, min((s + 1) * UNIT, length))]
                told = {**common, "version": version, "size": size, "weights": weights, "participants": list(delivered)}
                living[rank].write("step", epoch, step, rank, share, told)
        living = {rank: worker for rank, worker in living.items() if rank not in (*before, *unrecorded, *after)}
        members = list(delivered)
        if restless and rng.random() < 0.3:
            newest = [living[rank] for rank in sorted(living)][: rng.randint(1, 9)]
            newest += [Worker(folder, walk) for _ in range(rng.randint(0, 2))]
            version, living = version + 1, dict(enumerate(newest))
            size, members = len(living), sorted(living)


@settings(deadline=None, max_examples=examples(150))
@given(seed=st.integers(0, 2**32), total=st.integers(1, 150), epochs=st.integers(1, 3), sums=st.integers(1, 2))
def test_each_sample_once_an_epoch_whatever_happens(seed, total, epochs, sums):
    with tempfile.TemporaryDirectory() as folder:
        owed = simulate(Path(folder), random.Random(seed), total, epochs, sums=sums)
        report = verdict(folder)
        assert report.exact, audit.to_text(report)
        assert [(epoch.trained, epoch.steps) for epoch in report.epochs] == [(total, -(-total // 24))] * epochs
        assert sum(epoch.given_back for epoch in report.epochs) == owed


@pytest.fixture
def recorded(tmp_path):
    """An epoch of 4 steps of 8 shards at 3 workers: the files of ranks 0, 1 and 2."""
    simulate(tmp_path, random.Random(0), 96, 1, restless=False, workers=3)
    return sorted(tmp_path.glob("*.jsonl"), key=lambda path: json.loads(path.read_text().splitlines()[1])["rank"])


def died(recorded, shares):
    """Rank 1 dies in the last step; what the others have in it."""
    change(recorded[1], lambda line: None, lambda line: line.get("step", 9) > 2)
    for path, share in zip((recorded[0], recorded[2]), shares):
        change(path, lambda line: {**line, "participants": [0, 2], "share": share}, at(0, 3))  # noqa: B023


def test_shards_of_a_dead_worker_are_with_the_others(recorded):
    # dealt are 0-2, 3-5 and 6-7, of 3 samples each, from 72 on; each worker's own come first
    died(recorded, ([[72, 81], [81, 84]], [[90, 96], [84, 90]]))
    report = verdict(recorded[0].parent)
    assert report.exact, audit.to_text(report)
    assert report.epochs[0].given_back == 9


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (([[72, 81]], [[90, 96], [84, 90]]), "shard 3 of 8, assigned to rank 1, was trained by no worker"),
        (([[72, 81], [81, 87]], [[90, 96], [84, 90]]), "shard 4 of 8, assigned to rank 1, was trained by 2 workers"),
        (([[72, 81], [81, 84]], [[93, 96], [84, 90]]), "shard 6 of 8, assigned to rank 2, was trained by no worker"),
        (
            ([[72, 81], [81, 83]], [[90, 96], [84, 90]]),
            "trained [72,81)+[81,83), but the shards [0, 1, 2] of the batch",
        ),
    ],
)
def test_a_shard_that_is_left_out_or_doubled_after_a_death_is_named(recorded, shares, said):
    died(recorded, shares)
    report = verdict(recorded[0].parent)
    assert not report.exact
    assert any(said in text for text in report.problems), report.problems
    order = audit.sharding.permutation(96, 3, 0)
    (epoch,) = report.epochs
    if "by 2" in said:
        assert epoch.repeated == {sample: [3, 3] for sample in sorted(order[84:87].tolist())}
        assert not epoch.missing
    else:
        assert set(order[81:84]) <= set(epoch.missing) or "shard 3" not in said
        assert epoch.missing


@pytest.mark.parametrize(
    "share", [[[9, 15]], [[9, 18], [0, 3]], [[9, 17]], [[9, 12], [12, 18], [12, 15]], [], [[12, 18], [10, 12]]]
)
def test_share_other_than_the_assigned_shards_is_found_without_a_failure(recorded, share):
    change(recorded[1], lambda line: {**line, "share": share}, at(0, 0))
    assert not verdict(recorded[0].parent).exact


def test_second_sum_without_a_failure_counts_as_repetition(tmp_path):
    simulate(tmp_path, random.Random(0), 24, 1, restless=False, workers=2, sums=2)
    assert verdict(tmp_path).exact
    for path in tmp_path.glob("*.jsonl"):
        change(path, lambda line: {**line, "share": [[0, 24]]} if line["rank"] == 0 else line, at(0, 0))
    assert len(verdict(tmp_path).epochs[0].repeated) == 12


def test_the_format_is_new_only_where_there_are_shards(recorded, tmp_path):
    assert [json.loads(path.read_text().splitlines()[0])["ledger"] for path in recorded] == [3] * 3
    plain = ledger.Ledger(tmp_path / "plain", 0)
    plain.end(EpochCursor(1), 0, {})
    (path,) = (tmp_path / "plain").iterdir()
    assert json.loads(path.read_text().splitlines()[0])["ledger"] == 2


@pytest.mark.parametrize(
    "edit", [{"shards": 0}, {"shards": 7}, {"weights": [1, 1]}, {"weights": [1, 0, 1]}, {"sums": 0}, {"weights": None}]
)
def test_impossible_assignment_of_shards_is_damage(recorded, edit):
    change(recorded[0], lambda line: {**line, **edit}, at(0, 0))
    assert "line 2: not a record of a step" in "".join(verdict(recorded[0].parent).problems)
