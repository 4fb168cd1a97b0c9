"""A worker compiles the batch shapes of likely changes once, after its first step or before it joins."""

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest

from ms_kungfu import env, membership, runtime
from ms_kungfu.callbacks.compile_ahead import CompileAhead
from ms_kungfu.dataset import ElasticDataset

SECONDS = 0.1


class Network:
    """Records the shapes for which it is compiled."""

    def __init__(self, fails=False):
        self.shapes, self._fails = [], fails

    def compile(self, *columns):
        self.shapes.append([column.shape for column in columns])
        if self._fails:
            raise ValueError("For 'Reshape', the shape doesn't fit")

    def batches(self):
        return [first[0] for first, *_ in self.shapes]


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """Rank 1 of 4 workers in GRAPH mode, whose job goes on after a failure."""
    monkeypatch.setattr(runtime, "current_rank", lambda: 1)
    monkeypatch.setattr(runtime, "current_cluster_size", lambda: 4)
    monkeypatch.setenv(env.WATCH.name, "1")
    monkeypatch.setattr(CompileAhead, "spent", 0.0)
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=mode)


def make_data(**options):
    source = ds.NumpySlicesDataset(np.zeros((64, 3), np.float32), "x", shuffle=False)
    return ElasticDataset(source, **{"global_batch_size": 32, "drop_remainder": True, **options})


def columns(rows=8):
    return [ms.Tensor(np.zeros((rows, 3)), ms.float32), ms.Tensor(np.zeros((2, 2)), ms.int32)]


def compiled(schedule=None, wait=False, seconds=SECONDS, step=0, network=None, **options):
    network = network or Network()
    CompileAhead(schedule, wait).compile(network, make_data(**options), columns(), seconds, step)
    return network.batches()


def test_shares_of_the_schedule_and_of_a_failure_are_compiled_once():
    network, ahead = Network(), CompileAhead("10:2,20:5,30:4,40:1", False)
    for _ in range(2):
        ahead.compile(network, make_data(), columns(), SECONDS)
    assert network.batches() == [16, 7, 11]  # rank 1 isn't in a cluster of one


def test_columns_without_samples_keep_their_shape():
    network = Network()
    compiled("10:2", network=network)
    assert network.shapes[0] == [(16, 3), (2, 2)]


def test_both_shares_after_a_failure_are_compiled():
    assert compiled(global_batch_size=34) == [11, 12]  # ranks 1 and 0 of 3


@pytest.mark.parametrize("options", [{}, {"global_batch_size": 34}, {"drop_remainder": False}])
def test_dataset_returns_the_sizes_that_model_train_compiles(options):
    own, *others = make_data(**options).batch_sizes()
    assert own == make_data(**options).get_batch_size()
    assert others == [rows for rows in compiled(**options) if rows != own]


def test_sizes_that_no_failure_changes_are_returned_alone():
    assert make_data(global_batch_size=None, batch_size=8).batch_sizes() == [8]
    assert make_data(shards=4, drop_remainder=False).batch_sizes() == [8]


def test_last_steps_of_an_epoch_after_a_failure_are_compiled():
    # With the failed worker's 8 samples the epoch ends with two steps of 20.
    assert compiled(drop_remainder=False) == [11, 7]
    # With 8 or 7 of them it ends with 21 and 21, or 21 and 20; the next epochs end with 17 and 17.
    assert compiled(drop_remainder=False, global_batch_size=30) == [10, 7, 6]


def test_passed_entries_of_the_schedule_are_left_out():
    assert compiled("10:2,20:5", step=11, global_batch_size=60) == [12, 20]


def test_slow_compilation_leaves_out_the_share_of_a_failure():
    assert compiled("10:2", seconds=60.0) == [16, 11]  # the compilation for 16 samples has taken less
    assert compiled(seconds=60.0) == []


def test_limit_holds_for_all_networks_of_the_process(monkeypatch):
    monkeypatch.setattr(CompileAhead, "spent", 4.95)
    assert compiled() == []
    assert compiled(seconds=0.01) == [11]


def test_limit_of_zero_leaves_out_the_share_of_a_failure(monkeypatch):
    monkeypatch.setenv(env.COMPILE_AHEAD.name, "0")
    assert compiled("10:2") == [16]


def test_job_that_ends_at_a_failure_compiles_only_its_schedule(monkeypatch):
    monkeypatch.delenv(env.WATCH.name)
    assert compiled("10:2") == [16]


def test_worker_that_others_wait_for_compiles_only_the_schedule(monkeypatch):
    monkeypatch.setattr(membership, "is_joining", lambda: True)
    assert compiled("10:2", wait=True) == [16]
    assert compiled("10:2", wait=False) == [16, 11]


def test_constant_batch_per_worker_needs_no_other_shape():
    assert compiled("10:2,20:5", global_batch_size=None, batch_size=8) == []


def test_shards_need_no_other_shape():
    assert compiled("10:2,20:5", shards=4) == []


def test_pynative_mode_compiles_nothing():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert compiled("10:2") == []


def test_network_that_fits_one_size_goes_on():
    assert compiled("10:2,20:5", network=Network(fails=True)) == [16, 7, 11]


def test_time_of_a_compilation_is_counted_and_that_of_a_call_is_not():
    from ms_kungfu.membership import current
    from ms_kungfu.ops import _executor  # importing it is what counts

    assert _executor.EXECUTOR.compile.__wrapped__
    cell, spent = ms.nn.Dense(4, 3), []
    for shape in ((2, 4), (2, 4), (5, 4)):
        before = current().spent.get("compilation", 0.0)
        cell(ms.Tensor(np.ones(shape, np.float32)))
        spent.append(current().spent["compilation"] - before)
    assert min(spent[0], spent[2]) > 0
    assert spent[1] == 0
