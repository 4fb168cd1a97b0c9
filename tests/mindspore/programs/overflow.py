"""MODE AVERAGING: a step that overflows at one rank is skipped by all, and the scale falls at all; no rank hangs. S-SGD
goes through a step of one's own and MindSpore's, and model averaging through AVERAGING, one of these."""

import sys

import mindspore as ms
import numpy as np
import rounding
from ending import end
from mindspore import Parameter, Tensor, nn, ops

import ms_kungfu as kf
from ms_kungfu.optimizers import OverflowAgreement, SynchronousAveragingOptimizer, SynchronousSGDOptimizer
from ms_kungfu.optimizers.overflow import Agreeing

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
OVERFLOWS = {2: 1, 5: SIZE - 1, 6: 0}  # step -> the rank whose gradients are infinite then
STEPS, GROW_AFTER = 9, 3
LOCAL_BATCH = 4


def infinite(gradients):
    flags = ()
    for gradient in gradients:
        flags = flags + (ops.logical_not(ops.isfinite(gradient).all()),)
    return ops.stack(flags).any()


class Scaled(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's cell with a check for overflow that a CPU can do."""

    def get_overflow_status(self, status, compute_output):
        return infinite(compute_output)


class AgreeingScaled(Agreeing, Scaled):
    pass


class OwnStep(nn.Cell):
    """A training step and a scaler of one's own, with two micro-batches that are accumulated."""

    def __init__(self, network, optimizer):
        super().__init__()
        self.network, self.optimizer = network, optimizer
        self.grad = ops.grad(self.scaled_loss, None, optimizer.parameters)
        self.agree = OverflowAgreement("own/overflow")
        self.scale_sense = Parameter(Tensor(1024.0, ms.float32), name="scale_sense")
        self.good_steps = Parameter(Tensor(0, ms.int32), name="good_steps")

    def scaled_loss(self, x, y):
        return self.network(x, y) * self.scale_sense

    def construct(self, x, y):
        half = x.shape[0] // 2
        first = self.grad(x[:half], y[:half])
        second = self.grad(x[half:], y[half:])
        gradients = ()
        for i in range(len(first)):
            gradients = gradients + ((first[i] + second[i]) * 0.5 / self.scale_sense,)
        overflow = self.agree(infinite(gradients))
        if overflow:
            self.scale_sense = self.scale_sense * 0.5
            self.good_steps = self.good_steps * 0
        else:
            self.optimizer(gradients)
            self.good_steps = self.good_steps + 1
            if self.good_steps == GROW_AFTER:
                self.scale_sense = self.scale_sense * 2.0
                self.good_steps = self.good_steps * 0
        return overflow


def make(around):
    start = np.random.RandomState(1)
    net = nn.Dense(5, 3, weight_init=Tensor(start.randn(3, 5).astype(np.float32)), bias_init="zeros")
    inner = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    return net, around(inner), nn.WithLossCell(net, nn.MSELoss())


def batch(step):
    random = np.random.RandomState(100 * step + RANK)
    x, y = random.randn(LOCAL_BATCH, 5).astype(np.float32), random.randn(LOCAL_BATCH, 3).astype(np.float32)
    if OVERFLOWS.get(step) == RANK:
        x[1, 2] = np.inf
    return Tensor(x), Tensor(y)


def state(optimizer):
    return [p.asnumpy().copy() for p in optimizer.get_parameters()]


def expected_scales():
    """After each step: halved by an overflow, doubled by GROW_AFTER steps without one."""
    scale, good = 1024.0, 0
    for step in range(STEPS):
        good = 0 if step in OVERFLOWS else good + 1
        scale *= 0.5 if step in OVERFLOWS else 2.0 if good == GROW_AFTER else 1.0
        good %= GROW_AFTER
        yield scale


def run(what, around, make_step, models_equal):
    net, optimizer, with_loss = make(around)
    step_cell = make_step(with_loss, optimizer)
    for step, scale in zip(range(STEPS), expected_scales()):
        before = state(optimizer)
        step_cell(*batch(step))
        after = state(optimizer)
        skipped = all((a == b).all() for a, b in zip(before, after))
        assert skipped == (step in OVERFLOWS), f"{what}: rank {RANK}, step {step}: skipped: {skipped}"
        assert all(np.isfinite(a).all() for a in after)
        assert float(step_cell.scale_sense.asnumpy()) == scale, f"{what}: step {step}: {step_cell.scale_sense}"
    mine = net.weight.asnumpy()
    everyones = kf.comm.all_gather(mine, name="agree").reshape(SIZE, -1)
    assert (everyones == everyones[0]).all() == models_equal, what
    return mine


def alone():
    """The same training of one worker on the batches of all ranks, without the steps that overflow."""
    net, optimizer, with_loss = make(lambda inner: inner)
    grad = ops.grad(with_loss, None, optimizer.parameters)
    for step in set(range(STEPS)) - set(OVERFLOWS):
        batches = [np.random.RandomState(100 * step + rank) for rank in range(SIZE)]
        x, y = zip(
            *[(r.randn(LOCAL_BATCH, 5).astype(np.float32), r.randn(LOCAL_BATCH, 3).astype(np.float32)) for r in batches]
        )
        optimizer(grad(Tensor(np.concatenate(x)), Tensor(np.concatenate(y))))
    return net.weight.asnumpy()


def theirs(with_loss, optimizer):
    scaler = nn.DynamicLossScaleUpdateCell(1024.0, scale_factor=2, scale_window=GROW_AFTER)
    return AgreeingScaled(with_loss, optimizer, scaler).set_train()


def main():
    want = alone()
    for how, make_step in (("own", OwnStep), ("MindSpore's", theirs)):
        got = run(f"S-SGD, {how}", SynchronousSGDOptimizer, make_step, True)
        start = make(lambda inner: inner)[0].weight.asnumpy()
        rounding.check(how, got, want, start, STEPS - len(OVERFLOWS), terms=5 + LOCAL_BATCH * SIZE)
        if how == sys.argv[2]:
            run(f"SMA, {how}", lambda inner: SynchronousAveragingOptimizer(inner, 0.1), make_step, False)


main()
end()
