"""Groups reduced in turn, against one worker with MindSpore's optimizer on the whole batch.

`fusion.py graph|pynative all|few`.

Under tests/mindspore/tracing.c: what the runtime was asked for is compared with the plan.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import rounding
from ending import end
from mindspore import Tensor, nn, ops
from mindspore.train import Model

import ms_kungfu as kf
from ms_kungfu import comm
from ms_kungfu.ops import KungFuAllGather, KungFuAllReduce, KungFuReduceScatter
from ms_kungfu.optimizers import KungFuAdam, KungFuGradReducer, KungFuMomentum

GRAPH = sys.argv[1] == "graph"
ms.set_context(mode=ms.GRAPH_MODE if GRAPH else ms.PYNATIVE_MODE)
ms.set_seed(1)
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
FEW = sys.argv[2] == "few"
LOCAL_BATCH, STEPS = 4, 3
# The last layer's 500 inputs of up to 1 make a Hessian with an eigenvalue of up to 2/3 x 500: at 0.001 all is stable.
RATE = 0.001
TERMS = 5 + 600 + 500 + LOCAL_BATCH * SIZE
TRACE = Path(f"{os.environ['KUNGFU_TRACE']}.{os.getpid()}")


def traced():
    """The reductions since the last call: (name, tensors)."""
    lines = TRACE.read_text().splitlines() if TRACE.exists() else []
    TRACE.unlink(missing_ok=True)
    return [(name, int(n)) for name, n in (line.split() for line in lines)]


class Net(nn.Cell):
    """Six parameters in three layers; the second has 1.1 MB."""

    def __init__(self, ids=(1, 1, 1)):
        super().__init__()
        random = np.random.RandomState(1)

        def dense(inputs, outputs):
            weight = random.uniform(-0.3, 0.3, (outputs, inputs)).astype(np.float32)
            return nn.Dense(inputs, outputs, weight_init=Tensor(weight), bias_init="zeros")

        self.a, self.b, self.c = dense(5, 600), dense(600, 500), dense(500, 3)
        for layer, i in zip((self.a, self.b, self.c), ids):
            layer.set_comm_fusion(i)

    def construct(self, x):
        return self.c(ops.tanh(self.b(ops.tanh(self.a(x)))))


def batch(step):
    random = np.random.RandomState(100 + step)
    x = random.randn(LOCAL_BATCH * SIZE, 5).astype(np.float32)
    return x, np.tanh(x[:, :3] * 2).astype(np.float32)


def shard(array):
    return Tensor(array[RANK * LOCAL_BATCH : (RANK + 1) * LOCAL_BATCH])


def train(make_optimizer, sharded, ids=(1, 1, 1), jitted=False):
    net = Net(ids)
    optimizer, loss_fn = make_optimizer(net), nn.MSELoss()

    def forward(x, y):
        return loss_fn(net(x), y)

    grad = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(x, y):
        loss, grads = grad(x, y)
        optimizer(grads)
        return loss

    run = ms.jit(step) if jitted else step
    for i in range(STEPS):
        x, y = batch(i)
        run(shard(x), shard(y)) if sharded else run(Tensor(x), Tensor(y))
    return optimizer, [p.asnumpy() for p in net.trainable_params()]


def agree(what, got, expected):
    for mine, want, start in zip(got, expected, START):
        rounding.check(f"rank {RANK}: {what}", mine, want, start, STEPS, TERMS)
        everyones = comm.all_gather(np.ascontiguousarray(mine), name="agree").reshape(SIZE, -1)
        assert (everyones == everyones[0]).all(), f"{what}: the ranks differ"


def plain(net):
    return nn.Momentum(net.trainable_params(), RATE, 0.9)


def momentum(net, **kwargs):
    return KungFuMomentum(net.trainable_params(), RATE, 0.9, overlap=False, **kwargs)


def of_one(make_optimizer):
    """What the optimizer makes of the whole batches, which rank 0 trains for all: each training is a compilation."""
    weights = train(make_optimizer, sharded=False)[1] if RANK == 0 else START
    return [comm.broadcast(np.ascontiguousarray(w), 0, name="of one").reshape(w.shape) for w in weights]


START = [p.asnumpy() for p in Net().trainable_params()]
EXPECTED = of_one(plain)


def allreduce(mode, config):
    return {"allreduce": {"mode": mode, "config": config}}


def every_mode_is_one_operation_a_group():
    """(configuration, ids of the layers, argument) -> the members of the groups.

    Each training is a compilation: all of them run with the step compiled in GRAPH mode, without in PyNative mode, and
    some both ways in both.
    """
    alone = [[i] for i in range(6)]
    cases = [
        ({}, (1, 1, 1), None, [[0, 1, 2, 3, 4, 5]]),
        (allreduce("auto", None), (1, 1, 1), None, [[0, 1, 2, 3, 4, 5]]),
        (allreduce("size", 1), (1, 1, 1), None, [[0, 1], [2], [3, 4, 5]]),
        (allreduce("size", 0), (1, 1, 1), None, alone),
        (allreduce("index", [0, 3]), (1, 1, 1), None, [[0], [1, 2, 3], [4, 5]]),
        ({"openstate": False}, (1, 1, 1), None, alone),
        ({}, (0, 1, 2), None, [[0], [1], [2, 3], [4, 5]]),
        ({}, (3, 1, 3), None, [[0, 1, 4, 5], [2, 3]]),
        (allreduce("size", 1), (7, 1, 7), None, [[0, 1, 4, 5], [2], [3]]),
        ({"openstate": False}, (1, 1, 1), "auto", [[0, 1, 2, 3, 4, 5]]),
        (allreduce("size", 1), (2, 1, 1), "none", alone),
        ({}, (1, 1, 1), {"mode": "index", "config": [2]}, [[0, 1, 2], [3, 4, 5]]),
    ]
    if FEW:
        cases = cases[5::3]
    for number, (configuration, ids, fusion, groups) in enumerate(cases):
        what = f"{configuration}, ids {ids}, fusion {fusion}"
        ms.set_auto_parallel_context(comm_fusion=configuration)
        for jitted in (False, True) if number == len(cases) - 1 or (number == 0 and not FEW) else (GRAPH,):
            optimizer, weights = train(partial(momentum, fusion=fusion), True, ids, jitted)
            wanted = [(f"gradients/{i}", len(group)) for i, group in enumerate(groups)] * STEPS
            used = traced()
            assert used == wanted, f"{what}: {used}, expected {wanted}"
            assert [list(group.members) for group in optimizer.fusion_plan().groups] == groups, what
            agree(what, weights, EXPECTED)
        ms.reset_auto_parallel_context()


def ids_may_be_set_after_the_optimizer_is_made():
    def make(net):
        optimizer = momentum(net)
        assert len(optimizer.fusion_plan().groups) == 1
        net.b.set_comm_fusion(2)
        ms.set_auto_parallel_context(comm_fusion=allreduce("index", [1]))
        return optimizer

    optimizer, weights = train(make, True)
    assert [(name, n) for name, n in traced()][:3] == [("gradients/0", 2), ("gradients/1", 2), ("gradients/2", 2)]
    agree("late ids", weights, EXPECTED)
    ms.reset_auto_parallel_context()
    plan = optimizer.fusion_plan()
    assert len(plan.groups) == 3, "the plan in use stays"


def other_ways_to_train():
    """Grouped parameters in an order of their own, Model.train, a training cell with the reducer."""

    def ordered(net):
        params = net.trainable_params()
        groups = [{"params": params[:2], "lr": RATE}, {"params": params[2:]}, {"order_params": params[::-1]}]
        return KungFuMomentum(groups, RATE, 0.9, fusion={"mode": "index", "config": [1]}, overlap=False)

    optimizer, weights = train(ordered, True)
    assert [g.name for g in optimizer.fusion_plan().gradients][:2] == ["c.bias", "c.weight"]
    assert traced() == [("gradients/0", 2), ("gradients/1", 4)] * STEPS
    agree("order_params", weights, EXPECTED)

    net = Net((0, 1, 2))
    model = Model(net, nn.MSELoss(), momentum(net))
    rows = [[part[RANK * LOCAL_BATCH : (RANK + 1) * LOCAL_BATCH] for part in batch(i)] for i in range(STEPS)]
    data = ms.dataset.GeneratorDataset([(x, y) for x, y in rows], ["x", "y"], shuffle=False)
    model.train(1, data, dataset_sink_mode=False)
    assert traced() == [("gradients/0", 1), ("gradients/1", 1), ("gradients/2", 2), ("gradients/3", 2)] * STEPS
    agree("Model.train", [p.asnumpy() for p in net.trainable_params()], EXPECTED)

    net, loss_fn = Net((0, 1, 2)), nn.MSELoss()
    optimizer = plain(net)
    reducer = KungFuGradReducer(optimizer.parameters, fusion="none", overlap=False)

    def forward(x, y):
        return loss_fn(net(x), y)

    grad = ms.value_and_grad(forward, None, optimizer.parameters)
    for i in range(STEPS):
        x, y = batch(i)
        optimizer(reducer(grad(shard(x), shard(y))[1]))
    assert traced() == [(f"gradients/{i}", 1) for i in range(6)] * STEPS
    agree("reducer", [p.asnumpy() for p in net.trainable_params()], EXPECTED)

    # With a usual eps Adam makes a step of a gradient that is rounding only.
    adam = {"learning_rate": RATE, "eps": 1.0}
    expected = of_one(lambda net: nn.Adam(net.trainable_params(), **adam))
    sized = {"mode": "size", "config": 1}
    ours = train(lambda net: KungFuAdam(net.trainable_params(), **adam, fusion=sized, overlap=False), True)[1]
    assert traced() == [("gradients/0", 2), ("gradients/1", 1), ("gradients/2", 3)] * STEPS
    agree("Adam", ours, expected)


class Doubling(KungFuMomentum):
    """Its body, and so each reduction, must run once."""

    def construct(self, gradients):
        doubled = ()
        for gradient in gradients:
            doubled = doubled + (gradient * 2,)
        return super().construct(doubled)


class Reducing(nn.Momentum):
    """A user's own, with a reducer for groups."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reducer = KungFuGradReducer(self.parameters, fusion={"mode": "index", "config": [3]}, overlap=False)

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):
        return super(Reducing, self).construct(self.reducer(gradients))  # noqa: UP008


