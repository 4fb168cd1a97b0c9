"""A step as a deal of shards: the same bits for every history of the cluster."""

from __future__ import annotations

import json
import os

import pytest
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_kungfu.dataset import ElasticDataset, audit
from ms_kungfu.elastic import ShardedStep
from ms_kungfu.elastic.sharded_step import check_optimizer
from ms_kungfu.errors import KungFuError
from ms_kungfu.optimizers import KungFuMomentum, PairAveragingOptimizer, SynchronousAveragingOptimizer
from tests.conftest import long

PROGRAM = "sharded.py"


def history(reports):
    """The state after each step, having checked that all workers agree on it."""
    seen = {}
    for step, rows in reports.by_step("after").items():
        (seen[step],) = {row["parameters"] for row in rows}
    for step, rows in reports.by_step("step").items():
        assert len({row["loss"] for row in rows}) == 1, f"losses of step {step}"
    return seen


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one worker makes of it, by arguments."""
    return {}


@pytest.mark.parametrize(
    ("mode", "net", "np", "schedule", "deaths"),
    [
        long("graph", "norm", 3, "none", ["2:2:1", "4:0:0"]),  # the second is the lowest rank
        long("graph", "norm", 2, "2:4,4:1", []),
        # In the first step, in which the others have looked at its first shard already.
        long("pynative", "norm", 2, "none", ["1:0:3"]),
        long("graph", "model", 2, "2:3,5:1", []),
        ("graph", "both", 1, "2:2", ["4:0:1"]),  # the worker that has joined goes on
        long("graph", "dropout", 2, "2:3", ["4:0:1"]),
        long("graph", "searching", 2, "3:3", ["4:0:1"]),
        long("pynative", "searching", 3, "3:1", []),
        long("graph", "augment", 2, "4:3", ["2:0:1", "5:1:0"]),
    ],
)
def test_every_history_of_the_cluster_has_the_bits_of_one_worker(run_elastic, alone, mode, net, np, schedule, deaths):
    expected = alone.get(net)
    if expected is None:
        first = run_elastic(PROGRAM, "graph", net, "8", "none", "2")
        assert first.audit().exact
        expected = alone[net] = history(first)
    assert len(expected) == 6  # 90 samples in steps of 32: two of 32, one of 26, whose last shard has 2
    seen = run_elastic(PROGRAM, mode, net, "8", schedule, "2", *deaths, np=np)
    assert history(seen) == expected
    assert all(row["cores"] == [1] for row in seen.of("step") if "cores" in row)
    report = seen.audit()
    assert report.exact, audit.to_text(report)
    assert [(epoch.steps, epoch.trained) for epoch in report.epochs] == [(3, 90)] * 2
    assert (sum(epoch.given_back for epoch in report.epochs) > 0) == bool(deaths)
    if deaths:
        # The step stays whole: the others compute what the dead one owed, in the same step.
        step = int(deaths[0].split(":")[0])
        assert sum(row["computed"] for row in seen.by_step("step")[step]) >= 8


def test_joining_workers_read_the_graph_of_another_worker(run_elastic, monkeypatch):
    monkeypatch.setenv("KUNGFU_LOG_LEVEL", "DEBUG")
    seen = run_elastic(PROGRAM, "graph", "plain", "8", "2:3,4:4", "2", np=2)
    assert seen.output.count("graph read: ") >= 2
    monkeypatch.setenv("KUNGFU_PRELOAD", "0")
    other = run_elastic(PROGRAM, "graph", "plain", "8", "2:3,4:4", "2", np=2)
    assert "graph read: " not in other.output
    assert history(seen) == history(other)


@pytest.mark.long
def test_slow_worker_gets_fewer_shards_and_the_bits_stay(run_elastic):
    expected = history(run_elastic(PROGRAM, "graph", "plain", "8", "none", "6", ledger=False))
    reports = run_elastic(PROGRAM, "graph", "slow", "8", "none", "6", np=2)
    assert history(reports) == expected
    assert reports.audit().exact
    # Two full steps of each epoch have 8 shards; of speeds 3 to 1 six and two are best.
    last = reports.by_step("step")[17]
    assert [row["computed"] for row in last] == [6, 2]


@pytest.mark.long  # test_sharded_features.py has the error, unit/test_shards.py its names
def test_gradient_that_is_no_function_of_the_shard_ends_training_by_name(run_elastic):
    output = run_elastic(PROGRAM, "graph", "stock", "8", "none", "1", np=2, ledger=False, status=1).output
    assert "computed one shard twice, and the gradient of " in output
    assert "Dropout" in output


@pytest.mark.long
def test_gradient_that_is_no_function_of_the_shard_is_logged_if_requested(run_elastic):
    seen = run_elastic(PROGRAM, "graph", "stock", "8", "none", "1", "warn", np=2)
    assert "computed one shard twice, and the gradient of " in seen.output
    assert "Another run of this training may give other results" in seen.output
    assert len(seen.of("end")) == 2
    assert seen.audit().exact


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to differ in their number")
def test_ranks_with_other_numbers_of_cores_are_refused(run_elastic):
    seen = run_elastic(PROGRAM, "graph", "plain", "8", "none", "1", "2:1:wide", np=2, ledger=False, status=1)
    assert "computed on 1 cores per worker" in seen.output
    assert "computed on 2 cores per worker (kungfu-run -cores-per-worker K gives each" in seen.output
    assert not seen.by_step("step").get(2)


@pytest.mark.long
def test_measurements_and_their_decisions_are_a_function_of_the_seed(run_elastic):
    """A policy sets the rate by the noise scale, and others change the number of shards and their shape."""
    seen = [
        run_elastic(PROGRAM, "graph", "steered", "8", schedule, "2", *deaths, np=np)
        for np, schedule, deaths in ((1, "none", []), (2, "3:3", ["2:0:1", "5:1:0"]))
    ]
    alone, together = (history(reports) for reports in seen)
    assert together == alone
    told = []
    for reports in seen:
        (of_step,) = {json.dumps([rows[0]["told"] for rows in reports.by_step("told").values()])}
        for rows in reports.by_step("told").values():
            assert len({json.dumps(row["told"]) for row in rows}) == 1
        told.append(of_step)
        report = reports.audit()
        assert report.exact, audit.to_text(report)
    assert told[0] == told[1]
    steps = json.loads(told[0])
    assert [(batch, shards) for batch, shards, *_ in steps] == [(32, 8), (48, 12), (48, 12), (24, 12)] + [(24, 12)] * 2
    noises, rates = {noise for _, _, noise, _ in steps}, {rate for *_, rate in steps}
    assert len(noises) == 6
    assert len(rates) > 3


def test_joining_worker_with_another_instruction_set_ends_training_by_name(run_elastic):
    output = run_elastic(PROGRAM, "graph", "plain", "8", "2:2", "2", "narrow", status=1).output
    assert "the workers' numeric environments differ: instruction set " in output
    assert " at rank 0 and AVX at rank 1" in output


def dataset(**options):
    return ElasticDataset(NumpySlicesDataset(list(range(16)), ["x"], shuffle=False), **options)


def test_shards_divide_a_global_batch():
    with pytest.raises(ValueError, match="must divide global_batch_size"):
        dataset(global_batch_size=9, shards=2)
    with pytest.raises(ValueError, match="global_batch_size"):
        dataset(batch_size=8, shards=2)
    with pytest.raises(ValueError, match="must divide global_batch_size"):
        dataset(global_batch_size=8, shards=4).set_batch_size(global_batch_size=6)
    assert dataset(global_batch_size=8, shards=4).shard_sizes() == [2]
    assert dataset(global_batch_size=9, shards=3).shard_sizes() == [3, 1]


def test_worker_given_a_changed_batch_assigns_the_same_shards():
    giver = dataset(global_batch_size=8, shards=4)
    giver.set_batch_size(global_batch_size=12)
    taker = dataset(global_batch_size=8, shards=4)
    taker.restore(giver.state())
    assert (taker.global_batch_size, taker.shard_sizes()) == (12, giver.shard_sizes()) == (12, [3, 1])


def test_step_without_a_sum_is_refused():
    batches = dataset(global_batch_size=8, shards=2).create_tuple_iterator()
    next(batches)
    with pytest.raises(KungFuError, match="ShardedStep"):
        next(batches)


def test_optimizers_that_average_models_are_refused():
    parameters = nn.Dense(2, 2).trainable_params()
    for kind in (SynchronousAveragingOptimizer, PairAveragingOptimizer):
        with pytest.raises(ValueError, match="trains a separate model at each worker"):
            check_optimizer(kind(nn.Momentum(parameters, 0.1, 0.9)))
    with pytest.raises(ValueError, match="overlap"):
        ShardedStep(lambda x: x, KungFuMomentum(parameters, 0.1, 0.9, overlap=True))


def test_columns_are_the_iterators():
    step = ShardedStep(lambda x: x, KungFuMomentum(nn.Dense(2, 2).trainable_params(), 0.1, 0.9))
    for (x,) in dataset(global_batch_size=8, shards=2).create_tuple_iterator():
        with pytest.raises(ValueError, match="that doesn't come from the iterator"):
            step(x + 1)
        break
