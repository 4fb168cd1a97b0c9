"""The callbacks on a cluster of one: what they refuse, and that they change nothing."""

from __future__ import annotations

import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, LambdaCallback, Model, RunContext

from ms_kungfu import keep_waiting, membership, runtime
from ms_kungfu.callbacks import (
    BroadcastCallback,
    KungFuElasticCallback,
    epoch_outputs,
    evaluation,
    others,
    sync_net_parameters,
)
from ms_kungfu.callbacks.elastic import compile_step
from ms_kungfu.callbacks.outputs import as_one
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import misuse_warnings
from ms_kungfu.errors import KungFuError, ResizeError
from ms_kungfu.launcher.wire.messages import ACTIVITIES
from ms_kungfu.membership.member import current
from ms_kungfu.ops import KungFuAllReduce
from ms_kungfu.ops._base import Collective
from ms_kungfu.optimizers import KungFuGradReducer, KungFuMomentum, PairAveragingOptimizer
from ms_kungfu.trained import inventory


def make_model():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(3)
    net = nn.Dense(1, 1)
    return Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9)), net


def make_source(total=20):
    x = np.arange(total, dtype=np.float32)[:, None] / total
    return ms.dataset.NumpySlicesDataset((x, 2 * x), ["x", "y"], shuffle=False)


class Steps(Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.seen.append((params.cur_epoch_num, params.cur_step_num, params.batch_num))


def test_a_cluster_of_one_trains_as_without_it():
    weights = []
    for callbacks, data in (
        ([], make_source().batch(4)),
        ([BroadcastCallback(), KungFuElasticCallback()], ElasticDataset(make_source(), 4, shuffle=False)),
    ):
        model, net = make_model()
        steps = Steps()
        model.train(2, data, callbacks=[*callbacks, steps], dataset_sink_mode=False)
        assert steps.seen == [(1 + i // 5, 1 + i, 5) for i in range(10)]
        weights.append([p.asnumpy() for p in net.get_parameters()])
    np.testing.assert_array_equal(weights[0][0], weights[1][0])


def test_the_loss_of_an_evaluation_is_the_mean_at_one_worker_too():
    """As at several; MindSpore's own is the last batch's, so a change of the size would look like progress."""

    class Losses(Callback):
        def on_eval_begin(self, run_context):
            self.batches = []

        def on_eval_step_end(self, run_context):
            self.batches.append(float(run_context.original_args().net_outputs[0]))

        def on_train_epoch_end(self, run_context):
            self.told = run_context.original_args().eval_results["eval_loss"]

    net = nn.Dense(1, 1)
    model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9), metrics={"mse"})
    losses, data, valid = Losses(), ElasticDataset(make_source(), 4), make_source().batch(4)
    model.fit(1, data, valid, callbacks=[KungFuElasticCallback(), losses], dataset_sink_mode=False)
    assert len(set(losses.batches)) == 5
    assert losses.told == pytest.approx(np.mean(losses.batches))


def test_outputs_of_parts_are_those_of_the_whole():
    def tensors(loss, *rows, dtype=ms.float32):
        return ms.Tensor(loss, dtype), ms.Tensor(np.array(rows, np.float32).reshape(len(rows), 1), dtype)

    for dtype in (ms.float32, ms.float16, ms.bfloat16):
        loss, rows = as_one([(1, tensors(4.0, 1, dtype=dtype)), (3, tensors(2.0, 2, 3, 4, dtype=dtype))])
        assert (loss.dtype, loss.shape) == (dtype, ())
        assert (rows.dtype, rows.shape) == (dtype, (4, 1))
        assert float(loss) == 2.5  # (4 + 3 * 2) / 4
        assert rows.astype(ms.float32).asnumpy().ravel().tolist() == [1, 2, 3, 4]
    # what is said once for all samples, and what can't be joined
    assert int(as_one([(1, ms.Tensor(7)), (2, ms.Tensor(7))])) == 7
    assert as_one([(1, ms.Tensor(7)), (2, ms.Tensor(8))]) is None
    assert as_one([(2, ms.Tensor([1.0])), (3, ms.Tensor([2.0]))]) is None
    assert as_one([(1, (ms.Tensor(1.0),)), (1, ms.Tensor(1.0))]) is None
    assert as_one([(1, 1.0), (1, 1.0)]) is None


def test_an_evaluation_takes_no_shards():
    net = nn.Dense(1, 1)
    model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9), metrics={"mse"})
    with pytest.raises(KungFuError, match="ElasticDataset has shards;"):
        model.eval(ElasticDataset(make_source(), global_batch_size=4, shards=2), callbacks=[KungFuElasticCallback()])


