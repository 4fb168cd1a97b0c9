"""ElasticDataset over fake clusters in one process: each rank is a dataset of its own, asked in turn."""

from __future__ import annotations

import collections

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, Model

from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.dataset import elastic as module


class FakeRuntime:
    """The cluster as seen by the rank whose turn it is."""

    rank, size, version, gone = 0, 1, 0, False

    def current_rank(self):
        return self.rank

    def current_cluster_size(self):
        return self.size

    def cluster_version(self):
        return self.version

    def detached(self):
        return self.gone

    def resize(self, size):
        self.size, self.version = size, self.version + 1


@pytest.fixture
def cluster(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(module, "runtime", fake)
    return fake


class Samples:
    """Sample i is [i]."""

    def __init__(self, total):
        self.total = total

    def __len__(self):
        return self.total

    def __getitem__(self, i):
        return (np.array([i], dtype=np.float32),)


def generator(total):
    return ds.GeneratorDataset(Samples(total), ["x"], shuffle=True)


def by_function(indices):
    return ds.GeneratorDataset([(np.array([i], dtype=np.float32),) for i in indices], ["x"], shuffle=False)


def train(cluster, total, resizes, epochs=2, **options):
    """(samples of each epoch as a Counter, number of steps) when the size changes as `resizes` {step: size} says."""
    make = lambda: ElasticDataset(generator(total), **options)  # noqa: E731
    ranks = [make() for _ in range(cluster.size)]
    for data in ranks:
        data.driven = True
    iterators = [data.create_tuple_iterator(num_epochs=epochs, output_numpy=True) for data in ranks]
    seen, step = [collections.Counter()], 0
    while len(seen) <= epochs:
        batches = []
        for rank in range(cluster.size):
            cluster.rank = rank
            try:
                batches.append(next(iterators[cluster.rank])[0].ravel().tolist())
            except StopIteration:
                batches.append(None)
        cluster.rank = 0
        if batches[0] is None:
            assert batches == [None] * cluster.size, "all ranks end an epoch at the same step"
            seen.append(collections.Counter())
            continue
        for data in ranks:
            data.commit()
        seen[-1].update(int(i) for batch in batches for i in batch)
        step += 1
        if step in resizes:
            size = resizes[step]
            for _ in range(len(ranks), size):
                joiner = make()
                joiner.driven = True
                joiner.restore(ranks[0].state())
                ranks.append(joiner)
                iterators.append(joiner.create_tuple_iterator(num_epochs=epochs, output_numpy=True))
            del ranks[size:], iterators[size:]
            cluster.resize(size)
    return seen[:-1], step


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"global_batch_size": 16}, {"global_batch_size": 16, "shuffle": False}]
)
def test_each_sample_once_an_epoch_under_resizes(cluster, options):
    epochs, _ = train(cluster, 150, {3: 2, 6: 4, 11: 1, 14: 3}, epochs=3, **options)
    assert epochs == [collections.Counter(range(150))] * 3


def test_a_held_global_batch_takes_the_same_steps_at_any_size(cluster):
    assert train(cluster, 100, {}, global_batch_size=16)[1] == 14
    assert train(cluster, 100, {2: 2, 5: 4, 9: 3}, global_batch_size=16)[1] == 14


def test_a_change_at_the_last_step_of_an_epoch(cluster):
    epochs, steps = train(cluster, 96, {6: 4, 12: 1}, global_batch_size=16)
    assert (epochs, steps) == ([collections.Counter(range(96))] * 2, 12)


def test_a_global_batch_has_the_same_samples_in_the_same_order_at_any_size(cluster):
    def batches(size):
        cluster.resize(size)
        parts = []
        for rank in range(size):
            cluster.rank = rank
            data = ElasticDataset(generator(70), global_batch_size=16, seed=5)
            parts.append([b[0].ravel() for b in data.create_tuple_iterator(num_epochs=1, output_numpy=True)])
        cluster.rank = 0
        return [np.concatenate(step).tolist() for step in zip(*parts)]

    one = batches(1)
    assert batches(2) == one
    assert batches(3) == one