def each_group_is_reduced_once():
    grouped = {"mode": "index", "config": [3]}
    ours = train(lambda net: Doubling(net.trainable_params(), RATE / 2, 0.9, fusion=grouped, overlap=False), True)[1]
    assert traced() == [("gradients/0", 4), ("gradients/1", 2)] * STEPS
    agree("subclass", ours, EXPECTED)
    ours = train(lambda net: Reducing(net.trainable_params(), RATE, 0.9), True)[1]
    assert traced() == [("gradients/0", 4), ("gradients/1", 2)] * STEPS
    agree("a user's own", ours, EXPECTED)


class Synced(nn.Cell):
    """A collective in the network, whose gradient comes after that of the layer behind it."""

    def __init__(self):
        super().__init__()
        self.late, self.early = nn.Dense(5, 400), nn.Dense(400, 3)
        self.mean = KungFuAllReduce("mean", name="synced")

    def construct(self, x):
        return self.early(self.mean(self.late(x)))


def groups_wait_for_the_collectives_of_the_backward_pass():
    net, loss_fn = Synced(), nn.MSELoss()
    groups = [{"params": net.trainable_params()}, {"order_params": net.trainable_params()[::-1]}]
    optimizer = KungFuMomentum(groups, RATE, 0.9, fusion="none", overlap=False)

    def forward(x, y):
        return loss_fn(net(x), y)

    grad = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x, y):
        loss, grads = grad(x, y)
        optimizer(grads)
        return loss

    for i in range(STEPS):
        x, y = batch(i)
        step(shard(x), shard(y))
    net.late.bias.asnumpy()  # waits for the last step
    assert [name for name, _ in traced()] == ["synced", "synced/grad", *(f"gradients/{i}" for i in range(4))] * STEPS


