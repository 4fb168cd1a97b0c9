"""ElasticDataset over fake clusters in one process: each rank is a dataset of its own, asked in turn."""

from __future__ import annotations

import collections
import random
import struct
import time

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn
from mindspore.mindrecord import FileWriter
from mindspore.train import Callback, Model

from ms_kungfu.dataset import ElasticDataset, audit, sharding
from ms_kungfu.errors import KungFuError
from tests.conftest import long
from tests.mindspore.elastic.fake_cluster import Samples, by_function, generator, sample_numbers, train


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"global_batch_size": 16}, {"global_batch_size": 16, "shuffle": False}]
)
def test_each_sample_once_an_epoch_under_resizes(cluster, options):
    epochs, _ = train(cluster, generator(150), {3: 2, 6: 4, 11: 1, 14: 3}, epochs=3, **options)
    assert epochs == [collections.Counter(range(150))] * 3


def test_a_held_global_batch_takes_the_same_steps_at_any_size(cluster):
    alone = train(cluster, generator(100), global_batch_size=16)[1]
    assert len(alone) == 14
    assert train(cluster, generator(100), {2: 2, 5: 4, 9: 3}, global_batch_size=16)[1] == alone


def test_a_change_at_the_last_step_of_an_epoch(cluster):
    epochs, steps = train(cluster, generator(96), {6: 4, 12: 1}, global_batch_size=16)
    assert (epochs, len(steps)) == ([collections.Counter(range(96))] * 2, 12)


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_samples_of_a_failed_worker_are_trained_last_in_the_same_epoch(cluster):
    cluster.size = 4
    _, undisturbed = train(cluster, generator(96), epochs=1, global_batch_size=16)
    epochs, steps = train(cluster, generator(96), deaths={2: 1}, epochs=1, global_batch_size=16)
    assert epochs == [collections.Counter(range(96))]
    assert len(steps) == 7  # it takes a step more
    lost = undisturbed[1][4:8]
    assert steps[1] == undisturbed[1][:4] + undisturbed[1][8:]
    # the survivors share the next steps at once, though the cluster changes later; the last two share what is left
    assert steps[2:5] == undisturbed[2:5]
    assert sum(steps[5:], []) == undisturbed[5] + lost


@pytest.mark.parametrize(
    "deaths",
    [{1: 0}, {6: 3}, {12: 0}, {1: 2, 4: 0, 7: 0}, {6: 0, 7: 1}],
    ids=["first", "last of epoch", "end", "3", "in a row"],
)
@pytest.mark.parametrize("options", [{"batch_size": 4}, {"global_batch_size": 16}])
def test_each_sample_once_an_epoch_under_deaths(cluster, deaths, options):
    cluster.size = 4
    assert train(cluster, generator(96), deaths=deaths, **options)[0] == [collections.Counter(range(96))] * 2


