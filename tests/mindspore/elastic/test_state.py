"""What a training state consists of: with all of it a joiner's next step is the others', without any piece it isn't."""

from __future__ import annotations

import json
import random
import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.amp import DynamicLossScaleManager

from ms_kungfu import agreement, comm, runtime
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import program, state, state_transfer
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.errors import KungFuError, PeerLostError
from ms_kungfu.trained import inventory

# The names of all pieces.
CARRIED = (
    "parameters",
    "buffers",
    "progress",
    "dataset",
    "loss_scale",
    "learning_rate",
    "param_groups",
    "random_mindspore",
    "random_python",
    "random_numpy",
    "random_generators",
)


class Net(nn.Cell):
    """Has every kind of state that a cell can have."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1)
        self.norm = nn.BatchNorm1d(1)
        self.noise = ms.Generator().manual_seed(0)
        self.register_buffer("calls", ms.Tensor(np.zeros(2), ms.float32))

    def construct(self, x):
        ms.ops.assign(self.calls, self.calls + 1)
        return self.norm(self.dense(x)) * self.calls.mean()


class Scheduler:
    """Of the program's own, for an optimizer with groups."""

    def __init__(self):
        self.optimizer, self.steps = types.SimpleNamespace(param_groups=[{"params": []}]), 0

    def step(self):
        self.steps += 1
        return self.steps


class Run:
    """A training with every kind of state, in a loop of its own, on a cluster of one."""

    def __init__(self, seed):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(seed)
        ms.manual_seed(seed)
        random.seed(seed)
        self.net = Net().set_train()
        self.optimizer = nn.Adam(self.net.trainable_params(), [0.1 / (i + 1) for i in range(50)])
        self.scale = DynamicLossScaleManager(init_loss_scale=8.0, scale_window=2)
        x = np.random.RandomState(0).randn(20, 3).astype(np.float32)
        self.data = ElasticDataset(
            ms.dataset.NumpySlicesDataset((x, x[:, :1]), ["x", "y"], shuffle=False), batch_size=4, seed=seed
        )
        self.scheduler = Scheduler()
        self.elastic = ElasticTraining(
            self.net, self.optimizer, self.scheduler, dataset=self.data, loss_scale_manager=self.scale, lr_rule="linear"
        )
        self.grad = ms.value_and_grad(lambda x, y: ((self.net(x) - y) ** 2).mean(), None, self.net.trainable_params())
        self.elastic.begin()
        self.batches = iter(self.data)

    def step(self, size=1):
        """One step, after which the cluster seems to have `size` workers, and everything about it that a state
        decides."""
        x, y = next(self.batches)
        loss, gradients = self.grad(x, y)
        self.optimizer(gradients)
        self.scale.update_loss_scale(False)
        noise = [int(part) for part in self.net.noise._step(ms.Tensor(10, ms.int64))]
        self.elastic.step_end()
        self.elastic.carried._rates.follow(self.elastic.carried._rule, size)
        return {
            "batch": x.asnumpy().tobytes(),
            "loss": float(loss),
            "parameters": [p.asnumpy().tobytes() for p in self.elastic.parameters],
            "buffers": [b.asnumpy().tobytes() for b in self.elastic.training_state.buffers.values()],
            "step": self.elastic.step,
            "scale": self.scale.get_loss_scale(),
            "scheduler": self.scheduler.step(),
            "random": (random.random(), np.random.rand(), ms.get_rng_state().asnumpy().tobytes(), noise),
        }

    def captured(self):
        return capture(self.elastic)

    def restore(self, captured, without=None):
        restore(self.elastic, captured, without)
        # what `begin` does with the progress at a joiner
        if program.current().resume is not None:
            self.elastic.step = program.current().resume["step"]
        self.batches = iter(self.data)


def capture(elastic):
    """The state as it travels: JSON, and the values of parameters and buffers."""
    now = elastic.training_state
    return (
        json.dumps({c.name: c.capture() for c in now.components}),
        [p.asnumpy().copy() for p in now.parameters],
        [b.asnumpy().copy() for b in now.buffers.values()],
    )


def restore(elastic, captured, without=None):
    """What a joiner does, but for the piece `without`."""
    text, parameters, buffers = captured
    now, received = elastic.training_state, json.loads(text)
    for component in now.components:
        if component.name != without:
            component.restore(received[component.name])
    for kind, tensors, values in (
        ("parameters", now.parameters, parameters),
        ("buffers", now.buffers.values(), buffers),
    ):
        assert len(tensors) == len(values)
        if kind != without:
            for tensor, value in zip(tensors, values):
                inventory.assign(tensor, value)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    program.use(program.Program())


@pytest.fixture(scope="module")
def veteran():
    """(the captured state after 3 steps of a training that began with 2 workers, the 4th step)"""
    run = Run(seed=1)
    run.elastic.carried._rates.start_size = 2
    for size in (2, 4, 3):
        run.step(size)
    captured = run.captured()
    return captured, run.step(5)


def test_with_every_piece_the_next_step_is_the_same_bit_for_bit(veteran):
    joining = Run(seed=2)
    joining.restore(veteran[0])
    assert joining.step(5) == veteran[1]


@pytest.mark.parametrize("name", CARRIED)
def test_each_piece_is_needed(veteran, name):
    joining = Run(seed=2)
    joining.restore(veteran[0], without=name)
    assert joining.step(5) != veteran[1]


def test_the_list_of_pieces_is_what_travels(veteran):
    assert {"parameters", "buffers", *json.loads(veteran[0][0])} == set(CARRIED)


