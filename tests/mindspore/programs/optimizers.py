"""Workers on shards against one worker on the whole batch, for every optimizer.

`optimizers.py graph|pynative [SECTION ...]`: those sections only, if any are named.
"""

from __future__ import annotations

import itertools
import sys

import mindspore as ms
import numpy as np
import rounding
from ending import end
from mindspore import Tensor, nn, ops
from mindspore.ops import composite as C

import ms_kungfu as kf
from ms_kungfu import comm
from ms_kungfu import optimizers as kf_optimizers
from ms_kungfu.ops import KungFuAllReduce
from ms_kungfu.optimizers import (
    AdaptiveSGDOptimizer,
    KungFuGradReducer,
    KungFuMomentum,
    PairAveragingOptimizer,
    SynchronousAveragingOptimizer,
    SynchronousSGDOptimizer,
)

GRAPH = sys.argv[1] == "graph"
ms.set_context(mode=ms.GRAPH_MODE if GRAPH else ms.PYNATIVE_MODE)
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
LOCAL_BATCH, STEPS = 4, 4
TERMS = 5 + 8 + LOCAL_BATCH * SIZE
_turns = itertools.count()


def make_net():
    random = np.random.RandomState(1)

    def weights(*shape):
        return Tensor(random.uniform(-0.5, 0.5, shape).astype(np.float32))

    return nn.SequentialCell(
        nn.Dense(5, 8, weight_init=weights(8, 5), bias_init="zeros"),
        nn.Tanh(),
        nn.Dense(8, 3, weight_init=weights(3, 8), bias_init="zeros"),
    )


def batch(step):
    random = np.random.RandomState(100 + step)
    x = random.randn(LOCAL_BATCH * SIZE, 5).astype(np.float32)
    return x, np.tanh(x[:, :3] * 2).astype(np.float32)


def shard(array):
    return Tensor(array[RANK * LOCAL_BATCH : (RANK + 1) * LOCAL_BATCH])


def train(make_optimizer, sharded, make_step=None):
    """The trained parameters after a few steps on this rank's share, or on the whole of each batch."""
    net = make_net()
    optimizer = make_optimizer(net)
    with_loss = nn.WithLossCell(net, nn.MSELoss())
    step = make_step(with_loss, optimizer) if make_step else nn.TrainOneStepCell(with_loss, optimizer).set_train()
    for i in range(STEPS):
        x, y = batch(i)
        step(shard(x), shard(y)) if sharded else step(Tensor(x), Tensor(y))
    return [p.asnumpy() for p in net.trainable_params()]


def shared(make):
    """What `make` makes at one of the ranks, another one each time, as all could: each training is a compilation."""
    root = next(_turns) % SIZE
    weights = make() if root == RANK else [p.asnumpy() for p in make_net().trainable_params()]
    return [comm.broadcast(np.ascontiguousarray(w), root, name="shared").reshape(w.shape) for w in weights]


def trained_by_one(make_optimizer, make_step=None):
    return shared(lambda: train(make_optimizer, False, make_step))


def agree(what, got, expected):
    starts = [p.asnumpy() for p in make_net().trainable_params()]
    for mine, want, start in zip(got, expected, starts):
        rounding.check(f"rank {RANK}: {what}", mine, want, start, STEPS, TERMS)
        everyones = comm.all_gather(np.ascontiguousarray(mine), name="agree").reshape(SIZE, -1)
        assert (everyones == everyones[0]).all(), f"{what}: the ranks differ"


def group_params(net):
    return [
        {"params": net[0].trainable_params(), "lr": 0.05, "weight_decay": 0.01},
        {"params": net[2].trainable_params()},
        {"order_params": net.trainable_params()},
    ]


def drop_ins():
    def plain(*args, **kwargs):
        return lambda cls: lambda net: cls(net.trainable_params(), *args, **kwargs)

    cases = [
        ("Momentum", plain(0.1, 0.9)),
        ("Momentum", plain(nn.CosineDecayLR(0.01, 0.1, 10), 0.9, weight_decay=0.01, use_nesterov=True)),
        ("Momentum", plain([0.1, 0.2, 0.3, 0.4], momentum=0.9, loss_scale=2.0)),
        ("Momentum", lambda cls: lambda net: cls(group_params(net), 0.1, 0.9)),
        ("SGD", plain(0.1, momentum=0.5)),
        ("Adam", plain(0.1, eps=1.0)),
        ("AdamWeightDecay", plain(0.1, eps=1.0, weight_decay=0.1)),
        ("RMSProp", plain(0.1, epsilon=1.0, centered=True)),
    ]
    if SIZE == 1:  # two workers play the others
        cases = [cases[1], *cases[3:]]
    for i, (name, make) in enumerate(cases):
        theirs, ours = getattr(nn, name), getattr(kf_optimizers, f"KungFu{name}")
        assert issubclass(ours, theirs)
        expected = trained_by_one(make(theirs))
        agree(f"{name} {i}", train(make(ours), sharded=True), expected)
        inner = make(theirs)
        around = train(lambda net, inner=inner: SynchronousSGDOptimizer(inner(net)), sharded=True)
        agree(f"around {name} {i}", around, expected)
        if name != "SGD":  # a few are enough: each is a compilation
            continue
        others = [lambda o: AdaptiveSGDOptimizer(o, algorithm="ssgd"), lambda o: AdaptiveSGDOptimizer(o, 0)]
        if SIZE == 1:
            others += [SynchronousAveragingOptimizer, PairAveragingOptimizer, lambda o: AdaptiveSGDOptimizer(o, 2)]
        for k, other in enumerate(others):
            got = train(lambda net, inner=inner, other=other: other(inner(net)), sharded=True)
            agree(f"{k} around {name}", got, expected)
            assert SIZE > 1 or all((a == b).all() for a, b in zip(got, expected)), f"{k} around {name}"


