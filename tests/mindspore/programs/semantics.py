"""What the compiler may not do to a collective, gradients, and mistakes: `semantics.py graph|pynative`."""

from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import ms_kungfu as kf
from ms_kungfu.errors import CollectiveMismatchError
from ms_kungfu.ops import KungFuAllGather, KungFuAllReduce, KungFuBroadcast, KungFuReduceScatter, KungFuResize
from ms_kungfu.ops._sync import broadcast_parameters

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
RANKS = range(SIZE)


def vector(*values):
    return Tensor(np.array(values, np.float32))


def equal(got, expected, what=""):
    assert np.allclose(got.asnumpy(), np.array(expected, np.float32)), (
        f"rank {RANK}: {what}: {got}, expected {expected}"
    )


def raises(kind, text, call):
    try:
        result = call()
        for each in result if isinstance(result, tuple) else (result,):
            each.asnumpy()
    except kind as error:
        said = str(error)
    else:
        said = "nothing was raised"
    assert text in said, f"rank {RANK}: {said}, expected: {text}"


class Twice(nn.Cell):
    def __init__(self, name):
        super().__init__()
        self.all_reduce = KungFuAllReduce(name=name)

    def construct(self, x, y):
        return self.all_reduce(x), self.all_reduce(y)


class Unused(nn.Cell):
    def __init__(self):
        super().__init__()
        self.all_reduce = KungFuAllReduce(name="unused")

    def construct(self, x, y):
        self.all_reduce(x)
        return self.all_reduce(y)


def test_equal_calls_are_not_merged():
    # Only at rank 0 the two calls are equal: were they merged there, its second call would be missing.
    x = vector(1, 2)
    first, second = Twice("twice")(x, x if RANK == 0 else vector(10, 20))
    equal(first, [SIZE, 2 * SIZE])
    equal(second, [1 + 10 * (SIZE - 1), 2 + 20 * (SIZE - 1)])


def test_an_unused_call_still_runs():
    x, y = vector(1, 2), vector(RANK, 3)
    result = Unused()(x, y) if RANK == 0 else Twice("unused")(x, y)[1]
    equal(result, [sum(RANKS), 3 * SIZE])


def test_constants_are_not_folded():
    class Constant(nn.Cell):
        def __init__(self):
            super().__init__()
            self.x = vector(1, 2)
            self.all_reduce = KungFuAllReduce()

        def construct(self):
            return self.all_reduce(self.x)

    net = Constant()
    for _ in range(2):
        equal(net(), [SIZE, 2 * SIZE])


def test_gradients():
    x = vector(*(1.0 + RANK + i for i in range(2 * SIZE)))
    xs = [1.0 + r + np.arange(2 * SIZE) for r in RANKS]
    dout = vector(*(2.0 + RANK * (i + 1) for i in range(2 * SIZE)))
    douts = [2.0 + r * (np.arange(2 * SIZE) + 1) for r in RANKS]
    total, highest, product = sum(douts), np.max(xs, axis=0), np.prod(xs, axis=0)

    def gradient(primitive, weights=dout):
        def loss(x):
            return (primitive(x) * weights).sum()

        results = [ms.grad(loss)(x), ms.jit(ms.grad(loss))(x), ms.jit(ms.value_and_grad(loss))(x)[1]]
        for result in results[1:]:
            equal(result, results[0].asnumpy(), primitive.name)
        return results[0]

    equal(gradient(KungFuAllReduce(name="g/sum")), total)
    equal(gradient(KungFuAllReduce("mean", name="g/mean")), total / SIZE)
    equal(gradient(KungFuAllReduce("max")), total * (xs[RANK] == highest))
    equal(gradient(KungFuAllReduce("min")), total * (xs[RANK] == np.min(xs, axis=0)))
    equal(gradient(KungFuAllReduce("prod")), sum(d * product for d in douts) / xs[RANK])
    equal(gradient(KungFuBroadcast()), douts[RANK])
    # out: SIZE times as long; rank r's part of all ranks' douts comes back, summed
    long = [np.arange(2.0 * SIZE * SIZE) * (r + 1) for r in RANKS]
    equal(
        gradient(KungFuAllGather(), vector(*long[RANK])),
        sum(long).reshape(SIZE, -1)[RANK],
    )
    equal(gradient(KungFuReduceScatter(), dout[:2]), np.concatenate([d[:2] for d in douts]))
    scatter_max = KungFuReduceScatter("max")

    def highest_part(x):
        return scatter_max(x).sum()

    raises(RuntimeError, "sum only", lambda: ms.grad(highest_part)(x))


def test_gradients_of_tuples():
    primitive = KungFuAllReduce(name="g/tuple")

    def loss(x, y):
        a, b = primitive((x, y))
        return (a * (RANK + 1)).sum() + (b * b).sum()

    x, y = vector(1, 2, 3), vector(RANK + 1)
    for grad in (ms.grad(loss, (0, 1)), ms.jit(ms.grad(loss, (0, 1)))):
        dx, dy = grad(x, y)
        equal(dx, [sum(r + 1 for r in RANKS)] * 3)
        equal(dy, [SIZE * 2 * sum(r + 1 for r in RANKS)])


