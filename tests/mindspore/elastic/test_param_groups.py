"""Optimizers with ``param_groups``, which are no ``nn.Optimizer``, and their schedulers."""

from __future__ import annotations

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

from ms_kungfu.elastic import consistency, program
from ms_kungfu.elastic.learning_rates import learning_rate_of, set_learning_rate
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.optimizers import KungFuGradReducer, SynchronousAveragingOptimizer, SynchronousSGDOptimizer
from ms_kungfu.trained import claims, inventory

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    program.use(program.Program())
    monkeypatch.setattr(claims, "reducers", type(claims.reducers)())
    ms.set_context(mode=ms.PYNATIVE_MODE)


class OwnScheduler:
    """One as programs write it: it counts in plain numbers and sets a plain rate."""

    def __init__(self, optimizer):
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self):
        self.last_epoch += 1
        if ms.get_context("mode") == ms.PYNATIVE_MODE:  # a graph keeps the numbers that it was compiled with
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.01 * self.last_epoch


class Loop:
    def __init__(self, wrap=lambda optimizer: optimizer, seed=1):
        ms.set_seed(seed)
        self.net = nn.Dense(3, 1)
        plain = optim.SGD(self.net.trainable_params(), lr=0.1, momentum=0.9)
        self.scheduler = lr_scheduler.LambdaLR(plain, lambda epoch: 0.5**epoch)
        self.own = OwnScheduler(plain)
        self.optimizer = wrap(plain)
        self.elastic = ElasticTraining(self.net, self.optimizer, self.own)
        self.elastic.begin()

        def forward(x):
            return (self.net(x) ** 2).mean()

        self.grad = ms.grad(forward, None, self.net.trainable_params())

    def epoch(self):
        for _ in range(2):
            self.optimizer(self.grad(ms.Tensor(X)))
            self.elastic.step_end()
        self.scheduler.step()
        self.own.step()
        group = self.optimizer.param_groups[0]
        return [
            *self.net.weight.asnumpy().ravel().tolist(),
            float(group["lr"]),
            float(self.scheduler.last_epoch),
            group["weight_decay"],
            self.own.last_epoch,
        ]

    def capture(self):
        now = self.elastic.training_state
        text = json.dumps({c.name: c.capture() for c in now.components})
        return text, [p.asnumpy().copy() for p in now.parameters]

    def restore(self, captured):
        now, received = self.elastic.training_state, json.loads(captured[0])
        for component in now.components:
            component.restore(received[component.name])
        assert len(now.parameters) == len(captured[1])
        for parameter, values in zip(now.parameters, captured[1]):
            inventory.assign(parameter, values)


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["PyNative", "GRAPH"])
def test_joining_worker_continues_with_rates_and_counters(mode):
    """Around the optimizer, which then trains as it does alone."""
    ms.set_context(mode=mode)
    veteran, alone = Loop(SynchronousSGDOptimizer), Loop()
    for _ in range(3):
        assert veteran.epoch() == pytest.approx(alone.epoch(), rel=1e-6)
    captured, expected = veteran.capture(), veteran.epoch()
    joining = Loop(SynchronousSGDOptimizer, seed=2)
    joining.restore(captured)
    assert joining.epoch() == expected
    decay = 0.04 if mode == ms.PYNATIVE_MODE else 0.0
    assert expected[3:] == [pytest.approx(0.1 * 0.5**4), 4.0, decay, 4]


def test_optimizers_that_average_models_refuse_groups_with_the_remedy():
    plain = optim.SGD(nn.Dense(3, 1).trainable_params(), lr=0.1)
    with pytest.raises(TypeError, match="SGD.*; use SynchronousSGDOptimizer"):
        SynchronousAveragingOptimizer(plain)


def test_compared_pieces_are_weights_rates_and_counters():
    net = nn.Dense(3, 1)
    optimizer = optim.SGD(net.trainable_params(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    pieces = {piece.what: piece for piece in consistency.pieces_of([net, optimizer, scheduler], None, set())}
    assert {"the weight 'weight'", "the weight 'bias'", "the learning rate 'learning_rate_group_0'"} <= set(pieces)
    (counter,) = [what for what in pieces if what.startswith("the scheduler's")]
    before = {what: piece.word() for what, piece in pieces.items()}
    scheduler.step()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    changed = {what for what, piece in pieces.items() if piece.word() != before[what]}
    assert changed == {counter, "the numbers in param_groups of SGD"}


@pytest.mark.parametrize("told", [True, False], ids=["with parameters", "without"])
def test_weights_that_a_reducer_serves_are_compared_without_an_optimizer(told):
    net = nn.Dense(3, 1)
    assert consistency.pieces_of([net], None, set()) == []
    reducer = KungFuGradReducer(net.trainable_params() if told else None)
    assert [p.what for p in consistency.pieces_of([net], None, set())] == ["the weight 'weight'", "the weight 'bias'"]
    assert [p.what for p in consistency.pieces_of([net], None, {id(net.bias)})] == ["the weight 'weight'"]
    reducer.leave_to_shards()
    assert consistency.pieces_of([net], None, set()) == []


def test_schedulers_are_found_by_their_optimizer_in_one_order():
    optimizer = optim.SGD(nn.Dense(3, 1).trainable_params(), lr=0.1)
    other = optim.SGD(nn.Dense(3, 1).trainable_params(), lr=0.1)
    unrelated = lr_scheduler.StepLR(other, 2)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ConstantLR(optimizer)]
    whole = lr_scheduler.SequentialLR(optimizer, parts, [2])
    exponential = lr_scheduler.ExponentialLR(optimizer, 0.9)
    found = inventory.collect_schedulers([optimizer], [optimizer])
    assert list(map(id, found)) == list(map(id, [exponential, whole, *parts]))
    assert id(unrelated) not in map(id, found)


def test_schedulers_that_cannot_be_distinguished_are_named_unless_given(caplog):
    optimizer = optim.SGD(nn.Dense(3, 1).trainable_params(), lr=0.1)
    twins = [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.StepLR(optimizer, 3)]
    assert inventory.collect_schedulers([optimizer], [optimizer]) == []
    assert "check=schedulers schedulers=2 type=StepLR" in caplog.text
    assert "pass them to ElasticTraining" in caplog.text
    assert list(map(id, inventory.collect_schedulers([optimizer, *twins], [optimizer]))) == list(map(id, twins))


def test_rate_of_groups_is_shown_set_and_not_scaled_by_lr_rule():
    net = nn.Dense(3, 1)
    optimizer = optim.SGD(net.trainable_params(), lr=0.1)
    set_learning_rate(optimizer, 0.25)
    assert learning_rate_of([optimizer], 7) == 0.25
    with pytest.raises(ValueError, match="lr_rule can't scale the learning rate of SGD"):
        ElasticTraining(net, optimizer, lr_rule="linear").begin()
    two = optim.SGD([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}], lr=0.1)
    assert learning_rate_of([two], 0) is None
    with pytest.raises(ValueError, match="SGD has groups of parameters"):
        set_learning_rate(two, 0.1)