def test_one_callback_serves_several_calls():
    model, _ = make_model()
    elastic, steps, data = KungFuElasticCallback(), Steps(), ElasticDataset(make_source(), 4)
    for _ in range(2):
        model.train(1, data, callbacks=[elastic, steps], dataset_sink_mode=False)
    assert [step for _, step, _ in steps.seen] == [1, 2, 3, 4, 5] * 2
    assert elastic.training.step == 10


@pytest.mark.parametrize("first", [True, False], ids=["before the elastic one", "after it"])
def test_a_stop_in_a_cluster_of_one_is_settled_before_the_cluster_changes(monkeypatch, first):
    """A worker that joined in the step after which one alone stops would train on for ever without it."""
    stops = []

    def step(size=None, wait=False, word=0, settle=None):
        if settle is not None:
            stops.append(settle(True))
        return membership.no_change()

    class Stop(Steps):
        def on_train_step_end(self, run_context):
            super().on_train_step_end(run_context)
            if len(self.seen) == 2:
                run_context.request_stop()

    monkeypatch.setattr(membership, "step", step)
    model, _ = make_model()
    elastic, stop = KungFuElasticCallback(), Stop()
    callbacks = [stop, elastic] if first else [elastic, stop]
    model.train(2, ElasticDataset(make_source(), 4), callbacks=callbacks, dataset_sink_mode=False)
    assert stops == ([False, True] if first else [False, False, True])
    assert len(stop.seen) == len(stops)


def test_sink_mode_is_refused():
    model, _ = make_model()
    with pytest.raises(ValueError, match="dataset_sink_mode=False"):
        model.train(1, make_source().batch(4), callbacks=[KungFuElasticCallback("2:2")], dataset_sink_mode=True)


def test_a_wrong_schedule_is_refused_where_it_is_given():
    with pytest.raises(ValueError, match="'10:0'"):
        KungFuElasticCallback("10:0")


def test_growing_without_kungfu_run_is_refused():
    model, _ = make_model()
    with pytest.raises(ResizeError, match="2 workers: a cluster without kungfu-run"):
        model.train(1, make_source().batch(4), callbacks=[KungFuElasticCallback("2:2")], dataset_sink_mode=False)


def test_the_global_batch_of_the_callback_is_that_of_the_dataset():
    model, _ = make_model()
    steps, data = Steps(), ElasticDataset(make_source(), 3)
    model.train(1, data, callbacks=[KungFuElasticCallback(global_batch_size=5), steps], dataset_sink_mode=False)
    assert steps.seen == [(1, 1 + i, 4) for i in range(4)]
    assert data.global_batch_size == 5


class Reduced(nn.Cell):
    """A training step of the program's own, which reduces the gradients by a primitive."""

    def __init__(self, net):
        super().__init__()
        self.net, self.all_reduce = net, KungFuAllReduce()

    def construct(self, x):
        return self.all_reduce(self.net(x))


def test_model_without_averaging_is_warned_of(caplog):
    model, net = make_model()
    model.train(1, ElasticDataset(make_source(), 4), callbacks=[KungFuElasticCallback()], dataset_sink_mode=False)
    assert 'misuse: check=optimizer optimizers="Momentum". ' in caplog.text
    caplog.clear()
    ours = Model(net, nn.MSELoss(), KungFuMomentum(net.trainable_params(), 0.01, 0.9))
    ours.train(1, ElasticDataset(make_source(), 4), callbacks=[KungFuElasticCallback()], dataset_sink_mode=False)
    assert caplog.text == ""
    around = PairAveragingOptimizer(nn.Momentum(net.trainable_params(), 0.01, 0.9))
    cells = [KungFuGradReducer(net.trainable_params()), Reduced(net), around, nn.CellList([around])]
    assert [inventory.synchronises([cell]) for cell in (*cells, net)] == [True] * 4 + [False]


@pytest.fixture
def parallel(monkeypatch):
    """Sets MindSpore's own parallelism for a test; nothing was said yet."""
    monkeypatch.setattr(misuse_warnings.MisuseWarnings, "_told", set())
    yield ms.set_auto_parallel_context
    ms.reset_auto_parallel_context()


def test_settings_without_effect_and_double_reductions_are_warned_of_once(parallel, caplog):
    _, net = make_model()
    ours = KungFuMomentum(net.trainable_params(), 0.01, 0.9)
    parallel(comm_fusion={"allreduce": {"mode": "auto", "config": None}})
    misuse_warnings.MisuseWarnings().look([net, ours])
    assert caplog.text == ""
    parallel(parallel_mode="data_parallel", gradients_mean=True)
    for _ in range(2):
        misuse_warnings.MisuseWarnings().look([net, ours])
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "misuse: check=settings. set_auto_parallel_context(parallel_mode='data_parallel', gradients_mean=True) has "
    )
    both = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), ours)
    misuse_warnings.MisuseWarnings().look([both])
    assert "The gradients are reduced twice: by MindSpore's DistributedGradReducer" in caplog.text
    stock = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params()))
    caplog.clear()
    misuse_warnings.MisuseWarnings._told.clear()
    misuse_warnings.MisuseWarnings().look([stock])
    assert "check=twice" not in caplog.text