def test_ledger_of_resizes_and_failures_lists_trained_samples_exactly(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("KUNGFU_LEDGER_DIR", str(tmp_path / "ledger"))
    cluster.size = 3
    changes = {"resizes": {5: 4, 13: 2, 20: 5}, "deaths": {2: 1, 16: 0, 28: 4}}
    epochs, steps = train(cluster, generator(150), **changes, epochs=3, global_batch_size=14, seed=7)
    assert epochs == [collections.Counter(range(150))] * 3
    report = audit.audit(*audit.read(tmp_path / "ledger"))
    assert report.problems == report.notes == []
    assert report.exact
    assert [epoch.finished for epoch in report.epochs] == [True] * 3
    assert sum(epoch.steps for epoch in report.epochs) == len(steps)
    assert all(epoch.given_back > 0 for epoch in report.epochs)


def test_random_trainings(cluster, tmp_path):
    for seed in range(12):
        rng = random.Random(seed)
        total, epochs, cluster.size = rng.randint(20, 120), rng.randint(1, 3), 4
        deaths = {rng.randint(1, 4): rng.randrange(4), rng.randint(9, 12): rng.randrange(3)}
        options = rng.choice([{"batch_size": 3}, {"global_batch_size": 10}])
        folder = tmp_path / str(seed)
        trained, _ = train(cluster, generator(total), {7: 4}, deaths, epochs, ledger=folder, **options)
        assert trained == [collections.Counter(range(total))] * epochs, f"seed {seed}"
        assert audit.audit(*audit.read(folder)).exact, f"seed {seed}"


def begin(cluster, size, samples, driven=False, **options):
    """Each worker's dataset of so many samples, and an iterator over one epoch."""
    cluster.size, workers = size, []
    for cluster.rank in range(size):
        ElasticDataset._made = 0
        data = ElasticDataset(generator(samples), **options)
        data.driven = cluster if driven else None
        workers.append((data, data.create_tuple_iterator(num_epochs=1, output_numpy=True)))
    return workers


@pytest.mark.parametrize("look", [lambda data: data.global_batch_size, lambda data: data.members, len, None])
def test_reading_a_dataset_after_a_manual_resize_changes_nothing(cluster, tmp_path, look):
    workers = begin(cluster, 2, 24, global_batch_size=8, ledger=tmp_path)
    for cluster.rank, (_, iterator) in enumerate(workers):
        next(iterator)
    cluster.resize(1)
    cluster.rank = 0
    data, iterator = workers[0]
    if look is not None:
        look(data)
    assert sum(1 for _ in iterator) == 2
    report = audit.audit(*audit.read(tmp_path))
    assert report.exact, audit.to_text(report)


@pytest.mark.parametrize("driven", [True, False], ids=["step_end", "next batch"])
def test_a_resize_by_hand_after_a_death_in_the_same_step_loses_nothing(cluster, tmp_path, driven):
    """Rank 2 dies in step 1, which is committed without it; before any rank counts the step the program resizes."""
    workers = begin(cluster, 3, 48, driven, global_batch_size=12, ledger=tmp_path)
    seen = [collections.Counter(), collections.Counter()]
    for step in range(10):
        batches = []
        for cluster.rank, (_, iterator) in enumerate(workers):
            batch = next(iterator, None)
            batches.append([] if batch is None else sample_numbers(batch)[: cluster.weights[cluster.rank]])
        if step == 1:
            workers.pop()
            batches.pop()
            cluster.participants = [0, 1]
            cluster.resize(2)
            cluster.resize(2)  # once more, by hand too: nothing was reduced in between
        if driven:
            for cluster.rank, (data, _) in enumerate(workers):
                data.commit(cluster.take_participants())
        seen[0].update(sum(batches, []))
    assert seen[0] == collections.Counter(range(48))
    report = audit.audit(*audit.read(tmp_path))
    assert report.exact, audit.to_text(report)
    assert [epoch.given_back for epoch in report.epochs] == [4]


def test_a_death_in_the_last_reduction_of_an_epoch_loses_nothing(cluster):
    """Gradients accumulated to the end of the epoch: no rank counts the step before the iterator ends."""
    cluster.size = 2
    data = ElasticDataset(generator(8), global_batch_size=8)
    data.driven = cluster
    iterator = data.create_tuple_iterator(num_epochs=1, output_numpy=True)
    first = sample_numbers(next(iterator))
    cluster.participants = [0]
    lost = sample_numbers(next(iterator))
    assert sorted(first + lost) == list(range(8))
    assert list(iterator) == []
    assert data.epoch == 1


def test_ledger_records_delivered_samples_not_the_planned_ones(cluster, tmp_path, monkeypatch):
    """A deal that doesn't hand out the shares: the audit sees it."""
    right = sharding.EpochCursor.deal

    def wrong(walk, *arguments):
        where, lengths = right(walk, *arguments)
        return np.roll(where, 1), lengths

    monkeypatch.setattr(sharding.EpochCursor, "deal", wrong)
    train(cluster, generator(30), epochs=1, global_batch_size=10, ledger=tmp_path)
    report = audit.audit(*audit.read(tmp_path))
    assert "rank 0 trained [29,30)+[0,9), but its share is [0,10)" in report.problems[0]


def test_a_survivor_that_the_others_think_dead_stops(cluster):
    cluster.size = 2
    data = ElasticDataset(generator(40), batch_size=4)
    data.driven = cluster
    next(iter(data))
    with pytest.raises(KungFuError, match="rank 0 is alive but didn't take part in the step of ranks"):
        data.commit([1])


# -- shares ---------------------------------------------------------------------------------------------------------


def test_gradients_count_by_the_samples_they_stand_for(cluster):
    cluster.size = 3
    weights = []
    for cluster.rank in range(3):
        data = ElasticDataset(generator(34), global_batch_size=32)
        data.driven = cluster
        batches = data.create_tuple_iterator(num_epochs=1, output_numpy=True)
        next(batches)
        first = cluster.weights[cluster.rank]
        next(batches)  # accumulated: the step stands for both batches
        weights.append((first, cluster.weights[cluster.rank], data.weight))
        data.commit()
        assert (data.weight, cluster.weights[cluster.rank]) == (0, 1)
    assert weights == [(6, 12, 12), (6, 12, 12), (5, 10, 10)]


def test_worker_without_a_sample_trains_a_repeated_one_of_weight_zero(cluster):
    cluster.size = 4
    found = []
    for cluster.rank in range(4):
        data = ElasticDataset(generator(2), global_batch_size=8, shuffle=False)
        (batch,) = [b[0].ravel().tolist() for b in data.create_tuple_iterator(num_epochs=1, output_numpy=True)]
        found.append(batch)
    assert found == [[0], [1], [1], [1]]
    for cluster.rank in range(4):
        data = ElasticDataset(generator(2), global_batch_size=8, shuffle=False)
        next(iter(data))
        assert cluster.weights[cluster.rank] == (1, 1, 0, 0)[cluster.rank]


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


def test_mindspore_prefetches_and_what_it_prefetched_is_not_consumed(cluster):
    read = []

    class Watched(Samples):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    source = ds.GeneratorDataset(Watched(400), ["x"], shuffle=False, python_multiprocessing=False)
    data = ElasticDataset(source, batch_size=4)
    data.driven = cluster
    iterator = data.create_tuple_iterator(num_epochs=1, output_numpy=True)
    next(iterator)
    next(iterator)
    assert len(read) > 8
    assert data.position == 0
    data.commit()
    assert data.position == 8


def test_a_source_that_leaves_out_samples_is_refused(cluster):
    def odd_only(indices):
        return by_function([i for i in indices if i % 2])

    data = ElasticDataset(odd_only, global_batch_size=4, total=9, shuffle=False)
    with pytest.raises(ValueError, match="requires 3 samples from the source .*, but the source yielded 0"):
        for _ in data:
            pass


# -- formats --------------------------------------------------------------------------------------------------------


def mnist(folder, total):
    """MNIST's IDX files; a sample's number is in its first two pixels."""
    images = np.zeros((total, 28, 28), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.arange(total) % 256, np.arange(total) // 256
    (folder / "train-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, *images.shape) + images.tobytes())
    labels = (np.arange(total) % 10).astype(np.uint8)
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, total) + labels.tobytes())
    return ds.MnistDataset(str(folder), usage="train")


def cifar10(folder, total):
    """One of CIFAR-10's binary files; a sample's number is in its first two red pixels."""
    records = np.zeros((total, 1 + 3072), np.uint8)
    records[:, 0] = np.arange(total) % 10
    records[:, 1], records[:, 2] = np.arange(total) % 256, np.arange(total) // 256
    (folder / "data_batch_1.bin").write_bytes(records.tobytes())
    return ds.Cifar10Dataset(str(folder), usage="train")


def mindrecord(folder, total):
    path = str(folder / "samples.mindrecord")
    writer = FileWriter(path, shard_num=1, overwrite=True)
    writer.add_schema({"x": {"type": "int32"}})
    writer.write_raw_data([{"x": i} for i in range(total)])
    writer.commit()
    return ds.MindDataset(path, columns_list=["x"])


def pixel_numbers(columns):
    image = columns[0].astype(int)
    return (image[:, 0, 0, 0] + 256 * image[:, 0, 1, 0]).tolist()


FORMATS = {
    "GeneratorDataset": (lambda _, total: generator(total), sample_numbers),
    "function": (lambda _, __: by_function, sample_numbers),
    "MnistDataset": (mnist, pixel_numbers),
    "Cifar10Dataset": (cifar10, pixel_numbers),
    "MindDataset": (mindrecord, sample_numbers),
}


# CIFAR-10 through a map only with --all: its 10,000 samples take 3 s of a processor.
@pytest.mark.parametrize(
    ("kind", "through_map"),
    [
        *((kind, False) for kind in FORMATS),
        *(long(kind, True) if kind == "Cifar10Dataset" else (kind, True) for kind in FORMATS),
    ],
)
def test_formats_through_resizes_and_deaths(cluster, tmp_path, kind, through_map):
    make, numbers = FORMATS[kind]
    total, batch = (10_000, 930) if make is cifar10 else (300, 28)  # MindSpore refuses a smaller file of CIFAR-10
    source = make(tmp_path, total)
    if through_map and isinstance(source, ds.Dataset):
        source = source.map(lambda x: x, source.get_col_names()[0], num_parallel_workers=2)
    options = {"total": total, "global_batch_size": batch, "ledger": tmp_path / "ledger"}
    epochs, steps = train(cluster, source, {3: 4, 15: 2}, {6: 1, 11: 0}, numbers=numbers, **options)
    assert epochs == [collections.Counter(range(total))] * 2
    assert audit.audit(*audit.read(tmp_path / "ledger")).exact
    order = np.random.default_rng((0, 0)).permutation(total)
    assert steps[0] == order[:batch].tolist(), "in the order of the epoch"


def test_worker_given_a_position_in_mid_epoch_continues_after_it(cluster):
    """As asynchronous workers do that come together for a checkpoint: the cluster is as before."""
    cluster.size = 2
    giver, taker = (ElasticDataset(generator(45), global_batch_size=6) for _ in range(2))
    ahead, behind = (data.create_tuple_iterator(num_epochs=1, output_numpy=True) for data in (giver, taker))
    for _ in range(4):
        next(ahead)
    next(behind)
    giver.commit()
    taker.restore(giver.state())
    assert [sample_numbers(batch) for batch in behind] == [sample_numbers(batch) for batch in ahead]


class Augmented(Samples):
    """Other bytes at each read, and slow enough for threads of a pipeline to be behind."""

    def __getitem__(self, number):
        time.sleep(0.02)
        return (np.array([number + np.random.rand()]),)


class Order(Samples):
    def __init__(self, numbers):
        self._numbers = numbers

    def __len__(self):
        return len(self._numbers)

    def __getitem__(self, number):
        return (np.array([self._numbers[number]]),)


def contents_of(source, **options):
    if not isinstance(source, ds.Dataset) and not callable(source):
        source = ds.GeneratorDataset(source, ["x"], shuffle=False)
    data = ElasticDataset(source, global_batch_size=4, **options)
    data.read_contents()
    return data.contents


def by_zip(numbers):
    return ds.zip((ds.GeneratorDataset(Order(numbers), ["x"]), ds.NumpySlicesDataset(numbers, ["y"], shuffle=False)))


def test_contents_are_read_below_the_maps_in_the_sampling_of_the_program():
    numbers = list(range(40))
    whole = contents_of(Order(numbers))
    assert len(whole.some) == 8
    mapped = ds.GeneratorDataset(Order(numbers), ["x"]).map(lambda x: x + np.random.rand(), ["x"]).batch(5)
    assert contents_of(mapped) == whole, "augmentation is each worker's own"
    assert contents_of(Order(numbers[::-1])) != whole
    chosen = ds.GeneratorDataset(Order([*numbers, 99]), ["x"], sampler=ds.SubsetSampler(numbers))
    assert contents_of(chosen) == whole, "by the numbers of the deal"
    assert contents_of(by_zip, total=40) == contents_of(by_zip, total=40) != whole
    assert contents_of(Order(numbers), contents_check="all").samples == 40
    assert contents_of(Order(numbers), contents_check="none") is None


def test_contents_that_change_between_reads_are_left_out_unless_requested(monkeypatch):
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    assert contents_of(Augmented(40)) is None
    time.sleep(0.2)  # in which a thread that still read ahead would draw
    assert np.random.get_state()[1].tolist() == before, "the program's random numbers stay its own"
    monkeypatch.setenv("KUNGFU_CONTENTS_CHECK", "all")
    with pytest.raises(ValueError, match=r"contents_check='all': sample \d+ differs from one read to the next"):
        contents_of(Augmented(40))
    with pytest.raises(ValueError, match="contents_check must be 'some', 'all' or 'none', got 'few'"):
        contents_of(Augmented(40), contents_check="few")


def test_contents_with_parallel_readers_are_read_in_this_process():
    for of_program in (lambda source: source, lambda source: lambda numbers: source):
        source = ds.GeneratorDataset(Augmented(40), ["x"], shuffle=False, num_parallel_workers=2)
        total = {} if of_program(source) is source else {"total": 40}
        assert contents_of(of_program(source), **total) is None, "forked readers would augment each read alike"
        assert source.num_parallel_workers == 2


def test_ledger_header_has_the_contents_that_were_read(cluster, tmp_path):
    data = ElasticDataset(generator(8), global_batch_size=4, ledger=tmp_path)
    data.read_contents()
    collections.deque(data.create_tuple_iterator(num_epochs=1), maxlen=0)
    report = audit.audit(*audit.read(tmp_path))
    assert (report.exact, report.proves, report.epochs[0].compared) == (True, "numbers and contents", 8)


def test_elastic_dataset_works_with_an_unmodified_model_train(cluster):
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
        (
            lambda: ElasticDataset({"x": np.ones(9)}, 3),
            TypeError,
            "not dict; for arrays, use mindspore.dataset.NumpySlicesDataset",
        ),
        (lambda: ElasticDataset(generator(9).concat(generator(9)), 3), TypeError, "ConcatDataset"),
        (
            lambda: ElasticDataset(ds.GeneratorDataset(lambda: iter([]), ["x"]), 3),
            TypeError,
            "that reads a function or an iterator has no numbered samples",
        ),
        (
            lambda: next(iter(ElasticDataset(generator(9), 10, drop_remainder=True))),
            ValueError,
            "dataset has 9 samples",
        ),
        (lambda: next(iter(ElasticDataset(generator(9), 3).map(lambda x: x))), TypeError, "last part of a pipeline"),
    ],
)
def test_bad_input_is_one_sentence(cluster, make, error, named):
    with pytest.raises(error, match=named):
        make()