def refusals():
    net = make_net()
    inner = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    ours = KungFuMomentum(net.trainable_params(), 0.1, 0.9)
    for error, said, make in [
        (TypeError, "must wrap a MindSpore optimizer", lambda: SynchronousSGDOptimizer(net)),
        (TypeError, "KungFuMomentum synchronises the workers itself", lambda: SynchronousSGDOptimizer(ours)),
        (TypeError, "synchronises", lambda: SynchronousAveragingOptimizer(SynchronousSGDOptimizer(inner))),
        (ValueError, "alpha must be above 0 and at most 1", lambda: SynchronousAveragingOptimizer(inner, alpha=0)),
        (ValueError, "momentum must be at least 0 and below 1", lambda: SynchronousAveragingOptimizer(inner, 0.1, 1)),
        (ValueError, "neighbour must be one of random, round-robin", lambda: PairAveragingOptimizer(inner, "nearest")),
        (TypeError, "prefetch must be True or False", lambda: PairAveragingOptimizer(inner, prefetch=1)),
        (ValueError, "algorithm must be one of ssgd, sma, pair", lambda: AdaptiveSGDOptimizer(inner, algorithm="asgd")),
        (ValueError, "change_step must be at least 0", lambda: AdaptiveSGDOptimizer(inner, -1)),
        (TypeError, "alpha must be a number", lambda: SynchronousAveragingOptimizer(inner, alpha="big")),
    ]:
        try:
            make()
        except error as raised:
            assert said in str(raised), raised
        else:
            raise AssertionError(f"not refused: {said}")
    outer = SynchronousAveragingOptimizer(inner)
    assert outer.learning_rate is inner.learning_rate
    assert outer.global_step is inner.global_step
    assert isinstance(outer, nn.Optimizer)
    assert not hasattr(outer, "no_such_thing")


def sums():
    """Of equal shares the sum is SIZE times the mean."""
    mean = trained_by_one(lambda net: nn.Momentum(net.trainable_params(), 0.01 * SIZE, 0.9))
    total = train(lambda net: KungFuMomentum(net.trainable_params(), 0.01, 0.9, gradients_mean=False), sharded=True)
    agree("sum", total, mean)


class Clipped(nn.Cell):
    """A training cell of one's own: accumulates two micro-batches, then clips."""

    def __init__(self, network, optimizer, reducer):
        super().__init__()
        self.network, self.optimizer, self.reducer = network, optimizer, reducer
        self.grad = ops.value_and_grad(network, None, optimizer.parameters)

    def construct(self, x, y):
        half = x.shape[0] // 2
        loss, first = self.grad(x[:half], y[:half])
        more, second = self.grad(x[half:], y[half:])
        grads = ()
        for i in range(len(first)):
            grads = grads + ((first[i] + second[i]) * 0.5,)
        if self.reducer is not None:
            grads = self.reducer(grads)
        grads = ops.clip_by_global_norm(grads, 0.05)
        self.optimizer(grads)
        return loss + more


def reducer_in_a_training_cell():
    def momentum(net):
        return nn.Momentum(net.trainable_params(), 0.1, 0.9)

    ours = train(momentum, True, lambda net, opt: Clipped(net, opt, KungFuGradReducer(opt.parameters)))
    agree("clipped", ours, trained_by_one(momentum, lambda net, opt: Clipped(net, opt, None)))


class ClippingMomentum(nn.Momentum):
    """An optimizer that clips what it is given."""

    def construct(self, gradients):
        return super().construct(ops.clip_by_global_norm(gradients, 0.05))


def clipping_inside():
    """What the inner optimizer does to the gradients comes after the reduction."""

    def inner(net):
        return ClippingMomentum(net.trainable_params(), 0.1, 0.9)

    ours = train(lambda net: SynchronousSGDOptimizer(inner(net)), sharded=True)
    agree("clipping inside", ours, trained_by_one(inner))
    unclipped = trained_by_one(lambda net: nn.Momentum(net.trainable_params(), 0.1, 0.9))
    assert not np.allclose(ours[0], unclipped[0], rtol=1e-4), "nothing was clipped"


class Doubling(KungFuMomentum):
    """A subclass of ours with a plain override, whose body must run once."""

    def construct(self, gradients):
        doubled = ()
        for gradient in gradients:
            doubled = doubled + (gradient * 2,)
        return super().construct(doubled)


