"""What a training state consists of: with all of it a joiner's next step is the others', without any piece it isn't."""

from __future__ import annotations

import json
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.amp import DynamicLossScaleManager

from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import state, training
from ms_kungfu.elastic.training import ElasticTraining


class Run:
    """A training with every kind of state, in a loop of its own, on a cluster of one."""

    def __init__(self, seed):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(seed)
        ms.manual_seed(seed)
        random.seed(seed)
        self.net = nn.Dense(3, 1)
        self.optimizer = nn.Adam(self.net.trainable_params(), [0.1 / (i + 1) for i in range(50)])
        self.scale = DynamicLossScaleManager(init_loss_scale=8.0, scale_window=2)
        x = np.random.RandomState(0).randn(20, 3).astype(np.float32)
        self.data = ElasticDataset(
            ms.dataset.NumpySlicesDataset((x, x[:, :1]), ["x", "y"], shuffle=False), batch_size=4, seed=seed
        )
        self.elastic = ElasticTraining(self.net, self.optimizer, dataset=self.data, loss_scale_manager=self.scale)
        self.grad = ms.value_and_grad(lambda x, y: ((self.net(x) - y) ** 2).mean(), None, self.net.trainable_params())
        self.elastic.begin()
        self.batches = iter(self.data)

    def step(self):
        """One step, and everything about it that a state decides."""
        x, y = next(self.batches)
        loss, gradients = self.grad(x, y)
        self.optimizer(gradients)
        self.scale.update_loss_scale(False)
        self.elastic.step_end()
        return {
            "batch": x.asnumpy().tobytes(),
            "loss": float(loss),
            "parameters": [p.asnumpy().tobytes() for p in self.elastic.parameters],
            "step": self.elastic.step,
            "scale": self.scale.get_loss_scale(),
            "random": (random.random(), np.random.rand(), ms.get_rng_state().asnumpy().tobytes()),
        }

    def captured(self):
        """The state as it travels: JSON, and the parameters' values."""
        return json.dumps({c.name: c.capture() for c in self.elastic.components}), [
            p.asnumpy().copy() for p in self.elastic.parameters
        ]

    def restore(self, captured, without=None):
        text, values = captured
        received = json.loads(text)
        for component in self.elastic.components:
            if component.name != without:
                component.restore(received[component.name])
        if without != "parameters":
            for parameter, value in zip(self.elastic.parameters, values):
                parameter.set_data(ms.Tensor(value))
        # what `begin` does with the progress at a joiner
        if training._Process.resume is not None:
            self.elastic.step = training._Process.resume["step"]
        self.batches = iter(self.data)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    monkeypatch.setattr(training._Process, "calls", 0)
    monkeypatch.setattr(training._Process, "resume", None)
    monkeypatch.setattr(training._Process, "resuming", False)


@pytest.fixture(scope="module")
def veteran():
    """(the captured state after 3 steps, the 4th step)"""
    run = Run(seed=1)
    for _ in range(3):
        run.step()
    captured = run.captured()
    return captured, run.step()


def test_with_every_piece_the_next_step_is_the_same_bit_for_bit(veteran):
    joiner = Run(seed=2)
    joiner.restore(veteran[0])
    assert joiner.step() == veteran[1]


@pytest.mark.parametrize("name", state.CARRIED)
def test_each_piece_is_needed(veteran, name):
    joiner = Run(seed=2)
    joiner.restore(veteran[0], without=name)
    assert joiner.step() != veteran[1]


def test_the_list_of_pieces_is_what_travels(veteran):
    assert {"parameters", *json.loads(veteran[0][0])} == set(state.CARRIED)


def test_every_parameter_of_the_training_travels():
    run = Run(seed=1)
    names = {p.name for p in run.elastic.parameters}
    assert {p.name for p in run.optimizer.get_parameters()} | {p.name for p in run.net.get_parameters()} == names
    assert {"global_step", "learning_rate", "moment1.weight", "moment2.weight", "weight"} <= names


def test_objects_that_hold_parameters_are_understood():
    scaler = ms.amp.DynamicLossScaler(1024, 2, 50)
    assert {p.name for p in state.collect_parameters([scaler])} == {"scale_value", "counter"}
    net = nn.Dense(2, 2)
    assert len(state.collect_parameters([net, net.trainable_params()])) == 2
    with pytest.raises(TypeError, match="got 'net'"):
        state.collect_parameters(["net"])


def test_a_component_of_ones_own_travels():
    counter = {"value": 5}
    component = state.Component("counter", lambda: counter["value"], lambda value: counter.update(value=value))
    elastic = ElasticTraining(nn.Dense(1, 1), components=[component])
    captured = {c.name: c.capture() for c in elastic.components}
    assert captured["counter"] == 5
