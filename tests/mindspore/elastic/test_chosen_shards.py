"""``ElasticDataset(shards="auto")``: how many shards are chosen, and when none are."""

from __future__ import annotations

import re

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.train import Model

from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.callbacks.sharded import choose_shards, obstacle
from ms_kungfu.dataset import ElasticDataset, audit, shard_choice
from ms_kungfu.elastic import SchedulePolicy
from ms_kungfu.optimizers import KungFuMomentum, SynchronousAveragingOptimizer
from tests.mindspore.elastic.fake_cluster import generator
from tests.mindspore.elastic.test_sharded_training import PROGRAM, history


@pytest.fixture(autouse=True)
def graph_mode():
    """Compile, as `Model.train` does in the programs that shards make faster."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=before)


@pytest.mark.parametrize(
    ("batch", "sizes", "cores", "shards", "reason"),
    [
        (32, {2, 4}, 2, 4, ""),
        (32, {4}, 4, 4, ""),
        (32, {4}, 7, 4, ""),
        (32, {3}, 2, 4, ""),  # 3 doesn't divide the batch
        (32, {2, 1}, 2, 2, ""),
        (32, {4}, 8, None, "each of 4 workers would use 1 of its 2 cores"),
        (32, {1}, 2, None, "1 worker would use 1 of its 2 cores"),
        (32, {1, 2, 4}, 2, None, "1 worker would have 4 shards per step, and the limit is 2"),
        (31, {4, 8}, 2, None, "each of 4 workers would have 8 shards per step, and the limit is 2"),
        (3, {4}, 2, None, "a batch of 3 has fewer samples than the 4 workers need"),
    ],
)
def test_shards_are_chosen_if_no_planned_size_makes_steps_slow(batch, sizes, cores, shards, reason):
    assert shard_choice.choose(batch, sizes, cores) == (shards, reason)


def network(*more):
    return nn.SequentialCell(nn.Dense(1, 2), *more, nn.Dense(2, 1))


def train_cell(net=None, make_optimizer=KungFuMomentum, **options):
    net = net or network()
    optimizer = make_optimizer(net.trainable_params(), 0.1, 0.9, **options)
    return Model(net, nn.MSELoss(), optimizer)._train_network


def averaging(*args):
    return SynchronousAveragingOptimizer(nn.Momentum(*args))


class OwnCell(nn.TrainOneStepCell):
    """A training cell of the program."""


def test_a_plain_training_cell_has_no_obstacle():
    assert obstacle(train_cell()) == ""
    assert obstacle(train_cell(make_optimizer=nn.Momentum)) == ""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: train_cell(network(nn.Dropout(p=0.5))), "Dropout of MindSpore draws other numbers"),
        (lambda: OwnCell(network(), nn.Momentum(network().trainable_params(), 0.1, 0.9)), "a OwnCell"),
        (lambda: train_cell(overlap=True), "overlap=True"),
        (lambda: train_cell(gradients_mean=False), "gradients_mean=False"),
        (lambda: train_cell(make_optimizer=averaging), "trains a separate model"),
    ],
    ids=["dropout", "cell", "overlap", "sum", "averaging"],
)
def test_training_that_shards_do_not_support_has_an_obstacle(make, reason):
    assert reason in obstacle(make())


def test_pynative_mode_is_an_obstacle():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert "PyNative" in obstacle(train_cell())


def chosen(monkeypatch, schedule=None, *, size=2, cores=2, batch=None, **options):
    """Return the number of shards, and what is logged."""
    for name, value in {"KUNGFU_START_SIZE": size, "KUNGFU_START_CORES": cores}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, str(value))
    data = ElasticDataset(generator(100), shards="auto", **(batch or {"global_batch_size": 32}))
    assert data.awaits_shards
    assert data.shards is None
    callback = KungFuElasticCallback(schedule, **options)
    callback._set_batch_size(data)
    choose_shards(train_cell(), data, callback._options.as_run())
    assert not data.awaits_shards
    return data.shards


def test_the_callback_chooses_by_the_planned_sizes(monkeypatch, caplog):
    caplog.set_level("INFO", logger="ms_kungfu")
    assert chosen(monkeypatch) == 2
    assert chosen(monkeypatch, "5:4,9:2") == 4
    assert chosen(monkeypatch, {5: 4}, size=4) == 4
    assert chosen(monkeypatch, global_batch_size=30, size=4) == 5
    monkeypatch.setenv("KUNGFU_CORES_PER_WORKER", "1")
    assert chosen(monkeypatch, cores=16) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"size": None}, "kungfu-run on a single host"),
        ({"cores": None}, "kungfu-run on a single host"),
        ({"cores": 16}, "each of 2 workers would use 1 of its 8 cores"),
        ({"schedule": lambda step: None}, "the sizes of the cluster aren't known in advance"),
        ({"policy": SchedulePolicy(learning_rate={4: 0.1})}, "the sizes of the cluster aren't known in advance"),
        ({"lr_rule": "linear"}, "lr_rule follows the number of workers"),
        ({"batch": {"batch_size": 4}}, "batch_size grows with the cluster"),
        ({"batch": {"global_batch_size": 32, "seed": -1}}, "the seed -1"),
    ],
)
def test_the_log_has_the_reason_for_no_shards(monkeypatch, caplog, arguments, reason):
    caplog.set_level("INFO", logger="ms_kungfu")
    assert chosen(monkeypatch, **arguments) is None
    (line,) = [record.message for record in caplog.records if "shards=none" in record.message]
    assert reason in line


def test_in_a_loop_of_its_own_a_program_gets_no_shards(cluster, caplog, tmp_path):
    caplog.set_level("INFO", logger="ms_kungfu")
    data = ElasticDataset(generator(10), global_batch_size=4, shards="auto", ledger=tmp_path)
    assert not data.keeps_ledger
    assert len(list(data.create_tuple_iterator(num_epochs=1))) == 3
    assert data.keeps_ledger
    assert "isn't trained by Model.train" in caplog.text
    assert audit.audit(*audit.read(tmp_path)).exact
    data.choose_shards(2)  # too late
    assert data.shards is None


@pytest.mark.parametrize(
    ("batch", "shards", "workers", "found"),
    [(32, 4, 3, 4), (32, 4, 5, 8), (32, 4, 40, 32), (4, 2, 6, 4), (31, 1, 3, 1), (30, 2, 7, 10)],
)
def test_more_shards_give_each_worker_at_most_two(batch, shards, workers, found):
    assert shard_choice.more(batch, shards, workers) == found


def test_two_cores_per_worker_are_a_reason_for_no_shards(monkeypatch):
    monkeypatch.setenv("KUNGFU_CORES_PER_WORKER", "2")
    assert chosen(monkeypatch) is None


def test_shards_are_added_only_for_workers_without_one(cluster):
    data = ElasticDataset(generator(100), global_batch_size=32, shards="auto")
    data.choose_shards(4)
    for size, shards in ((2, 4), (4, 4), (5, 8), (3, 8), (40, 32)):
        cluster.size = size
        data.keep_all_busy()
        assert data.shards == shards
    data.set_batch_size(global_batch_size=33)
    assert data.shards == 33
    data.begin_with_chosen_shards()  # in the next training call
    assert data.shards == 3, "the largest number up to 4 that divides the batch"
    fixed = ElasticDataset(generator(100), global_batch_size=32, shards=4)
    cluster.size = 5
    fixed.keep_all_busy()
    assert fixed.shards == 4


def test_any_other_word_is_rejected():
    with pytest.raises(ValueError, match="shards must be a number, 'auto' or None, got 'best'"):
        ElasticDataset(generator(10), global_batch_size=4, shards="best")


def test_chosen_shards_train_as_given_ones_also_after_unplanned_growth(run_elastic, two_cores):
    given = run_elastic(PROGRAM, "graph", "model", "4", "3:3", "2", np=2)
    seen = run_elastic(PROGRAM, "graph", "auto", "4", "3:3", "2", np=2)
    assert seen.output.count("dataset: shards=") == seen.output.count("dataset: shards=4 samples=4") == 1
    assert history(seen) == history(given)
    grown = run_elastic(PROGRAM, "graph", "auto", "4", "none", "400", "unplanned", np=2)
    assert re.findall("dataset: (shards=.*)", grown.output) == ["shards=2 samples=8", "shards=4 samples=4"]
    assert {row["size"] for row in grown.of("after")} == {2, 3}
    history(grown)  # the workers agree on each step
    report = grown.audit()
    assert report.exact, audit.to_text(report)
