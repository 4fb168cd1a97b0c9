"""ElasticDataset over pipelines that were written for one process, or for a fixed number of them."""

from __future__ import annotations

import collections
import logging

import mindspore.dataset as ds
import numpy as np
import pytest

from ms_kungfu.dataset import ElasticDataset, audit, indexed, pipelines
from tests.mindspore.elastic.fake_cluster import Samples, generator, train


def sharded(total, number, shard_id=0, **options):
    return ds.GeneratorDataset(Samples(total), ["x"], num_shards=number, shard_id=shard_id, **options)


def batches_of(data, epochs=1):
    return list(data.create_tuple_iterator(num_epochs=epochs, output_numpy=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: generator(50).batch(8),
        lambda: generator(50).shuffle(20).map(lambda x: x).batch(8, num_parallel_workers=1).rename("x", "y"),
        lambda: sharded(50, 2, shard_id=1).batch(8),
        lambda: sharded(50, 2, shuffle=False, num_samples=40).batch(8).repeat(),
        lambda: generator(50).padded_batch(8, pad_info={"x": (None, 0)}),
    ],
    ids=["batch", "shuffle, map, rename", "shards", "num_samples, endless", "padded"],
)
def test_a_batch_is_each_workers_at_the_start_and_is_held_from_then_on(cluster, make):
    cluster.size = 2
    given = make()
    written = str(ds.serialize(given))
    expected = train(cluster, generator(50), {2: 3, 5: 1, 8: 4}, global_batch_size=16, seed=3)
    cluster.size, cluster.version = 2, 0
    assert train(cluster, given, {2: 3, 5: 1, 8: 4}, seed=3) == expected
    assert expected[0] == [collections.Counter(range(50))] * 2
    assert str(ds.serialize(given)) == written, "the program's own pipeline is as it was"


def test_number_of_workers_at_the_start_is_sent_to_joining_workers(cluster, monkeypatch):
    cluster.size = 3
    monkeypatch.setenv("KUNGFU_START_SIZE", "2")
    assert ElasticDataset(generator(50).batch(8)).global_batch_size == 16
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert ElasticDataset(sharded(50, 3).batch(8)).global_batch_size == 16
    assert ElasticDataset(sharded(50, 8).batch(8)).global_batch_size == 64, "a number of the program's own"


def test_batch_size_given_beside_a_batch_counts(cluster):
    cluster.size = 2
    assert ElasticDataset(generator(50).batch(8), 5).global_batch_size == 10
    assert ElasticDataset(generator(50).batch(8), global_batch_size=5).global_batch_size == 5


def test_drop_remainder_is_kept(cluster):
    epochs, steps = train(cluster, generator(50).batch(8, drop_remainder=True), {2: 2}, epochs=1)
    assert [len(step) for step in steps] == [8] * 6
    assert sum(epochs[0].values()) == 48


def test_the_batchs_own_functions_see_whole_batches(cluster):
    seen = []

    def note(x, info):
        seen.append(len(x))
        return (np.stack(x) + 100,)

    data = ElasticDataset(generator(20).batch(8, per_batch_map=note, input_columns=["x"], output_columns=["y"]))
    assert data.get_col_names() == ["y"]
    assert data.output_shapes() == [[8, 1]]
    seen.clear()
    numbers = [batch[0].ravel() for batch in batches_of(data)]
    assert [len(batch) for batch in numbers] == [8, 8, 4]
    assert sorted(seen[:3]) == [4, 8, 8]  # MindSpore's workers take batches side by side
    assert sorted(np.concatenate(numbers).astype(int)) == list(range(100, 120))


def test_padding_is_by_batch(cluster):
    class Words:
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return (np.full(i + 1, i + 1, np.int32),)

    words = ds.GeneratorDataset(Words(), ["x"], shuffle=True)
    data = ElasticDataset(words.padded_batch(4, pad_info={"x": (None, -1)}), shuffle=False)
    assert [batch[0].shape for batch in batches_of(data)] == [(4, 4), (4, 8), (4, 12)]
    assert batches_of(data)[0][0][0].tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize("shards", [None, 4])
