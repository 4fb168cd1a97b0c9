"""The pure rules: how an epoch is cut into steps and dealt, and what comes back when a worker dies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_kungfu.dataset.sharding import (
    EpochCursor,
    Step,
    block,
    count,
    count_steps,
    part,
    permutation,
    positions,
    step_length,
)


def lengths(left, global_batch, drop_remainder=False):
    found = []
    while length := step_length(left, global_batch, drop_remainder):
        found.append(length)
        left -= length
    return found


@pytest.mark.parametrize("total", [1, 2, 7, 31, 32, 33, 47, 48, 49, 97, 1500])
@pytest.mark.parametrize("global_batch", [1, 2, 24, 32])
def test_steps_cover_the_epoch_and_are_as_many_as_in_a_stock_pipeline(total, global_batch):
    cut = lengths(total, global_batch)
    assert sum(cut) == total
    assert len(cut) == count_steps(total, global_batch) == -(-total // global_batch)
    assert max(cut) <= global_batch
    assert len(cut) == 1 or min(cut) >= global_batch // 2


def test_drop_remainder_leaves_out_what_does_not_fill_a_batch():
    assert lengths(70, 32, drop_remainder=True) == [32, 32]
    assert count_steps(70, 32, drop_remainder=True) == 2


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 24, 32, 33])
def test_blocks_are_even_contiguous_and_complete(workers, length):
    blocks = [block(length, place, workers) for place in range(workers)]
    assert [i for first, last in blocks for i in range(first, last)] == list(range(length))
    sizes = [last - first for first, last in blocks]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("length", [1, 3, 7, 16, 33])
@pytest.mark.parametrize(("ranks", "workers"), [(4, 1), (4, 2), (4, 3), (4, 4), (7, 3), (8, 5)])
def test_share_of_a_worker_is_the_blocks_of_the_ranks_it_plays(ranks, workers, length):
    step = Step(0, ((10, 10 + length),), tuple(range(workers)), ranks)
    assert positions([r for rank in range(workers) for r in step.share(rank)]).tolist() == list(range(10, 10 + length))
    assert [count(step.share(rank)) for rank in range(workers)] == [sum(step.parts(rank)) for rank in range(workers)]
    sizes = [last - first for first, last in (block(length, rank, ranks) for rank in range(ranks))]
    assert [size for rank in range(workers) for size in step.parts(rank)] == [size for size in sizes if size]
    walk = EpochCursor(length + 5 * ranks)
    walk.ranks = ranks
    for rank in range(workers):
        dealt, lengths = walk.deal(5 * ranks, range(workers), rank)
        again = EpochCursor(length + 5 * ranks)
        again.ranks, shares = ranks, []
        while (taken := again.take(5 * ranks, range(workers))) is not None:
            share = taken.share(rank) or part(taken.batch, count(taken.batch) - 1, count(taken.batch))
            shares.append(positions(share).tolist())
            again.commit()
        assert [len(share) for share in shares] == lengths.tolist()
        assert dealt.tolist() == [position for share in shares for position in share]


def test_a_part_of_ranges_is_that_of_their_positions():
    ranges = ((10, 14), (2, 5), (30, 31))
    everything = positions(ranges).tolist()
    assert everything == [10, 11, 12, 13, 2, 3, 4, 30]
    assert count(ranges) == 8
    for first in range(9):
        for last in range(first, 9):
            assert positions(part(ranges, first, last)).tolist() == everything[first:last]


def test_permutation_depends_on_seed_and_epoch_alone():
    assert np.array_equal(permutation(50, 1, 2), permutation(50, 1, 2))
    assert not np.array_equal(permutation(50, 1, 2), permutation(50, 1, 3))
    assert not np.array_equal(permutation(50, 1, 2), permutation(50, 2, 2))
    assert sorted(permutation(50, 3, 0)) == list(range(50))
    assert permutation(5, 1, 0, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_share_of_a_worker_that_died_in_a_step_comes_last_in_the_epoch():
    walk = EpochCursor(30)
    walk.take(8, [0, 1, 2, 3])
    walk.commit([0, 1, 3])
    assert walk.pool == ((8, 30), (4, 6))
    assert [walk.take(8, [0, 1, 2]).batch for _ in range(3)] == [((8, 16),), ((16, 24),), ((24, 30), (4, 6))]
    assert walk.take(8, [0, 1, 2]) is None


def test_a_repeated_sample_that_alone_is_left_in_a_step_is_trained_by_it():
    walk = EpochCursor(2)
    walk.take(8, [0, 1, 2, 3])
    walk.commit([2, 3])
    assert walk.pool == ((0, 1),)


def test_a_death_in_the_last_step_makes_the_epoch_a_step_longer():
    walk = EpochCursor(16)
    for _ in range(2):
        walk.take(8, [0, 1])
        walk.commit([0, 1] if walk.steps == 0 else [1])
    assert walk.take(8, [1]) == Step(2, ((8, 12),), (1,))


def test_gradients_of_several_batches_are_committed_together():
    walk = EpochCursor(16)
    walk.take(4, [0, 1])
    walk.take(4, [0, 1])
    assert [step.number for step in walk.commit([0])] == [0, 1]
    assert walk.pool == ((8, 16), (2, 4), (6, 8))
    assert walk.steps == 2


def test_samples_handed_out_and_not_trained_are_handed_out_again():
    walk = EpochCursor(16)
    first = walk.take(4, [0])
    walk.put_back()
    assert walk.take(4, [0]) == first


def test_worker_without_a_sample_gets_a_repeated_one_outside_all_shares():
    walk = EpochCursor(5)
    assert [walk.deal(2, [0, 1, 2, 3], rank)[0].tolist() for rank in range(4)] == [
        [0, 2, 4],
        [1, 3, 4],
        [1, 3, 4],
        [1, 3, 4],
    ]
    steps = [walk.take(2, [0, 1, 2, 3]) for _ in range(3)]
    assert [steps[0].share(rank) for rank in range(4)] == [((0, 1),), ((1, 2),), (), ()]
    assert [steps[2].share(rank) for rank in range(4)] == [((4, 5),), (), (), ()]


@given(
    total=st.integers(1, 200),
    global_batch=st.integers(1, 40),
    workers=st.integers(1, 7),
    drop_remainder=st.booleans(),
    deaths=st.lists(st.integers(0, 6), max_size=4),
)
def test_partition_equals_the_samples_handed_out_step_by_step(total, global_batch, workers, drop_remainder, deaths):
    walk = EpochCursor(total, drop_remainder)
    members = list(range(workers))
    for failed in deaths:  # a pool of several ranges
        if walk.take(global_batch, members) is not None:
            walk.commit([rank for rank in members if rank != failed])
    dealt = [walk.deal(global_batch, members, rank) for rank in members]
    shares = [[] for _ in members]
    while step := walk.take(global_batch, members):
        for rank in members:
            own = positions(step.share(rank)).tolist()
            shares[rank].append(own or positions(step.batch).tolist()[-1:])
    for rank, (where, sizes) in enumerate(dealt):
        assert where.tolist() == [i for batch in shares[rank] for i in batch]
        assert sizes.tolist() == [len(batch) for batch in shares[rank]]
    assert walk.drop_remainder or walk.rest == ()


def test_the_state_travels_as_json_and_other_data_are_refused():
    walk, other = EpochCursor(30), EpochCursor(30)
    walk.take(8, [0, 1])
    walk.commit([0])
    other.restore(walk.state())
    assert (other.pool, other.steps, other.epoch) == (walk.pool, 1, 0)
    with pytest.raises(ValueError, match="has 31 samples, and the other workers' data has 30"):
        EpochCursor(31).restore(walk.state())