def subclass_of_ours():
    expected = trained_by_one(lambda net: nn.Momentum(net.trainable_params(), 0.2, 0.9))
    agree("subclass", train(lambda net: Doubling(net.trainable_params(), 0.1, 0.9), sharded=True), expected)


def hand_written_loops():
    """`value_and_grad` with and without `ms.jit`, the optimizer in the step or outside it."""

    def loop(make_optimizer, sharded, jitted):
        net = make_net()
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
        return [p.asnumpy() for p in net.trainable_params()]

    expected = shared(lambda: loop(lambda net: nn.Momentum(net.trainable_params(), 0.1, 0.9), False, False))
    for jitted in (False, True):
        ours = loop(lambda net: KungFuMomentum(net.trainable_params(), 0.1, 0.9), True, jitted)
        agree(f"loop, jitted={jitted}", ours, expected)


def model_train():
    """Under Model.train: without and with sinking, with a loss scale manager, with mixed precision."""

    def run(optimizer_class, sharded, sink, **kwargs):
        net = make_net()
        optimizer = optimizer_class(net.trainable_params(), 0.1, 0.9, loss_scale=8.0 if kwargs else 1.0)
        rows = [batch(i) for i in range(STEPS)]
        part = slice(RANK * LOCAL_BATCH, (RANK + 1) * LOCAL_BATCH) if sharded else slice(None)
        data = ms.dataset.GeneratorDataset([(x[part], y[part]) for x, y in rows], ["x", "y"], shuffle=False)
        ms.Model(net, nn.MSELoss(), optimizer, **kwargs).train(1, data, dataset_sink_mode=sink)
        return [p.asnumpy() for p in net.trainable_params()]

    expected = shared(lambda: run(nn.Momentum, False, False))
    for sink in (False, True):
        agree(f"Model.train, sink={sink}", run(KungFuMomentum, True, sink), expected)
    agree(
        "Model.train, around", run(lambda *a, **k: SynchronousSGDOptimizer(nn.Momentum(*a, **k)), True, False), expected
    )
    scaled = {"loss_scale_manager": ms.FixedLossScaleManager(8.0, drop_overflow_update=False)}
    agree("Model.train, loss scale", run(KungFuMomentum, True, False, **scaled), expected)
    half = {"amp_level": "O3", **scaled}
    starts = [p.asnumpy() for p in make_net().trainable_params()]
    ours, theirs = run(KungFuMomentum, True, False, **half), run(nn.Momentum, False, False, **half)
    for mine, want, start in zip(ours, theirs, starts):
        rounding.check("amp", mine, want, start, STEPS, TERMS, "float16")


def plain_subclasses():
    """As programs for the older integration have them. In PyNative mode MindSpore would run their body twice."""
    mean = {
        "Momentum": (0.1, 0.9),
        "SGD": (0.1,),
        "Adam": (0.1, 0.9, 0.999, 1.0),
        "AdamWeightDecay": (0.1, 0.9, 0.999, 1.0),
        "RMSProp": (0.1, 0.9, 0.0, 1.0),
    }
    for name, args in mean.items():
        base = getattr(nn, name)

        class Attribute(base):
            def __init__(self, *args, **kwargs):
                super(Attribute, self).__init__(*args, **kwargs)  # noqa: UP008
                self.map_ = C.Map()
                self.all_reduce = KungFuAllReduce("mean")

            def construct(self, gradients):
                gradients = self.map_(self.all_reduce, gradients)
                return super(Attribute, self).construct(gradients)  # noqa: UP008

        class Hidden(base):
            """We don't learn of this class when it gets its primitive."""

            def __init__(self, *args, **kwargs):
                super(Hidden, self).__init__(*args, **kwargs)  # noqa: UP008
                self.map_ = C.Map()
                self.collectives = [KungFuAllReduce("mean")]

            def construct(self, gradients):
                gradients = self.map_(self.collectives[0], gradients)
                return super(Hidden, self).construct(gradients)  # noqa: UP008

        expected = trained_by_one(lambda net, base=base, args=args: base(net.trainable_params(), *args))

        def make(cls, args=args):
            return lambda net: cls(net.trainable_params(), *args)

        agree(f"plain subclass of {name}", train(make(Attribute), sharded=True), expected)
        try:
            hidden = train(make(Hidden), sharded=True)
        except RuntimeError as error:
            said = str(error)
            assert '@mindspore.jit(backend="ms_backend")' in said, said
            assert not GRAPH, "refused, but in GRAPH mode it runs once"
        else:
            agree(f"hidden subclass of {name}", hidden, expected)
            assert GRAPH, f"{name} ran its body twice in PyNative mode"


SECTIONS = (
    refusals,
    drop_ins,
    sums,
    reducer_in_a_training_cell,
    clipping_inside,
    subclass_of_ours,
    hand_written_loops,
    model_train,
    plain_subclasses,
)
for section in SECTIONS:
    if len(sys.argv) == 2 or section.__name__ in sys.argv[2:]:
        section()
        kf.run_barrier()
end()
