"""`ElasticDataset(..., key_column=...)`: what a map draws for a sample is a function of seed, epoch and sample."""

from __future__ import annotations

import collections

import mindspore.dataset as ds
import numpy as np
import pytest

from ms_kungfu.dataset import ElasticDataset, sharding
from tests.mindspore.elastic.fake_cluster import by_function, generator, train


def jitter(x, key):
    """As an augmentation does it: the sample, and what was drawn for it."""
    return np.concatenate([x, np.random.default_rng(key).random(2, dtype=np.float32)])


def drawn(columns):
    """The augmented samples, as something that counts."""
    return [tuple(row) for row in columns[0].tolist()]


def keyed(total, **options):
    return generator(total).map(jitter, ["x", "key"], ["x"], **options)


HISTORIES = [
    (1, {}, {}),
    (2, {}, {}),
    (3, {}, {}),
    (2, {2: 3, 6: 1, 11: 4}, {}),
    (4, {9: 5}, {2: 1, 13: 0}),
]


@pytest.mark.parametrize("workers", [1, 2])
def test_sample_is_augmented_alike_by_every_worker(cluster, workers):
    seen = []
    for cluster.size, resizes, deaths in HISTORIES:
        epochs, _ = train(
            cluster, keyed(60, num_parallel_workers=workers), resizes, deaths, epochs=3, numbers=drawn,
            global_batch_size=10, seed=7, key_column="key",
        )  # fmt: skip
        seen.append(epochs)
    assert all(each == seen[0] for each in seen)
    for epoch in seen[0]:
        assert sorted(row[0] for row in epoch) == list(range(60))
    # All that was ever drawn differs: by epoch and by sample; and so by seed.
    other = train(cluster, keyed(60), epochs=3, numbers=drawn, batch_size=10, seed=8, key_column="key")[0]
    rows = [row for epoch in (*seen[0], *other) for row in epoch]
    assert len({row[1:] for row in rows}) == len(rows) == 360


def test_the_order_of_the_samples_does_not_enter(cluster):
    by_order = [
        train(cluster, keyed(20), epochs=1, numbers=drawn, batch_size=6, shuffle=shuffle, key_column="key")[0]
        for shuffle in (True, False)
    ]
    assert by_order[0] == by_order[1]


def test_a_key_that_no_map_takes_is_a_column(cluster):
    seed = -(2**40) - 3
    options = {"global_batch_size": 4, "seed": seed, "shuffle": False, "key_column": "own"}
    for source, total in ((generator(6), None), (by_function, 6)):
        data = ElasticDataset(source, total=total, **options)
        assert data.get_col_names() == ["x", "own"]
        assert data.output_shapes() == [[4, 1], [4, 4]]
        assert data.output_types() == [np.float32, np.uint32]
        for epoch in range(2):
            batches = list(data.create_tuple_iterator(num_epochs=1, output_numpy=True))
            keys = np.concatenate([key for _, key in batches])
            expected = [[seed % 2**32, (seed >> 32) % 2**32, epoch, i] for i in range(6)]
            assert keys.tolist() == expected
            assert keys.dtype == np.uint32


def test_the_source_stays_as_it_is(cluster):
    source = generator(6).map(lambda x: x + 1, ["x"])
    ElasticDataset(source, 2, key_column="key").get_col_names()
    assert sorted(x.item() for (x,) in source.create_tuple_iterator(output_numpy=True)) == [1, 2, 3, 4, 5, 6]


def test_keys_are_one_function():
    keys = sharding.keys([5, 2**32 + 5, 0], 2**63 + 9, 3)
    assert keys.tolist() == [[9, 2**31, 3, 5], [9, 2**31, 3, 5], [9, 2**31, 3, 0]]
    draws = collections.Counter(np.random.default_rng(key).integers(2**62) for key in sharding.keys(range(1000), 1, 2))
    assert len(draws) == 1000


@pytest.mark.parametrize(
    ("source", "options", "error", "named"),
    [
        (generator(9), {"key_column": ""}, TypeError, "key_column must be a column name"),
        (generator(9), {"key_column": 3}, TypeError, "key_column must be a column name"),
        (generator(9), {"key_column": "x"}, ValueError, "'x': the source's dataset already has"),
        (
            lambda indices: ds.zip((by_function(indices), by_function(indices).rename("x", "z"))),
            {"key_column": "key", "total": 9},
            TypeError,
            "a pipeline with one dataset, but ZipDataset has several",
        ),
    ],
)
def test_source_that_takes_no_key_is_refused_in_one_sentence(cluster, source, options, error, named):
    with pytest.raises(error, match=named):
        next(iter(ElasticDataset(source, 3, **options)))