def test_elastic_dataset_can_be_serialized_for_a_drawing():
    """SummaryCollector warns of an error in the dataset where it can't have it."""
    drawn = ds.serialize(ElasticDataset(ds.NumpySlicesDataset(list(range(10)), shuffle=False), global_batch_size=4))
    assert (drawn["op_type"], drawn["batch_size"]) == ("Batch", 4)


def test_elastic_dataset_answers_queries_and_refuses_later_operations():
    source = ds.NumpySlicesDataset(np.zeros((20, 1), np.float32), ["x"], shuffle=False)
    data = ElasticDataset(source.batch(4).repeat(3))
    assert (data.get_repeat_count(), data.num_classes()) == (3, source.num_classes())
    for behind in (data.repeat(2), data.take(1), data.shuffle(4)):
        with pytest.raises(TypeError, match="an ElasticDataset must be the last part of a pipeline"):
            next(iter(behind.create_tuple_iterator()))


def test_data_sink_of_an_elastic_dataset_names_the_remedy():
    """`mindspore.data_sink` itself isn't there on CPUs; it sends the dataset to the device so."""
    data = ElasticDataset(ds.NumpySlicesDataset(np.zeros((8, 1), np.float32), ["x"]).batch(2))
    with pytest.raises(TypeError, match="iterate over it instead of data_sink"):
        data.device_que(queue_name="points").send(-1)


def test_the_rest_of_an_epoch_may_be_left_out():
    data = ElasticDataset(
        ds.NumpySlicesDataset(np.arange(20), ["x"], shuffle=False), global_batch_size=4, shuffle=False
    )
    batches = data.create_tuple_iterator()
    for _ in range(2):
        next(batches)
        data.commit()
    next(batches)  # which isn't trained
    data.leave_out_the_rest()
    assert (data.epoch, data.position) == (1, 0)
    assert [batch[0].asnumpy().tolist() for batch in _epoch(data)] == [list(range(k, k + 4)) for k in range(0, 20, 4)]


def _epoch(data):
    for batch in data.create_tuple_iterator(num_epochs=1):
        data.commit()
        yield batch


@pytest.mark.parametrize("shards", ["none", "auto"])
def test_a_worker_that_joined_with_another_dataset_continues_this_one(run_elastic, two_cores, shards):
    seen = run_elastic("two_datasets.py", shards, np=2)
    assert [rows[-1]["epochs"] for rows in seen.workers] == [[3, 2]] * 3
    report = seen.audit()
    assert report.exact, audit.to_text(report)