def gradients_that_are_not_the_parameters():
    net = Net()
    reducer, optimizer = KungFuGradReducer(net.trainable_params()), momentum(net)
    sentence = "got 1 gradients for 6 parameters; differentiate with respect to"
    for call in (reducer, optimizer):
        try:
            call((Tensor(np.zeros(3, np.float32)),))
        except ValueError as error:
            assert sentence in str(error), error
        else:
            raise AssertionError("no error")
    assert traced() == []
    reduced = KungFuGradReducer()((Tensor(np.full(3, RANK, np.float32)),))
    assert np.allclose(reduced[0].asnumpy(), (SIZE - 1) / 2)


def plans_that_differ_between_ranks_are_told_at_once():
    if SIZE == 1:
        return
    for mine, other in (("none", "auto"), ({"mode": "index", "config": [2]}, {"mode": "index", "config": [3]})):
        net = Net()
        reducer = KungFuGradReducer(net.trainable_params(), fusion=mine if RANK == 0 else other, overlap=False)
        zeros = tuple(Tensor(np.zeros(p.shape, np.float32)) for p in net.trainable_params())
        try:
            [gradient.asnumpy() for gradient in reducer(zeros)]
        except RuntimeError as error:
            assert "CollectiveMismatchError" in str(error), error
        else:
            raise AssertionError("no error")
        kf.run_barrier()
    traced()


