"""Every collective on every dtype against NumPy: `collectives.py graph|pynative all|few`."""

from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
from ending import end
from mindspore import Tensor, nn

import ms_kungfu as kf
from ms_kungfu.ops import KungFuAllGather, KungFuAllReduce, KungFuBroadcast, KungFuReduceScatter, ReduceOp

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FEW = ["float32", "bfloat16", "int64"]
DTYPES = FLOATS + INTEGERS if sys.argv[2] == "all" else FEW


class Calls(nn.Cell):
    """Each primitive on all tensors as a tuple, and on each alone. Compiling it takes as long as there are calls."""

    def __init__(self, primitives, alone):
        super().__init__()
        self.primitives, self.alone = primitives, alone

    def construct(self, *xs):
        results = ()
        for primitive in self.primitives:
            if self.alone:
                for x in xs:
                    results = results + (primitive(x),)
            results = results + primitive(xs)
        return results


def numbers(shape, dtype, rank, salt=0):
    """Values that depend on rank and index, whose sums, products and means are exact in any of the dtypes."""
    count = int(np.prod(shape))
    values = (np.arange(count) * 3 + rank * 5 + salt) % 4 + 1
    if dtype.startswith(("f", "b", "i")):
        values = np.where(np.arange(count) % 3 == 1, -values, values)
    return values.astype("float32" if dtype == "bfloat16" else dtype).reshape(shape)


def tensor(array, dtype):
    return Tensor(array, getattr(ms, dtype))


def array(value):
    return value.astype(ms.float32).asnumpy() if value.dtype == ms.bfloat16 else value.asnumpy()


def rounded(values, dtype):
    if dtype == "bfloat16":
        return Tensor(values.astype(np.float32)).astype(ms.bfloat16).astype(ms.float32).asnumpy()
    return values.astype(dtype)


def reduced(arrays, op, dtype):
    """What NumPy makes of it; 16-bit floats accumulate in float32, integers wrap and a mean of them truncates."""
    wide = np.float32 if dtype in ("float16", "bfloat16") else np.dtype(dtype)
    arrays = [a.astype(wide) for a in arrays]
    if op == ReduceOp.MEAN:
        total = np.sum(arrays, axis=0, dtype=wide)
        if dtype in FLOATS:
            return rounded(total / np.asarray(SIZE, wide), dtype)
        return np.trunc(total.astype(np.float64) / SIZE).astype(dtype)
    function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    result = arrays[0]
    for each in arrays[1:]:
        result = function(result, each, dtype=wide)
    return rounded(result, dtype)


def same(got, expected, what):
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert np.array_equal(array(got), expected), f"rank {RANK} of {SIZE}: {what}: {array(got)}, expected {expected}"


def check(primitives, shapes, dtype, expect):
    """`expect` gives what a primitive makes of the ranks' arrays. The last tensor is a view that isn't contiguous."""
    arrays = [[numbers(shape, dtype, r, i) for r in range(SIZE)] for i, shape in enumerate(shapes)]
    xs = [tensor(each[RANK], dtype) for each in arrays]
    wide = [numbers((2 * SIZE, 2 * SIZE), dtype, r) for r in range(SIZE)]
    arrays.append([a.T[::2] for a in wide])
    xs.append(tensor(wide[RANK], dtype).T[::2])

    alone = dtype == FEW[0]  # what a primitive makes of a form doesn't hang on the dtype
    results = iter(Calls(primitives, alone)(*xs))
    for primitive in primitives:
        wants = [expect(primitive, each) for each in arrays]
        for form in ("alone", "in a tuple") if alone else ("in a tuple",):
            for x, want in zip(xs, wants):
                same(next(results), want, f"{primitive.name} {dtype} {x.shape} {form}")
        for got, want in zip(primitive(tuple(xs)), wants):
            same(got, want, f"{primitive.name} {dtype} outside a cell")


def check_all(dtype):
    shapes = [(3, 5), (), (0, 2), (1031,)]
    root = SIZE - 1
    check(
        tuple(KungFuAllReduce(op, name=f"reduce/{op}") for op in ReduceOp.ALL),
        shapes,
        dtype,
        lambda primitive, arrays: reduced(arrays, primitive.op, dtype),
    )
    check((KungFuBroadcast(root, name="broadcast"),), shapes, dtype, lambda primitive, arrays: arrays[root])
    check((KungFuAllGather(),), [(3, 5), (1,), (0, 2)], dtype, lambda primitive, arrays: np.concatenate(arrays))
    check(
        tuple(KungFuReduceScatter(op) for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)),
        [(3 * SIZE, 5), (SIZE,), (0, 2)],
        dtype,
        lambda primitive, arrays: np.split(reduced(arrays, primitive.op, dtype), SIZE)[RANK],
    )


class Mixed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.all_reduce = KungFuAllReduce(ReduceOp.MAX, name="mixed")

    def construct(self, *xs):
        return self.all_reduce(xs)


def mixed_dtypes():
    dtypes = ["float32", "int64", "float16", "float32", "uint8"]
    # 2**53 + 1 doesn't survive a cast to a float.
    salts = [0, 2**53, 0, 1, 0]
    xs = [tensor(numbers((4,), d, RANK) + np.asarray(s, d), d) for d, s in zip(dtypes, salts)]
    for results in (Mixed()(*xs), KungFuAllReduce(ReduceOp.MAX, name="mixed")(tuple(xs))):
        for got, dtype, salt in zip(results, dtypes, salts):
            arrays = [numbers((4,), dtype, r) + np.asarray(salt, dtype) for r in range(SIZE)]
            same(got, np.max(arrays, axis=0), f"mixed {dtype}")


for each in DTYPES:
    check_all(each)
mixed_dtypes()
kf.run_barrier()
end()