def test_every_parameter_of_the_training_travels():
    run = Run(seed=1)
    names = {p.name for p in run.elastic.parameters}
    of_cells = {p.name for p in run.optimizer.get_parameters()} | {p.name for p in run.net.get_parameters()}
    assert names - of_cells == {"kungfu_base/0/learning_rate"}
    assert of_cells <= names
    assert {"global_step", "learning_rate", "moment1.dense.weight", "dense.weight", "norm.moving_mean"} <= names


def test_objects_that_hold_parameters_are_understood():
    scaler = ms.amp.DynamicLossScaler(1024, 2, 50)
    assert {p.name for p in inventory.collect_parameters([scaler])} == {"scale_value", "counter"}
    net = nn.Dense(2, 2)
    assert len(inventory.collect_parameters([net, net.trainable_params()])) == 2
    with pytest.raises(TypeError, match="got 'net'"):
        inventory.collect_parameters(["net"])


def test_a_component_of_ones_own_travels():
    counter = {"value": 5}
    component = state.Component("counter", lambda: counter["value"], lambda value: counter.update(value=value))
    elastic = ElasticTraining(nn.Dense(1, 1), components=[component])
    captured = {c.name: c.capture() for c in elastic.components}
    assert captured["counter"] == 5


class DerivedNorm(nn.BatchNorm2d):
    pass


def test_moving_statistics_are_found_by_the_kind_of_cell():
    net = nn.SequentialCell(
        nn.BatchNorm1d(1),
        nn.BatchNorm3d(2),
        ms.mint.nn.BatchNorm2d(3),
        DerivedNorm(4),
        nn.LayerNorm([5]),
        nn.Dense(6, 6),
    )
    net.append(net[0])  # shared
    found = inventory.moving_statistics([net, nn.Momentum(net.trainable_params(), 0.1, 0.9)])
    assert [p.shape for p in found] == [(1,), (1,), (2,), (2,), (3,), (3,), (4,), (4,)]
    assert not any(p.requires_grad for p in found)
    assert inventory.moving_statistics([net.trainable_params()]) == []


@pytest.mark.parametrize(
    ("averaged", "names"), [(None, {"norm.moving_mean", "norm.moving_variance"}), ((), set()), ("bias", {"dense.bias"})]
)
def test_averaged_parameters_can_be_named(averaged, names):
    net = Net()
    elastic = ElasticTraining(net, averaged=[net.dense.bias] if averaged == "bias" else averaged)
    assert {p.name for p in elastic.training_state.averaged} == names


@pytest.mark.parametrize("wrong", ["norm", [1], [ms.Tensor([1])]])
def test_averaged_values_that_are_no_parameters_are_refused(wrong):
    with pytest.raises(TypeError, match="`averaged` must (be a list of|contain only floating-point) Parameters"):
        ElasticTraining(nn.Dense(1, 1), averaged=wrong)


@pytest.fixture
def meetings(monkeypatch):
    """A function that says what the workers bring to each of the next meetings."""

    def script(*rows):
        answers = iter(rows)
        monkeypatch.setattr(
            agreement,
            "gather_living",
            lambda row, name: {rank: able for rank, able in enumerate(next(answers)) if able is not None},
        )

    return script


def lost(root):
    raise PeerLostError(f"rank {root} died")


def lost_in_a_kernel(root):
    raise RuntimeError(f"PeerLostError: broadcast: rank {root} died\n\n- C++ Call Stack:")


@pytest.mark.parametrize("lose", [lost, lost_in_a_kernel])
def test_where_the_root_dies_the_next_one_hands_over(meetings, lose):
    meetings([False, True, True, True], [False, None, True, True], [False, None, None, True])
    tried = []

    def receive(root):
        tried.append(root)
        return root if root == 3 else lose(root)

    assert state_transfer.from_lowest_rank(receive) == 3
    assert tried == [1, 2, 3]


def test_a_root_that_was_asked_for_goes_first(meetings):
    meetings([True, True, True], [True, True, None])
    tried = []

    def receive(root):
        tried.append(root)
        return root if root == 0 else lost(root)

    assert state_transfer.from_lowest_rank(receive, preferred=2) == 0
    assert tried == [2, 0]


def test_loss_of_all_workers_with_the_state_is_an_error(meetings):
    meetings([True, False], [None, False])
    with pytest.raises(KungFuError, match="every worker that had the training state has failed"):
        state_transfer.from_lowest_rank(lost, able=False)


def test_another_failure_is_not_tried_again(meetings):
    meetings([True, True])
    with pytest.raises(RuntimeError, match="disk"):
        state_transfer.from_lowest_rank(lambda root: (_ for _ in ()).throw(RuntimeError("disk")))


def test_mean_is_over_the_workers_that_count(monkeypatch):
    monkeypatch.setattr(runtime, "current_cluster_size", lambda: 3)
    monkeypatch.setattr(comm, "all_reduce", lambda row, name: row + [5.0, 1.0])  # of one more; the third is a joiner
    tensor = ms.Parameter(ms.Tensor([1.0]), name="mean")
    state_transfer.average([tensor])
    assert tensor.asnumpy().tolist() == [3.0]


def test_transfer_that_fails_leaves_what_was_there():
    tensor = ms.Parameter(ms.Tensor([1.0, 2.0]), name="w")

    def receive():
        with state_transfer._whole_or_not_at_all([tensor]):
            inventory.assign(tensor, np.array([5.0, 2.0], np.float32))
            lost(0)

    with pytest.raises(PeerLostError):
        receive()
    assert tensor.asnumpy().tolist() == [1.0, 2.0]