def test_several_workers_without_a_reduction_are_warned_of(parallel, caplog, monkeypatch):
    _, net = make_model()
    monkeypatch.setattr(Collective, "_made", False)
    for steps, workers, told in ((9, 2, 0), (30, 1, 0), (30, 2, 1), (30, 2, 1)):
        plain = misuse_warnings.MisuseWarnings()
        plain.look([net])
        for _ in range(steps):
            plain.step(0, workers)
        assert len(caplog.records) == told
    assert caplog.text.count("None of 2 workers has reduced gradients in 10 steps") == 1
    misuse_warnings.MisuseWarnings._told.clear()
    reducing = misuse_warnings.MisuseWarnings()
    reducing.look([net])
    for i in range(30):
        reducing.step(i % 5 == 0, 2)  # accumulates over five steps
    around = misuse_warnings.MisuseWarnings()
    around.look([PairAveragingOptimizer(nn.Momentum(net.trainable_params(), 0.01, 0.9))])
    monkeypatch.setattr(Collective, "_made", True)
    plain = misuse_warnings.MisuseWarnings()
    for each in (around, plain):
        for _ in range(30):
            each.step(0, 2)
    assert len(caplog.records) == 1


def test_ordinary_dataset_is_warned_of(caplog):
    model, _ = make_model()
    model.train(1, make_source().batch(4), callbacks=[KungFuElasticCallback()], dataset_sink_mode=False)
    assert "trains all of the dataset's samples unless the program shards it" in caplog.text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"global_batch_size": 4},
            "global_batch_size requires an ElasticDataset, but train_dataset is a BatchDataset",
        ),
        ({"checkpoint_dir": "x", "resume": True}, "resume requires an ElasticDataset"),
    ],
)
def test_option_that_needs_an_elastic_dataset_is_refused(options, sentence):
    model, _ = make_model()
    with pytest.raises(ValueError, match=sentence):
        model.train(1, make_source().batch(4), callbacks=[KungFuElasticCallback(**options)], dataset_sink_mode=False)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"lr_rule": "cubic"}, ValueError, "unknown lr_rule 'cubic'"),
        ({"lr_rule": 2.0}, TypeError, "lr_rule is 2.0"),
        ({"monitor": "x"}, TypeError, "monitor must be a ms_kungfu.monitoring.Monitor, got 'x'"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size must be an integer of 1 or more, got 0"),
        ({"averaged": 5}, TypeError, "`averaged` must be a list of Parameters"),
    ],
)
def test_bad_options_are_refused_where_they_are_given(options, error, sentence):
    with pytest.raises(error, match=sentence):
        KungFuElasticCallback(**options)


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), ms.get_rng_state().asnumpy().tolist()


def test_compiling_ahead_runs_nothing_and_serves_the_first_step():
    model, net = make_model()
    ms.set_context(mode=ms.GRAPH_MODE)
    data = ElasticDataset(make_source(), 4)
    network = model.train_network
    network.set_train()
    network.phase = "train"
    before = random_states(), [p.asnumpy().tolist() for p in network.get_parameters()]
    compile_step(network, data)
    assert len(network.compile_cache) == 1
    assert (random_states(), [p.asnumpy().tolist() for p in network.get_parameters()]) == before
    model.train(1, data, callbacks=[KungFuElasticCallback()], dataset_sink_mode=False)
    assert len(network.compile_cache) == 1


def test_compiling_ahead_leaves_pynative_mode_alone():
    model, _ = make_model()
    compile_step(model.train_network, ElasticDataset(make_source(), 4))
    assert len(model.train_network.compile_cache) == 0


def test_sync_net_parameters_takes_cells_and_parameters():
    _, net = make_model()
    before = net.weight.asnumpy().copy()
    sync_net_parameters(net)
    sync_net_parameters(net.trainable_params())
    np.testing.assert_array_equal(net.weight.asnumpy(), before)


@pytest.mark.parametrize("root", [1, -1, True, "0"])
def test_a_wrong_root_is_refused(root):
    with pytest.raises(ValueError, match="rank from 0 to 0"):
        BroadcastCallback(root)


class Outputs(dict):
    """What Model keeps for callbacks, as far as outputs go."""

    net_outputs = None


