"""The common part of the two programs with MindSpore: the models, and a training step with the tally."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from benchmarks import networks
from benchmarks.churn.samples import EXTRA
from benchmarks.churn.workloads import CLASSES, MLP_WIDTH, MOMENTUM, RATE, Workload


def network(workload: Workload) -> Any:
    ms.set_seed(1)
    if workload.network == "lenet":
        return networks.lenet()
    return nn.SequentialCell(
        nn.Flatten(), nn.Dense(784, MLP_WIDTH), nn.ReLU(), nn.Dense(MLP_WIDTH, MLP_WIDTH), nn.ReLU(),
        nn.Dense(MLP_WIDTH, CLASSES),
    )  # fmt: skip


def tally(total: int) -> Any:
    return ms.Parameter(np.zeros(total + EXTRA, np.float32), name="tally")


class Marked(nn.Cell):
    """Returns the loss plus a term whose gradient with respect to the tally is -marks."""

    def __init__(self, net: Any, tally: Any) -> None:
        super().__init__(auto_prefix=False)
        self.net, self.tally, self.loss = net, tally, networks.Loss()

    def construct(self, x, y, marks):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.loss(self.net(x), y) - (self.tally * marks).sum()


class Alone(nn.Cell):
    """Reduces nothing: each worker trains by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, gradients):  # type: ignore[no-untyped-def]
        return gradients


class Step(nn.Cell):
    """A training step: gradients, their mean over the workers, MindSpore's Momentum, and the tally.

    `reducer` makes the cell that averages a tuple of gradients over the workers.
    """

    def __init__(self, net: Any, total: int, reducer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.tally = tally(total)
        weights = net.trainable_params()
        self.optimizer = nn.Momentum(weights, RATE, MOMENTUM)
        parameters = [self.tally, *weights]
        self.gradients = ms.value_and_grad(Marked(net, self.tally), None, ms.ParameterTuple(parameters))
        self.reducer = reducer(parameters)
        self.total = total
        without_slots = np.ones(total + EXTRA, np.float32)
        without_slots[total:-1] = 0
        self.without_slots = ms.Tensor(without_slots)

    def construct(self, x, y, marks):  # type: ignore[no-untyped-def]
        loss, gradients = self.gradients(x, y, marks)
        gradients = self.reducer(gradients)
        mean = -gradients[0]
        # `samples.counted`
        added = mean / mean[self.total : -1].max() * self.without_slots
        loss = ops.depend(loss, self.optimizer(gradients[1:]))
        return ops.depend(loss, ops.assign_add(self.tally, added))


class ShardGradients(nn.Cell):
    """Returns a shard's loss and the gradients with respect to tally and weights. `numbers`: the samples' indices."""

    def __init__(self, net: Any, tally: Any) -> None:
        super().__init__(auto_prefix=False)
        parameters = ms.ParameterTuple([tally, *net.trainable_params()])
        self.gradients = ms.value_and_grad(Marked(net, tally), None, parameters)
        self.numbers = ms.Tensor(np.arange(len(tally), dtype=np.int32))

    def construct(self, x, y, numbers):  # type: ignore[no-untyped-def]
        found = (numbers.expand_dims(1) == self.numbers).astype(ms.float32)
        return self.gradients(x, y, found.sum(0) / numbers.shape[0])


class ShardUpdate(nn.Cell):
    """MindSpore's Momentum, and the tally. Each sample in a step has the same mean mark, so no slots are needed."""

    def __init__(self, net: Any, tally: Any) -> None:
        super().__init__(auto_prefix=False)
        self.tally = tally
        self.optimizer = nn.Momentum(net.trainable_params(), RATE, MOMENTUM)

    def construct(self, gradients):  # type: ignore[no-untyped-def]
        mean = -gradients[0]
        return ops.depend(self.optimizer(gradients[1:]), ops.assign_add(self.tally, mean / mean.max()))


def scores(net: Any, x: Any) -> Any:
    net.set_train(False)
    return net(ms.Tensor(x)).asnumpy()