def test_a_map_over_batches_may_make_more_rows_of_them(cluster, shards, tmp_path):
    """mindcv's create_loader with `separate` does."""
    cluster.size = 2
    source = generator(40).batch(8).map(lambda x: np.concatenate([x, -x]), ["x"])
    data = [ElasticDataset(source, shards=shards, ledger=tmp_path) for _ in range(2)]
    seen: collections.Counter = collections.Counter()
    for cluster.rank, own in enumerate(data):
        rows = next(own.create_tuple_iterator(num_epochs=1, output_numpy=True))[0].ravel()
        assert np.array_equal(rows[: len(rows) // 2], -rows[len(rows) // 2 :])
        assert len(rows) == (16 if shards is None else 8)
        seen.update(rows[rows > 0])
    assert set(seen.values()) == {1}


class Lengths(Samples):
    """Sample i is i + 1 times [i]."""

    def __getitem__(self, i):
        return (np.full(i + 1, i, np.int32),)


def test_samples_of_many_lengths_are_padded_to_few(cluster):
    """What docs/data.md has in the place of bucket_batch_by_length."""

    def pad(rows, _):
        longest = max(map(len, rows))
        length = next(boundary for boundary in (8, 24, 40) if longest <= boundary)
        return (np.stack([np.pad(row, (0, length - len(row)), constant_values=-1) for row in rows]),)

    def numbers(batch):
        (rows,) = batch
        assert rows.shape[1] == next(boundary for boundary in (8, 24, 40) if (rows >= 0).sum(1).max() <= boundary)
        assert ((rows >= 0).sum(1) == rows[:, 0] + 1).all()
        return rows[:, 0].tolist()

    source = ds.GeneratorDataset(Lengths(40), ["x"]).batch(8, per_batch_map=pad, input_columns=["x"])
    trained, _ = train(cluster, source, {2: 3, 4: 1}, numbers=numbers)
    assert trained == [collections.Counter(range(40))] * 2


def test_repeat_makes_epochs_of_passes_with_each_sample_once_in_each(cluster, tmp_path):
    cluster.size = 2
    options = {"ledger": tmp_path, "seed": 1}
    epochs, steps = train(cluster, generator(50).batch(8).repeat(3), {2: 3, 5: 2}, {8: 1}, epochs=2, **options)
    assert epochs == [collections.Counter(dict.fromkeys(range(50), 3))] * 2
    order = sum(steps, [])
    assert [sorted(order[i : i + 50]) for i in range(0, 300, 50)] == [list(range(50))] * 6
    report = audit.audit(*audit.read(tmp_path))
    assert (report.exact, len(report.epochs)) == (True, 6)


def test_where_an_epoch_of_several_passes_is(cluster):
    data = ElasticDataset(generator(20).batch(8).repeat(2))
    assert (data.get_dataset_size(), data.total_samples) == (6, 40)
    seen = []
    for batch in data.create_tuple_iterator(num_epochs=2):
        data.commit()
        seen.append((data.epoch, data.steps, data.position, len(batch[0])))
    assert seen[:6] == [(0, 1, 8, 8), (0, 2, 16, 8), (0, 3, 20, 4), (0, 4, 28, 8), (0, 5, 36, 8), (0, 6, 40, 4)]
    later = ElasticDataset(generator(20).batch(8).repeat(2))
    later.restore(data.state())
    assert (later.epoch, later.steps, later.position) == (data.epoch, data.steps, data.position)


def test_with_shards(cluster):
    cluster.size = 2
    data = ElasticDataset(generator(64).shuffle(8).batch(8).repeat(2), shards=4)
    assert (data.global_batch_size, data.shard_sizes(), data.get_dataset_size()) == (16, [4], 8)
    assert data.output_shapes() == [[4, 1]]
    with pytest.raises(ValueError, match="must divide global_batch_size"):
        ElasticDataset(generator(64).batch(8), shards=5)


@pytest.mark.parametrize(
    ("sampler", "samples"),
    [
        (ds.SubsetSampler([7, 3, 11, 3]), [7, 3, 11, 3]),
        (ds.SubsetRandomSampler([5, 9, 1]), [5, 9, 1]),
        (ds.SequentialSampler(start_index=4, num_samples=6), [4, 5, 6, 7, 8, 9]),
        (ds.DistributedSampler(3, 1, shuffle=False, num_samples=2), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_samples_that_a_sampler_has_chosen(cluster, sampler, samples):
    source = ds.GeneratorDataset(Samples(12), ["x"], sampler=sampler)
    assert train(cluster, source, {1: 2}, epochs=1, global_batch_size=4)[0] == [collections.Counter(samples)]


@pytest.mark.parametrize(
    ("sampler", "samples"),
    [
        (ds.RandomSampler(num_samples=5), 5),
        (ds.RandomSampler(replacement=True, num_samples=5), 5),
        (ds.DistributedSampler(3, 1, num_samples=2), 6),
    ],
)
def test_samples_that_a_shuffling_sampler_draws_differ_in_each_epoch(cluster, sampler, samples):
    source = ds.GeneratorDataset(Samples(12), ["x"], sampler=sampler)
    epochs = train(cluster, source, {1: 2}, epochs=8, global_batch_size=4)[0]
    assert [len(epoch) for epoch in epochs] == [samples] * 8
    assert {sample for epoch in epochs for sample in epoch} == set(range(12))
    first = train(cluster, source, {1: 2}, epochs=2, global_batch_size=4, shuffle=False)[0]
    assert first == [collections.Counter(range(samples))] * 2


@pytest.fixture
def seed():
    before = ds.config.get_seed()
    yield ds.config.set_seed
    ds.config.set_seed(before)


def split(total, **how):
    return ds.GeneratorDataset(Samples(total), ["x"], shuffle=False).split([0.5, 0.5], **how)


@pytest.mark.parametrize("shards", [None, 3])
def test_a_part_of_a_split_is_trained_and_no_sample_of_the_other(cluster, seed, shards):
    seed(7)
    train_part, test_part = split(40)
    if shards:
        train_part.use_sampler(ds.DistributedSampler(shards, 0))
    held_back = {int(row[0][0]) for row in test_part.create_tuple_iterator(num_epochs=1, output_numpy=True)}
    epochs = train(cluster, train_part, {1: 2, 3: 1}, epochs=3, global_batch_size=4)[0]
    assert epochs == [collections.Counter(set(range(40)) - held_back)] * 3


def test_a_split_that_draws_needs_a_seed(cluster, seed):
    seed(5489)  # as if it had not been called
    for part in split(40):
        with pytest.raises(ValueError, match="a RandomSampler before a SequentialSampler .*set_seed"):
            ElasticDataset(part.batch(4))
    epochs = train(cluster, split(40, randomize=False)[1], {1: 2}, epochs=2, global_batch_size=4)[0]
    assert epochs == [collections.Counter(range(20, 40))] * 2


def test_replaced_operations_are_logged_once(cluster, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "ms_kungfu")
    cluster.size = 2
    ElasticDataset(generator(50).shuffle(9).batch(8))
    monkeypatch.setenv("RANK_ID", "1")
    ElasticDataset(generator(50).shuffle(9).batch(8))
    assert [record.getMessage() for record in caplog.records] == [
        "dataset: global_batch_size=16 batch=8 workers=2 order=permutation. The global batch stays the same at any "
        "cluster size; with batch_size=8 it would grow with the number of workers"
    ]


def bucketed():
    return generator(9).bucket_batch_by_length(["x"], [5], [2, 2], lambda x: x.size)


def below(sampler):
    def make():
        source = ds.GeneratorDataset(Samples(9), ["x"], sampler=sampler)
        source.add_sampler(ds.SubsetSampler([0, 2]))
        return source.batch(3)

    return make


def weighted(weights, drawn, replacement=True, total=9):
    sampler = ds.WeightedRandomSampler(weights, drawn, replacement)
    return ds.GeneratorDataset(Samples(total), ["x"], sampler=sampler)


@pytest.mark.parametrize("replacement", [True, False])
def test_weighted_samples_are_the_same_at_any_size_and_after_deaths(cluster, replacement):
    weights = [0.0] * 4 + [1.0] * 4 + [9.0] * 4
    drawn = 400 if replacement else 8
    source = weighted(weights, drawn, replacement, total=12)
    epochs = train(cluster, source, epochs=3, global_batch_size=4, seed=1)[0]
    cluster.size, cluster.version = 3, 0
    assert train(cluster, source, {1: 2}, {3: 1}, epochs=3, global_batch_size=4, seed=1)[0] == epochs
    for epoch in epochs:
        assert sum(epoch.values()) == drawn
        assert not any(epoch[number] for number in range(4))
    if replacement:  # 360 of 400 draws are expected, with a standard deviation of 6; the seed is fixed
        assert 330 < sum(epochs[0][number] for number in range(8, 12)) < 390
        assert epochs[0] != epochs[1]
    else:
        assert max(epochs[0].values()) == 1


def test_ledger_of_weighted_samples_is_exact(cluster, tmp_path):
    cluster.size = 2
    train(cluster, weighted([1.0] * 8 + [9.0], 20), {2: 1}, epochs=2, global_batch_size=4, ledger=tmp_path)
    assert audit.main([str(tmp_path)]) == 0


def text_file(folder):
    path = folder / "lines.txt"
    path.write_text("".join(f"{number}\n" for number in range(20)))
    return ds.TextFileDataset(str(path), shuffle=False)


def lines_of(batch):
    return [int(line) for line in batch[0]]


def test_indexed_file_is_read_once_and_again_if_it_changes(cluster, tmp_path):
    cluster.size = 2
    copy = indexed(text_file(tmp_path), tmp_path / "index")
    epochs = train(cluster, copy, {2: 3}, epochs=2, numbers=lines_of, global_batch_size=4)[0]
    assert epochs == [collections.Counter(range(20))] * 2
    before = (tmp_path / "index" / "rows").stat()
    same = ds.TextFileDataset(str(tmp_path / "lines.txt"), shuffle=False)
    assert [int(row[0]) for row in batches_of(indexed(same, tmp_path / "index"))] == list(range(20))
    assert (tmp_path / "index" / "rows").stat().st_ino == before.st_ino
    (tmp_path / "lines.txt").write_text("7\n8\n")
    again = indexed(ds.TextFileDataset(str(tmp_path / "lines.txt"), shuffle=False), tmp_path / "index")
    assert [int(row[0]) for row in batches_of(again)] == [7, 8]
    assert (tmp_path / "index" / "rows").stat().st_ino != before.st_ino


def test_index_of_an_iterator_is_kept_and_half_of_one_is_not(cluster, tmp_path):
    read = []

    def source():
        for number in range(6):
            read.append(number)
            if len(read) == 3:
                raise OSError("the disk is full")
            yield np.full((number, 2), number, np.float32), np.int64(number)

    with pytest.raises(RuntimeError, match="the disk is full"):
        indexed(ds.GeneratorDataset(source, ["x", "y"]), tmp_path)
    for _ in range(2):
        data = indexed(ds.GeneratorDataset(source, ["x", "y"]), tmp_path, num_shards=2, shard_id=1)
        assert [(row[0].shape, row[0].dtype, int(row[1])) for row in batches_of(data)] == [
            ((number, 2), np.float32, number) for number in (1, 3, 5)
        ]
    assert read == [0, 1, 2, *range(6)]


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda path: text_file(path).batch(2), TypeError, "apply map and batch to the result"),
        (lambda path: generator(9), TypeError, r"pass the dataset to ElasticDataset without indexed\(\)"),
        (lambda path: ds.TextFileDataset(text_file(path).dataset_files), ValueError, "pass shuffle=False to it"),
        (
            lambda path: ds.TextFileDataset(text_file(path).dataset_files, num_shards=2, shard_id=0, shuffle=False),
            ValueError,
            r"give num_shards and shard_id to indexed\(\)",
        ),
    ],
)
def test_index_of_a_dataset_that_has_no_fixed_order_is_refused(tmp_path, make, error, named):
    with pytest.raises(error, match=named):
        indexed(make(tmp_path), tmp_path / "index")


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: generator(9).repeat(2).batch(3), ValueError, "then repeat"),
        (lambda: generator(9).batch(3).batch(3), TypeError, "two batch"),
        (lambda: generator(9).batch(lambda info: 3), TypeError, "whose size is a function"),
        (bucketed, TypeError, r"padded_batch\(\) .* batch\(per_batch_map=\.\.\.\)"),
        (lambda: generator(9).batch(3).take(2), TypeError, "TakeDataset changes"),
        (lambda: generator(9).batch(3).filter(lambda x: True), TypeError, "FilterDataset changes"),
        (lambda: weighted([1.0] * 8, 9), ValueError, "8 weights for 9 samples"),
        (lambda: weighted([0.0] * 7 + [1.0] * 2, 3, False), ValueError, "only 2 samples have a weight"),
        (lambda: ds.GeneratorDataset(Samples(9), ["x"], sampler=iter([1])), TypeError, "a custom sampler"),
        (lambda: ds.GeneratorDataset(Samples(9), ["x"], batch_sampler=[[0, 1]]), TypeError, "per_batch_map"),
        (lambda: ds.TextFileDataset(__file__).batch(3), TypeError, r"indexed\(TextFileDataset\(..., shuffle=False"),
        (below(ds.DistributedSampler(3, 0)), TypeError, "a DistributedSampler before a SubsetSampler gives"),
        (lambda: ds.GeneratorDataset(lambda: iter([]), ["x"]).batch(3), TypeError, r"__getitem__ .*indexed\("),
    ],
)
def test_pipeline_without_meaning_is_refused_in_one_sentence(cluster, make, error, named):
    with pytest.raises(error, match=named):
        ElasticDataset(make())


def test_a_repeat_of_samples_without_a_batch(cluster):
    assert pipelines.take_apart(generator(9).repeat(2).map(lambda x: x)).passes == 2
    assert pipelines.take_apart(generator(9).repeat(1).batch(3)).passes == 1