def gathers_and_scatters_are_divided_by_size():
    """The results are those of one operation; a limit that differs between ranks is told."""
    kinds = ("allgather", "reducescatter")
    arrays = [np.arange(SIZE * n, dtype=np.float32).reshape(SIZE, n) + RANK for n in (200_000, 3, 200_000, 1)]
    everyones = [sum(a - RANK + r for r in range(SIZE)) for a in arrays]
    for config in ({}, {"openstate": False}, {"mode": "size", "config": 1}, {"mode": "size", "config": 2}):
        whole = config if "openstate" in config or not config else dict.fromkeys(kinds, config)
        ms.set_auto_parallel_context(comm_fusion=whole)
        gathered = KungFuAllGather(name="gather")(tuple(map(Tensor, arrays)))
        scattered = KungFuReduceScatter(name="scatter")(tuple(map(Tensor, arrays)))
        for array, total, g, s in zip(arrays, everyones, gathered, scattered):
            assert np.array_equal(g.asnumpy(), np.concatenate([array - RANK + r for r in range(SIZE)])), config
            assert np.array_equal(s.asnumpy(), total[RANK : RANK + 1]), config
        ms.reset_auto_parallel_context()
    if SIZE == 1:
        return
    ms.set_auto_parallel_context(comm_fusion={"allgather": {"mode": "size", "config": RANK + 1}})
    gather = KungFuAllGather(name="gather")
    ms.reset_auto_parallel_context()
    try:
        [out.asnumpy() for out in gather(tuple(map(Tensor, arrays)))]
    except RuntimeError as error:
        assert "CollectiveMismatchError" in str(error), error
    else:
        raise AssertionError("no error")


every_mode_is_one_operation_a_group()
ids_may_be_set_after_the_optimizer_is_made()
other_ways_to_train()
each_group_is_reduced_once()
groups_wait_for_the_collectives_of_the_backward_pass()
gradients_that_are_not_the_parameters()
plans_that_differ_between_ranks_are_told_at_once()
gathers_and_scatters_are_divided_by_size()
kf.run_barrier()
end()
