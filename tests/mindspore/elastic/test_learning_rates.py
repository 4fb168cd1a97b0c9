"""Learning rates of every kind, followed by the updates that optimizers make with them."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ms_kungfu.elastic.learning_rates import LearningRates
from ms_kungfu.elastic.lr_rule import parse_lr_rule
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.errors import KungFuError
from ms_kungfu.optimizers import KungFuMomentum, SynchronousSGDOptimizer
from ms_kungfu.trained.inventory import assign

LINEAR = parse_lr_rule("linear")


class Schedule(nn.learning_rate_schedule.LearningRateSchedule):
    """1/8, 2/8, 3/8, ... by the step."""

    def construct(self, global_step):
        return (global_step + 1).astype(ms.float32) * 0.125


def halves(count):
    return [0.5 ** (i + 1) for i in range(count)]


class Updates:
    """An optimizer without momentum and with gradients of one: parameters fall by the learning rate."""

    def __init__(self, rate, mode, groups=None):
        ms.set_context(mode=mode)
        self.net = nn.SequentialCell(nn.Dense(2, 1), nn.Dense(1, 1))
        first, second = (cell.trainable_params() for cell in self.net)
        params = [*first, *second]
        if groups is not None:
            params = [{"params": first, "lr": groups[0]}, {"params": second, "lr": groups[1]}]
        self.optimizer = KungFuMomentum(params, rate, 0.0)
        self.rates = LearningRates.of([self.net, self.optimizer], 2)
        self.gradients = tuple(ms.Tensor(np.ones(p.shape), p.dtype) for p in self.optimizer.parameters)

    def step(self):
        """The learning rates of the two layers in this step."""
        biases = [cell.bias for cell in self.net]
        for bias in biases:
            assign(bias, np.zeros(1, np.float32))
        self.optimizer(self.gradients)
        return [float(-bias.asnumpy()[0]) for bias in biases]

    def follow(self, size):
        self.rates.follow(LINEAR, size)


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def mode(request):
    return request.param


@pytest.mark.parametrize(
    ("rate", "groups", "expected"),
    [
        (0.25, None, [[0.25, 0.25]] * 4),
        (halves(9), None, [[r, r] for r in halves(4)]),
        (Schedule(), None, [[r, r] for r in (0.125, 0.25, 0.375, 0.5)]),
        (0.5, (0.25, 0.75), [[0.25, 0.75]] * 4),
        (0.5, (halves(9), Schedule()), [[a, b] for a, b in zip(halves(4), (0.125, 0.25, 0.375, 0.5))]),
        (0.5, (0.25, Schedule()), [[0.25, b] for b in (0.125, 0.25, 0.375, 0.5)]),
    ],
    ids=["number", "list", "schedule", "groups", "groups with list and schedule", "groups with number and schedule"],
)
def test_updates_follow_the_size(mode, rate, groups, expected):
    updates = Updates(rate, mode, groups)
    seen = [updates.step()]
    for size in (6, 1, 2):
        updates.follow(size)
        seen.append(updates.step())
    np.testing.assert_allclose(seen, np.array(expected) * [[1], [3], [0.5], [1]], rtol=1e-6)


def test_back_at_the_first_size_the_rate_has_its_bits_again():
    updates = Updates(0.1, ms.GRAPH_MODE)
    for size in (3, 7, 6, 2):
        updates.follow(size)
    assert updates.optimizer.learning_rate.asnumpy() == np.float32(0.1)


def test_a_rate_that_the_program_sets_counts_for_the_present_size(mode):
    updates = Updates(0.25, mode)
    updates.follow(4)
    assign(updates.optimizer.learning_rate, np.float32(1.0))
    updates.follow(8)
    assert updates.step() == [2.0, 2.0]
    updates.follow(2)
    assert updates.step() == [0.5, 0.5]


def test_calls_of_training_with_one_optimizer_count_from_one_start():
    updates = Updates(0.25, ms.GRAPH_MODE)
    updates.follow(4)
    again = LearningRates.of([updates.optimizer], 4)
    again.follow(LINEAR, 2)
    assert updates.step() == [0.25, 0.25]


def test_rates_that_follow_something_else_are_no_rates_to_go_on_with():
    saved = LearningRates.of([nn.Momentum(nn.Dense(2, 1).trainable_params(), 0.1, 0.9)], 2).state()
    of_samples = LearningRates.of([nn.Momentum(nn.Dense(2, 1).trainable_params(), 0.1, 0.9)], 32, "samples")
    with pytest.raises(KungFuError, match="until now, but in this program it scales by the number of samples"):
        of_samples.restore(saved)
    del saved["follows"]  # as it was before
    of_samples.restore(saved)


def test_learning_rate_that_cannot_be_scaled_is_refused():
    net = nn.Dense(2, 1)
    with pytest.raises(ValueError, match="requires an optimizer"):
        LearningRates.of([net], 1)
    late = nn.Momentum(net.trainable_params(), Schedule(), 0.9)
    late(tuple(ms.Tensor(np.ones(p.shape), p.dtype) for p in late.parameters))
    with pytest.raises(ValueError, match="lr_rule can't scale the Schedule of Momentum after"):
        LearningRates.of([late], 1)
    with pytest.raises(ValueError, match=r"nn\.LARS"):
        LearningRates.of([nn.LARS(nn.Momentum(net.trainable_params(), 0.1, 0.9))], 1)


@pytest.mark.parametrize("of_groups", [False, True], ids=["one list", "groups"])
def test_a_list_goes_on_with_its_last_rate(mode, of_groups):
    """A step that is done again after a death lies beyond a list that is as long as the training."""
    first, second = halves(3), [0.75, 0.5, 0.25] if of_groups else halves(3)
    updates = Updates(first, mode, (first, second) if of_groups else None)
    seen = [updates.step() for _ in range(5)]
    np.testing.assert_array_equal(seen, [[first[min(i, 2)], second[min(i, 2)]] for i in range(5)])
    updates.follow(4)
    assert updates.step() == [2 * first[2], 2 * second[2]]


def test_the_lists_of_an_optimizer_inside_of_ours_go_on_too(mode):
    ms.set_context(mode=mode)
    net = nn.Dense(2, 1)
    gradients = tuple(ms.Tensor(np.ones(p.shape), p.dtype) for p in net.trainable_params())
    plain = nn.SGD(net.trainable_params(), halves(2))
    around = SynchronousSGDOptimizer(nn.SGD(net.trainable_params(), halves(2)))
    ElasticTraining(net, plain)
    for optimizer in (plain, around):
        assign(net.bias, np.zeros(1, np.float32))
        for _ in range(4):
            optimizer(gradients)
        assert net.bias.asnumpy() == [-(0.5 + 3 * 0.25)]
