"""The pure rules of shards: what each rank gets, and what is said of gradients that differ."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_kungfu import _core
from ms_kungfu.dataset import sharding, shards
from ms_kungfu.elastic import determinism_probe, straggler_weights
from ms_kungfu.elastic.determinism_probe import LOSS, DeterminismProbe, difference
from ms_kungfu.elastic.straggler_weights import longest, speeds
from ms_kungfu.errors import DivergenceError


@given(
    total=st.integers(1, 200), unit=st.integers(1, 5), per_step=st.integers(1, 8), workers=st.integers(1, 9),
    drop=st.booleans(),
)  # fmt: skip
def test_each_sample_is_in_one_shard_and_only_the_last_shard_is_shorter(total, unit, per_step, workers, drop):
    members = list(range(workers))
    cursor = sharding.EpochCursor(total, drop)
    cursor.unit = unit
    dealt = {
        rank: shards.deal(
            np.arange(total), per_step * unit, unit, drop,
            lambda count, rank=rank: _core.partition_shards(count, members, [], rank),
        )
        for rank in members
    }  # fmt: skip
    seen, lengths = [], []
    at = {rank: [0, 0] for rank in members}  # positions and shards that have been taken
    while (step := cursor.take(per_step * unit, members)) is not None:
        length = sharding.count(step.batch)
        count = shards.count(length, unit)
        for rank in members:
            mine = _core.partition_shards(count, members, [], rank)
            for _ in mine or [count - 1]:
                positions, sizes = dealt[rank]
                size = sizes[at[rank][1]]
                taken = positions[at[rank][0] : at[rank][0] + size].tolist()
                at[rank] = [at[rank][0] + size, at[rank][1] + 1]
                if mine:
                    seen += taken
                    lengths.append((taken[0], size))
        cursor.commit()
    assert sorted(seen) == list(range(total - (total % (per_step * unit) if drop else 0)))
    assert all(size == unit for _, size in sorted(lengths)[:-1])
    assert all(taken == len(dealt[rank][0]) for rank, (taken, _) in at.items())


def test_the_last_shard_counts_by_its_samples():
    assert shards.last_share(32, 4) == 1.0
    assert shards.last_share(26, 4) == 0.5
    assert shards.count(26, 4) == 7


@pytest.mark.parametrize(
    ("count", "members", "weights", "expected"),
    [
        (8, [0, 1, 2], [], [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (2, [0, 1, 2], [], [[0], [1], []]),
        (4, [1, 3], [3, 1], [[0, 1, 2], [3]]),
        (16, [0, 1, 2, 3], [1000, 1000, 1000, 333], [list(range(5)), list(range(5, 10)), list(range(10, 15)), [15]]),
    ],
)
def test_shards_are_assigned_in_blocks_by_speed(count, members, weights, expected):
    assert [_core.partition_shards(count, members, weights, rank) for rank in members] == expected


def test_new_assignment_follows_from_the_time_per_shard():
    seconds = {0: 0.01, 1: 0.03, 3: 0.01}  # rank 2 has died
    assert speeds(seconds, 4) == [1000, 333, 1000, 1000]
    assert longest(7, seconds, []) == pytest.approx(0.06)
    assert longest(7, seconds, speeds(seconds, 4)) == pytest.approx(0.03)


def test_differing_tensor_is_named_with_the_ranks():
    names = ["the gradient of 'a'", "the gradient of 'b'"]
    assert difference({0: [1, 2], 1: [1, 2]}, {1: [1, 2]}, names) is None
    assert "rank 1 computed one shard twice, and the gradient of 'b' differs" in difference(
        {0: [1, 2], 1: [1, 2]}, {1: [1, 3]}, names
    )
    assert "ranks 0 and 2 computed the same shard, and the gradient of 'a' differs" in difference(
        {0: [1, 2], 2: [9, 2]}, {}, names
    )


@pytest.fixture
def agreed(monkeypatch):
    """(a worker's Pace, what each step takes it for its shards, what the other of two says): one of two workers."""
    mine, other = [(0.0, 0)], [1.0]
    core = SimpleNamespace(shard_pace=lambda: mine[0])
    monkeypatch.setattr(straggler_weights.membership, "current", lambda: SimpleNamespace(core=core))
    monkeypatch.setattr(straggler_weights, "gather_living", lambda row, name: {0: row, 1: np.array(other)})
    return straggler_weights.StragglerWeights(), mine, other


def test_compilation_in_the_first_step_makes_no_worker_slow(agreed):
    measured, mine, _ = agreed
    mine[0] = (400.0, 4)
    assert measured.step_end(version=3, size=2, shards=8, weights=[]) == []
    mine[0] = (4.0, 4)
    assert measured.step_end(version=3, size=2, shards=8, weights=[]) == []  # both need a second for a shard


def test_compilation_in_a_later_step_makes_no_worker_slow(agreed):
    """The shorter shard at the end of an epoch."""
    measured, mine, _ = agreed
    mine[0] = (4.0, 4)
    for number in range(1, 9):
        mine[0] = (400.0 if number == 7 else 4.0, 4)
        assert measured.step_end(version=3, size=2, shards=8, weights=[], counts=number != 7) == []


@pytest.mark.parametrize(("seconds", "gains"), [(1.05, False), (2.0, True)])
def test_assignment_with_a_small_gain_stays(agreed, seconds, gains):
    """Of 41 shards a worker that is a twentieth slower would be dealt one less, for a fortieth of the time."""
    measured, mine, _ = agreed
    mine[0] = (seconds * 20, 20)
    measured.step_end(version=3, size=2, shards=41, weights=[])
    assert (measured.step_end(version=3, size=2, shards=41, weights=[]) != []) == gains


def test_time_compared_before_does_not_count_again(agreed):
    """A worker that was slow and isn't any more has its share back."""
    measured, mine, _ = agreed
    mine[0] = (40.0, 4)
    weights = [measured.step_end(version=3, size=2, shards=8, weights=[]) for _ in range(2)][-1]
    assert weights == [100, 1000]
    mine[0] = (4.0, 4)
    for _ in range(2):
        weights = measured.step_end(version=3, size=2, shards=8, weights=weights)
    assert weights == [1000, 1000]


@pytest.mark.parametrize("silent", ["this worker", "the other one"])
def test_worker_without_a_measurement_is_not_weighed(agreed, silent):
    measured, mine, other = agreed
    mine[0] = (12.0, 4)
    if silent == "the other one":
        other[0] = 0.0
    counts = silent != "this worker"
    measured.step_end(version=3, size=2, shards=8, weights=[], counts=counts)
    assert measured.step_end(version=3, size=2, shards=8, weights=[7, 9], counts=counts) == [7, 9]


def test_weights_are_of_the_ranks_that_were_measured(agreed):
    measured, mine, _ = agreed
    mine[0] = (12.0, 4)
    measured.step_end(version=3, size=2, shards=8, weights=[])
    weights = measured.step_end(version=3, size=2, shards=8, weights=[])
    assert weights == [333, 1000]
    assert measured.step_end(version=3, size=2, shards=8, weights=weights) == weights
    assert measured.step_end(version=4, size=2, shards=8, weights=weights) == []


@pytest.mark.parametrize("differs", [LOSS, "the gradient of 'a'"])
def test_differing_loss_is_logged_and_differing_gradient_ends_training(monkeypatch, caplog, differs):
    """At a newcomer. The loss isn't the last of the hashes where there are gradients of float64."""
    names = ["the gradient of 'a'", LOSS, "the gradient of 'b'"]

    def gather_living(row, name):
        other = row.copy()
        if name.endswith("hashes"):
            other[:2, names.index(differs)] += 1
        return {0: row, 1: other}

    monkeypatch.setattr(determinism_probe, "gather_living", gather_living)
    monkeypatch.setattr(DeterminismProbe, "_hashes", staticmethod(lambda compute: [1, 2, 3]))
    with contextlib.nullcontext() if differs == LOSS else pytest.raises(DivergenceError, match="of 'a' differs"):
        DeterminismProbe().look(1, "raise", lambda shard: None, lambda count: names, dict)
    assert [f"{LOSS} differs" in record.message for record in caplog.records] == ([True] if differs == LOSS else [])
