"""few | all | vjp: loops of the program's own, written for msrun, whose losses don't all follow from the samples alone.

Prints the norm of the first weight's gradient in each pass of one step, by mode, style and loss, and what V batches
give in one process. Ends after a pass in which it has the batch of one rank. With "vjp" the gradient comes from
something that isn't called rank by rank.
"""

import sys
import time

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

BATCH = 4
GRAPH, PYNATIVE = ms.GRAPH_MODE, ms.PYNATIVE_MODE
init()
V = get_group_size()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
ms.set_seed(1)
samples = BATCH * V
random = np.random.RandomState(0)
X = random.randn(samples, 3).astype(np.float32)
Y = random.randn(samples, 1).astype(np.float32)
data = ds.NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False, num_shards=V, shard_id=get_rank())
data = data.batch(BATCH, drop_remainder=True)


class Loss(nn.Cell):
    """Of which only "mean" is the same for a batch and the mean of its parts."""

    def __init__(self, kind, norm):
        super().__init__()
        self.kind = kind
        start = ms.Tensor(np.linspace(-1, 1, 6).reshape(2, 3), ms.float32)
        self.net = nn.SequentialCell(nn.Dense(3, 2, weight_init=start, bias_init="zeros"), norm, nn.Dense(2, 1, "ones"))

    def construct(self, x, y):
        square = (self.net(x) - y) ** 2
        if self.kind == "sum":
            return square.sum()
        if self.kind == "scaled":
            return square.mean() * x.shape[0] * V
        return square.mean()


def frozen(loss):
    return nn.SGD(loss.trainable_params(), 0.0)  # so that each pass has the same gradients


class Own(nn.TrainOneStepCell):
    """With something between the gradients and the update."""

    def construct(self, x, y):
        loss = self.network(x, y)
        gradients = self.grad_reducer(self.grad(self.network, self.weights)(x, y, ops.ones_like(loss)))
        loss = ops.depend(loss, self.optimizer(ops.clip_by_global_norm(gradients, 1.0)))
        return loss, gradients[0]


def steps_of(kind, mode):
    """The norm that V batches give, and functions of a batch that train a step in this mode and return the reduced
    gradient of the first weight."""
    loss = Loss(kind, nn.BatchNorm1d(2)).set_train()
    optimizer = frozen(loss)
    reducer = nn.DistributedGradReducer(optimizer.parameters)

    table = ms.Tensor(np.full(2 * BATCH, 1 / (2 * BATCH)), ms.float32)  # of as many rows as two ranks' batch

    def forward(x, y, table):
        return loss(x, y) * table.sum(), x

    ms.set_context(mode=PYNATIVE)  # which compiles nothing
    gradient = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    parts = [(ms.Tensor(X[i : i + BATCH]), ms.Tensor(Y[i : i + BATCH])) for i in range(0, samples, BATCH)]
    alone = np.mean([gradient(*part, table)[1][0].asnumpy() for part in parts], axis=0)
    ms.set_context(mode=mode)
    gradient = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

    def plain(x, y):
        (value, rows), gradients = gradient(x, y, table)
        assert rows.shape == x.shape
        gradients = reducer(gradients)
        value = ops.depend(value, optimizer(gradients))
        return gradients[0]

    def jitted(x, y):
        (value, _), gradients = gradient(x, y, table)
        gradients = reducer(gradients)
        value = ops.depend(value, optimizer(gradients))
        return gradients[0] + 0.0 * value

    own = Own(loss, frozen(loss)).set_train()
    stock = nn.TrainOneStepCell(loss, nn.SGD(loss.trainable_params(), 1.0)).set_train()

    def cell(x, y):
        weight = loss.net[0].weight
        kept = {parameter: parameter.asnumpy().copy() for parameter in loss.trainable_params()}
        before = weight.asnumpy().copy()
        stock(x, y)
        moved = before - weight.asnumpy()
        for parameter, value in kept.items():
            parameter.set_data(ms.Tensor(value))
        return ms.Tensor(moved)

    steps = {"plain": plain, "jitted": ms.jit(jitted), "own": lambda x, y: own(x, y)[1], "stock": cell}
    return np.linalg.norm(alone), steps


if sys.argv[1:] == ["vjp"]:
    loss = Loss("sum", nn.ReLU())
    optimizer = nn.SGD(loss.trainable_params(), 0.1)
    reducer = nn.DistributedGradReducer(optimizer.parameters)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for x, y in data:
        _, backward = ops.vjp(loss, x, y, weights=optimizer.parameters)
        optimizer(reducer(backward(ms.Tensor(1.0))[1]))
    for _ in data:
        pass
    sys.exit()

CASES = {
    "few": [
        (PYNATIVE, "plain", "sum"),
        (GRAPH, "jitted", "scaled"),
        (GRAPH, "stock", "sum"),
    ],
    "all": [
        (mode, style, kind)
        for mode in (PYNATIVE, GRAPH)
        for style in ("plain", "jitted", "own", "stock")
        for kind in ("mean", "sum", "scaled")
    ],
}
trained = []
for mode, style, kind in CASES[sys.argv[1]]:
    alone, steps = steps_of(kind, mode)
    name = f"{'graph' if mode == GRAPH else 'pynative'} {style} {kind}"
    trained.append((mode, name, alone, steps[style]))
rows = samples  # of a worker that joins, whose first passes are over and without a batch
for _ in range(10_000):
    for x, y in data:
        rows = x.shape[0]
        for mode, name, alone, step in trained:
            ms.set_context(mode=mode)
            norm = np.linalg.norm(step(x, y).asnumpy())
            print(f"{rows} rows, {name}: {norm:.5f} {alone:.5f}", flush=True)
        time.sleep(0.3)
    if rows == BATCH:
        break