def test_two_branches_of_collectives_in_forward_and_backward():
    class Branch(nn.Cell):
        def __init__(self, name):
            super().__init__()
            self.w = Parameter(vector(*([1.0] * 3)), name=f"w{name}")
            self.all_reduce = KungFuAllReduce("mean", name=name)

        def construct(self, x):
            return self.all_reduce(self.all_reduce(x * self.w) * x)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.a, self.b = Branch("a"), Branch("b")

        def construct(self, x):
            return (self.a(x) + self.b(x + 1)).sum()

    net = Net()
    step = ms.value_and_grad(net, None, net.trainable_params())
    for _ in range(3):
        _, (a, b) = step(vector(1, 2, 3))
        equal(a, [1, 4, 9])
        equal(b, [4, 9, 16])


def test_mismatch_between_ranks_raises_on_all_and_keeps_the_cluster_usable():
    if SIZE == 1:
        return
    all_reduce = KungFuAllReduce(name="mistake")

    def mismatch(*tensors):
        raises(
            RuntimeError,
            'CollectiveMismatchError: the ranks called different operations with the name "mistake"',
            lambda: all_reduce(tensors if len(tensors) > 1 else tensors[0]),
        )
        assert isinstance(kf.last_error(), CollectiveMismatchError)
        equal(all_reduce(vector(RANK)), [sum(RANKS)])

    mismatch(Tensor(np.zeros(3 if RANK == 0 else 4, np.float32)))
    mismatch(Tensor(np.zeros(6, np.float32).reshape((2, 3) if RANK == 0 else (3, 2))))
    mismatch(Tensor(np.zeros(3, np.float32 if RANK == 0 else np.int32)))
    mismatch(vector(1), Tensor(np.zeros(3, np.float32 if RANK == 0 else np.float16)))
    raises(
        RuntimeError,
        f'ValueError: broadcast "unnamed": root {SIZE} is not a rank',
        lambda: KungFuBroadcast(SIZE)(vector(1)),
    )
    equal(all_reduce(vector(RANK)), [sum(RANKS)])


def test_collective_refuses_unsupported_input():
    for dtype in (ms.bool_, ms.complex64):
        raises(TypeError, "supported types: float16", lambda dtype=dtype: KungFuAllReduce()(Tensor(np.ones(3), dtype)))
    raises(ValueError, "can't gather a 0-d tensor", lambda: KungFuAllGather()(Tensor(1.0, ms.float32)))
    if SIZE > 1:
        raises(
            ValueError, f"a multiple of {SIZE}", lambda: KungFuReduceScatter()(Tensor(np.ones(SIZE + 1, np.float32)))
        )
    raises(TypeError, "uint32", lambda: KungFuResize()(Tensor(SIZE, ms.int32)))


def test_resize_to_the_present_size():
    class Resize(nn.Cell):
        def __init__(self):
            super().__init__()
            self.resize = KungFuResize()

        def construct(self, n):
            return self.resize(n)

    for resize in (KungFuResize(), Resize()):
        changed, detached = resize(Tensor(SIZE, ms.uint32))
        assert not changed
        assert not detached


def test_broadcast_into_the_parameters_of_a_compiled_step():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(3, 1, weight_init="ones")
            self.half = Parameter(Tensor(np.ones(5), ms.float16), name="half")
            # What no reduction takes moves all the same.
            self.flags = Parameter(Tensor([True, False, RANK > 0]), name="flags", requires_grad=False)
            self.spectrum = Parameter(Tensor([1j * RANK, 2.0], ms.complex64), name="spectrum", requires_grad=False)
            self.wide = Parameter(Tensor([1j * RANK] * 3, ms.complex128), name="wide", requires_grad=False)

        def construct(self, x):
            return self.dense(x) + self.half.sum().astype(ms.float32)

    net = Net()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
    root = SIZE - 1
    for _ in range(3):
        step(Tensor(np.full((2, 3), RANK + 1.0, np.float32)), Tensor(np.zeros((2, 1), np.float32)))
        params = [*step.get_parameters(), net.flags, net.spectrum, net.wide]
        addresses = [p.data_ptr() for p in params]
        expected = [KungFuBroadcast(root)(p.copy()).asnumpy() for p in params]
        broadcast_parameters(params, root, "state")
        assert [p.data_ptr() for p in params] == addresses
        for param, want in zip(params, expected):
            assert np.array_equal(param.asnumpy(), want), f"rank {RANK}: {param.name}"
        x = np.arange(3, dtype=np.float32).reshape(1, 3)
        out = x @ net.dense.weight.asnumpy().T + net.dense.bias.asnumpy() + net.half.asnumpy().sum()
        assert np.allclose(net(Tensor(x)).asnumpy(), out, atol=1e-2), "the graph doesn't see the new values"
    broadcast_parameters([])


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        kf.run_barrier()