def test_a_function_of_sample_numbers_serves_as_source(cluster):
    data = ElasticDataset(by_function, global_batch_size=4, total=9, shuffle=False)
    assert [b[0].ravel().tolist() for b in data.create_tuple_iterator(num_epochs=1, output_numpy=True)] == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [7, 8],
    ]
    assert [b["x"].shape for b in data.create_dict_iterator(num_epochs=1, output_numpy=True)][0] == (4, 1)


def test_what_was_prefetched_is_not_consumed(cluster):
    data = ElasticDataset(generator(400), batch_size=4)
    data.driven = True
    iterator = data.create_tuple_iterator(num_epochs=1, output_numpy=True)
    next(iterator)
    assert data.position == 0
    data.commit()
    assert data.position == 4


def test_it_is_the_dataset_of_an_unmodified_model_train(cluster):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    data = ElasticDataset(
        ds.NumpySlicesDataset((np.arange(50, dtype=np.float32)[:, None], np.zeros((50, 1), np.float32)), ["x", "y"]),
        batch_size=8,
    )
    seen = []

    class Watch(Callback):
        def on_train_step_end(self, run_context):
            params = run_context.original_args()
            # the rank that we play sees a quarter of the steps that 4 workers take together
            seen.append(
                (params.cur_epoch_num, cluster.size, params.train_dataset_element[0].asnumpy().ravel().astype(int))
            )
            if params.cur_step_num in (2, 9):
                cluster.resize(2 if cluster.size == 1 else 1)

    net = nn.Dense(1, 1)
    Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 1e-6)).train(3, data, [Watch()], dataset_sink_mode=False)
    third = [i for epoch, _, batch in seen if epoch == 3 for i in batch]
    assert sorted(third) == list(range(50))
    assert [size for _, size, _ in seen][:3] == [1, 1, 2]


def test_a_worker_that_left_gets_no_more_batches(cluster):
    data = ElasticDataset(generator(40), batch_size=4)
    iterator = data.create_tuple_iterator(output_numpy=True)
    next(iterator)
    cluster.gone = True
    assert list(iterator) == []
    assert data.get_dataset_size() >= 1


def test_shape_queries(cluster):
    data = ElasticDataset(generator(50), batch_size=8)
    assert data.get_dataset_size() == 7
    assert data.get_batch_size() == 8
    assert data.output_shapes() == [[8, 1]]
    assert data.get_col_names() == ["x"]
    assert data.output_types() == [np.float32]


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: ElasticDataset(generator(9)), ValueError, "either batch_size"),
        (lambda: ElasticDataset(generator(9), 3, global_batch_size=3), ValueError, "either batch_size"),
        (lambda: ElasticDataset(generator(9), 0), ValueError, "batch_size .* got 0"),
        (lambda: ElasticDataset(generator(9), global_batch_size=2.5), ValueError, "got 2.5"),
        (lambda: ElasticDataset(by_function, 3), ValueError, "total="),
        (lambda: ElasticDataset(generator(9).batch(3), 3), TypeError, "BatchDataset"),
        (lambda: ElasticDataset(generator(9).shuffle(3), 3), TypeError, "ShuffleDataset"),
        (lambda: ElasticDataset(generator(9).concat(generator(9)), 3), TypeError, "ConcatDataset"),
        (lambda: ElasticDataset(ds.GeneratorDataset(lambda: iter([]), ["x"]), 3), TypeError, "no sampler"),
        (
            lambda: ElasticDataset(ds.GeneratorDataset(Samples(9), ["x"], num_shards=3, shard_id=0), 3),
            ValueError,
            "num_shards",
        ),
        (lambda: next(iter(ElasticDataset(generator(9), 10, drop_remainder=True))), ValueError, "leaves nothing of 9"),
        (lambda: next(iter(ElasticDataset(generator(9), 3).map(lambda x: x))), TypeError, "last part of a pipeline"),
    ],
)
def test_bad_input_is_one_sentence(cluster, make, error, named):
    with pytest.raises(error, match=named):
        make()