def test_outputs_of_an_epoch_may_be_lost_with_their_workers(monkeypatch):
    """They had sent only the loss; the worker that joined after the epoch's last step has the state and goes on."""
    told = {0: {"has": True, "loss": 2.0, "rows": 4}, 1: {"has": False, "loss": None, "rows": 0}}
    monkeypatch.setattr(epoch_outputs, "gather", lambda row: told)
    params = Outputs()
    epoch_outputs.agree_on_outputs(params, 0)  # only the one that lives answers that it has them
    assert params.net_outputs is None


@pytest.fixture
def busy(monkeypatch):
    told = []
    monkeypatch.setattr(membership.current().core, "set_busy", told.append)
    return told


def test_the_others_wait_to_the_end_of_the_outermost_block(busy):
    with keep_waiting():
        with keep_waiting():
            assert busy == [True]
        assert busy == [True]
    assert busy == [True, False]
    with pytest.raises(RuntimeError), keep_waiting():
        raise RuntimeError
    assert busy == [True, False] * 2


@pytest.mark.parametrize("state", ["is_deferred", "is_detached"])
def test_waiting_callback_does_not_join_the_cluster(busy, monkeypatch, state):
    monkeypatch.setattr(membership, state, lambda: True)
    with keep_waiting():
        pass
    assert busy == []


def test_worker_behind_the_others_has_them_wait_while_it_evaluates(busy, monkeypatch):
    """A joiner passes the calls that the others have made before, and each evaluation between them."""
    monkeypatch.setattr(evaluation, "is_behind", lambda: True)
    during = []

    class Look(Callback):
        def on_eval_step_end(self, run_context):
            during.extend(busy)

    _, net = make_model()
    model = Model(net, nn.MSELoss(), metrics={"mae"})
    assert model.eval(make_source().batch(20), callbacks=[KungFuElasticCallback(), Look()], dataset_sink_mode=False)
    assert during == [True]
    assert busy == [True, False]


def test_an_evaluation_is_nothing_that_was_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("KUNGFU_LEDGER_DIR", str(tmp_path))
    _, net = make_model()
    data = ElasticDataset(make_source(), global_batch_size=20)
    model = Model(net, nn.MSELoss(), metrics={"mae"})
    for callbacks in ([KungFuElasticCallback()], None):
        assert model.eval(data, callbacks=callbacks, dataset_sink_mode=False)
        assert bool(list(tmp_path.iterdir())) == (callbacks is None)  # without it no reader knows what it is


def test_at_a_worker_that_leaves_no_epoch_ends(monkeypatch):
    heard = []

    class Own(Callback):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 8:  # of 10, in the second epoch
                monkeypatch.setattr(runtime, "detached", lambda: True)
                RunContext.request_stop(run_context)

        def on_train_epoch_end(self, run_context):
            heard.append(("epoch", sorted(run_context.original_args().eval_results)))

        def on_train_end(self, run_context):
            heard.append("end")

    _, net = make_model()
    data = ElasticDataset(make_source(), 4)
    model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params()), metrics={"mae"})
    of_functions = LambdaCallback(on_train_epoch_end=lambda run_context: heard.append("function"))
    callbacks = [KungFuElasticCallback(), Own(), of_functions]
    model.fit(2, data, make_source().batch(20), callbacks=callbacks, dataset_sink_mode=False)
    assert heard == [("epoch", ["eval_loss", "mae"]), "function", "end"]


def test_a_summary_collector_finds_out_at_each_worker_what_it_may_collect(tmp_path):
    """A joiner that becomes the writer, and a job that resumes, have no first step behind them."""
    with ms.train.SummaryCollector(str(tmp_path)) as collector:
        vars(collector)["_first_step"] = False  # as where it has written
        there = others.Others([collector])
        captured = there.capture()
    with ms.train.SummaryCollector(str(tmp_path)) as at_joining_worker:
        here = others.Others([at_joining_worker])
        others.Others.received = captured
        here.take_over()
        assert at_joining_worker._first_step is True


def test_hooks_of_other_callbacks_run_as_activity_callback():
    seen = []

    class Own(Callback):
        def on_train_step_end(self, run_context):
            seen.append(current().activity)

        def epoch_end(self, run_context):  # the older name, which MindSpore still calls
            seen.append(current().activity)

    _, net = make_model()
    model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params()))
    noted = LambdaCallback(on_train_epoch_end=lambda run_context: seen.append(current().activity))
    own = Own()
    model.train(1, ElasticDataset(make_source(), 20), callbacks=[KungFuElasticCallback(), own, noted])
    assert seen == [ACTIVITIES.index("callback")] * 3
    assert "on_train_step_end" not in vars(own)
    assert current().activity == 0
