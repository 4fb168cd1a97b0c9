"""Reductions in the background against one worker on the whole batch: `overlap.py graph|pynative [THREADS|once]`.

`once`: one training instead of one for each way of grouping and reducing; each is a compilation.
"""

from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
import rounding
from mindspore import Tensor, nn, ops

import ms_kungfu as kf
from ms_kungfu import comm
from ms_kungfu.ops import KungFuAllReduce
from ms_kungfu.optimizers import KungFuAdam, KungFuGradReducer, KungFuMomentum
from ms_kungfu.trained import claims

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
ONCE = sys.argv[2:] == ["once"]
if sys.argv[2:] and not ONCE:
    ms.runtime.dispatch_threads_num(int(sys.argv[2]))
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
LOCAL_BATCH, STEPS = 4, 4
# The last layer's 500 inputs of up to 1 make a Hessian with an eigenvalue of up to 2/3 x 500: at 0.001 all is stable.
RATE = 0.001
TERMS = 5 + 600 + 500 + LOCAL_BATCH * SIZE


class Net(nn.Cell):
    """Six parameters in three layers; the second is large enough to be staged in pieces."""

    def __init__(self):
        super().__init__()
        random = np.random.RandomState(1)

        def dense(inputs, outputs):
            weight = random.uniform(-0.3, 0.3, (outputs, inputs)).astype(np.float32)
            return nn.Dense(inputs, outputs, weight_init=Tensor(weight), bias_init="zeros")

        self.a, self.b, self.c = dense(5, 600), dense(600, 500), dense(500, 3)

    def construct(self, x):
        return self.c(ops.tanh(self.b(ops.tanh(self.a(x)))))


def batch(step):
    random = np.random.RandomState(100 + step)
    x = random.randn(LOCAL_BATCH * SIZE, 5).astype(np.float32)
    return x, np.tanh(x[:, :3] * 2).astype(np.float32)


def shard(array):
    return Tensor(array[RANK * LOCAL_BATCH : (RANK + 1) * LOCAL_BATCH])


def train(make_optimizer, sharded, make_step=nn.TrainOneStepCell):
    net = Net()
    step = make_step(nn.WithLossCell(net, nn.MSELoss()), make_optimizer(net.trainable_params())).set_train()
    for i in range(STEPS):
        x, y = batch(i)
        step(shard(x), shard(y)) if sharded else step(Tensor(x), Tensor(y))
    return [p.asnumpy() for p in net.trainable_params()]


def agree(what, got, expected):
    starts = [p.asnumpy() for p in Net().trainable_params()]
    for mine, want, start in zip(got, expected, starts):
        rounding.check(f"rank {RANK}: {what}", mine, want, start, STEPS, TERMS)
        everyones = comm.all_gather(np.ascontiguousarray(mine), name="agree").reshape(SIZE, -1)
        assert (everyones == everyones[0]).all(), f"{what}: the ranks differ"


class WithMore(nn.TrainOneStepCell):
    """Other collectives before and after, which block."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mean = KungFuAllReduce("mean", "loss")

    def construct(self, *inputs):
        loss = self.mean(self.network(*inputs))
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        loss = ops.depend(loss, self.optimizer(grads))
        return self.mean(loss * 2)


class Clipped(nn.TrainOneStepCell):
    """A plain optimizer behind a reducer of gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reducer = KungFuGradReducer(self.optimizer.parameters, fusion="none", overlap=True)

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer(ops.clip_by_global_norm(self.reducer(grads), 1e3)))


def n_workers_train_as_one():
    def momentum(cls, **kwargs):
        return lambda params: cls(params, RATE, 0.9, **kwargs)

    expected = train(momentum(nn.Momentum), sharded=False)
    blocking = train(momentum(KungFuMomentum, fusion="none", overlap=False), sharded=True)
    for fusion in ("none",) if ONCE else ("none", "auto", {"mode": "index", "config": [1, 3]}):
        ours = train(momentum(KungFuMomentum, fusion=fusion, overlap=True), sharded=True)
        agree(f"fusion {fusion}", ours, expected)
        for mine, want in zip(ours, blocking):
            assert (mine == want).all(), f"fusion {fusion}: other bits than without overlap"
    if ONCE:
        return
    agree("more collectives", train(momentum(KungFuMomentum, fusion="none", overlap=True), True, WithMore), expected)
    agree("reducer", train(momentum(nn.Momentum), True, Clipped), expected)
    summed = momentum(KungFuMomentum, fusion="none", overlap=True, gradients_mean=False, loss_scale=float(SIZE))
    agree("sum", train(summed, True), expected)
    adam = train(lambda params: KungFuAdam(params, RATE, eps=1.0, fusion="none", overlap=True), True)
    agree("Adam", adam, train(lambda params: nn.Adam(params, RATE, eps=1.0), False))


class Reduce(nn.Cell):
    def __init__(self, shapes):
        super().__init__()
        params = [ms.Parameter(np.zeros(shape, np.float32), name=f"p{i}") for i, shape in enumerate(shapes)]
        claims.mark(params)  # that they aren't is for the gradients to say
        self.reduce = KungFuGradReducer(params, fusion="none", overlap=True)

    def construct(self, gradients):
        return self.reduce(gradients)


def a_mismatch_in_one_group_reaches_every_rank_and_the_next_step_works():
    right = [(3,), (2, 2), (5,)]
    wrong = [(3,), (2, 2 + RANK), (5,)]
    cells = {"right": Reduce(right), "wrong": Reduce(wrong)}
    for which, shapes in (("right", right), ("wrong", wrong), ("right", right), ("right", right)):
        gradients = tuple(Tensor(np.full(shape, RANK + i, np.float32)) for i, shape in enumerate(shapes))
        try:
            reduced = [out.asnumpy() for out in cells[which](gradients)]
        except RuntimeError as error:
            assert str(error).startswith("CollectiveMismatchError: "), error
            assert '"gradients/1"' in str(error), error
            assert which == "wrong" and SIZE > 1
            ms.runtime.empty_cache()
        else:
            assert which == "right" or SIZE == 1
            for i, out in enumerate(reduced):
                assert (out == np.float32((SIZE - 1) / 2 + i)).all(), (which, out)
        kf.run_barrier()


def workers_of_which_some_overlap_hear_so_at_once():
    """Rank 0 overlaps the backward pass, and the others don't. All groups are of the same tensors."""
    ms.set_seed(1)
    net = nn.SequentialCell([nn.Dense(8, 8, has_bias=False) for _ in range(4)])
    optimizer = KungFuMomentum(net.trainable_params(), 0.1, 0.9, fusion="none", overlap=RANK == 0)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
    try:
        step(Tensor(np.ones((3, 8), np.float32)), Tensor(np.zeros((3, 8), np.float32))).asnumpy()
        ms.runtime.synchronize()
    except RuntimeError as error:
        assert "CollectiveMismatchError" in str(error), error
        assert "overlapping the backward pass" in str(error), error
    else:
        raise AssertionError("no error")


n_workers_train_as_one()
a_mismatch_in_one_group_reaches_every_rank_and_the_next_step_works()
kf.run_barrier()
if SIZE > 1 and sys.argv[1] == "graph":
    workers_of_which_some_overlap_hear_so_at_once()
    ms.runtime.empty_cache()
