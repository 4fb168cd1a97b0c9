from __future__ import annotations

import random

import numpy as np
import pytest

from ms_kungfu.dataset.dealing import count_steps, permutation, share, step_stop, steps


@pytest.mark.parametrize("total", [1, 2, 7, 31, 32, 33, 47, 48, 49, 97, 1500])
@pytest.mark.parametrize("global_batch", [1, 2, 24, 32])
def test_steps_cover_the_epoch_and_their_number_is_that_of_a_stock_pipeline(total, global_batch):
    cut = list(steps(0, total, global_batch))
    assert [stop for _, stop in cut[:-1]] == [start for start, _ in cut[1:]]
    assert (cut[0][0], cut[-1][1]) == (0, total)
    assert len(cut) == count_steps(0, total, global_batch) == -(-total // global_batch)
    lengths = [stop - start for start, stop in cut]
    assert max(lengths) <= global_batch
    assert len(cut) == 1 or min(lengths) >= global_batch // 2


def test_drop_remainder_leaves_out_what_does_not_fill_a_batch():
    assert list(steps(0, 70, 32, drop_remainder=True)) == [(0, 32), (32, 64)]
    assert count_steps(0, 70, 32, drop_remainder=True) == 2
    assert step_stop(64, 70, 32, drop_remainder=True) == 64


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [7, 8, 24, 32, 33])
def test_shares_are_even_contiguous_and_complete(size, length):
    blocks = [share(100, 100 + length, rank, size) for rank in range(size)]
    assert [i for first, last in blocks for i in range(first, last)] == list(range(100, 100 + length))
    lengths = [last - first for first, last in blocks]
    assert max(lengths) - min(lengths) <= 1


def test_a_worker_without_a_sample_repeats_the_last_one():
    assert [share(8, 10, rank, 4) for rank in range(4)] == [(8, 9), (9, 10), (9, 10), (9, 10)]


def test_permutation_depends_on_seed_and_epoch_alone():
    assert np.array_equal(permutation(50, 1, 2), permutation(50, 1, 2))
    assert not np.array_equal(permutation(50, 1, 2), permutation(50, 1, 3))
    assert not np.array_equal(permutation(50, 1, 2), permutation(50, 2, 2))
    assert sorted(permutation(50, 3, 0)) == list(range(50))
    assert permutation(5, 1, 0, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("per_worker", [True, False])
def test_each_sample_once_an_epoch_whatever_the_resizes(per_worker):
    for seed in range(300):
        rng = random.Random(seed)
        total, batch = rng.randrange(40, 300), rng.randrange(2, 9)
        position, size, seen = 0, 1, []
        while position < total:
            global_batch = batch * size if per_worker else 16
            stop = step_stop(position, total, global_batch)
            own = [range(*share(position, stop, rank, size)) for rank in range(size)]
            trained = [i for block in own for i in block]
            if stop - position >= size:
                assert trained == list(range(position, stop)), f"seed {seed}"
            seen += sorted(set(trained))
            position = stop
            size = rng.choice([1, 2, 3, 4, 7]) if rng.random() < 0.4 else size
        assert seen == list(range(total)), f"seed {seed}"
