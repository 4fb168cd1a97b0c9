"""Every collective of ms_kungfu.comm against NumPy. Each rank knows what the others bring."""

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, elastic

rank, size = kf.current_rank(), kf.current_cluster_size()
DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
REDUCTIONS = {
    "sum": lambda xs: np.sum(xs, axis=0, dtype=xs.dtype),
    "min": lambda xs: np.min(xs, axis=0),
    "max": lambda xs: np.max(xs, axis=0),
    "prod": lambda xs: np.prod(xs, axis=0, dtype=xs.dtype),
}
CHUNK = 256 << 10  # bytes; see segment.h


def brought(r, shape, dtype):
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + r * 13) % 4 + 1).astype(dtype).reshape(shape)


def everyone(shape, dtype):
    return np.stack([brought(r, shape, dtype) for r in range(size)])


def check(got, expected, *what):
    assert got.dtype == expected.dtype, (what, got.dtype, expected.dtype)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert np.array_equal(got, expected), (rank, what, got, expected)


def mean(xs):
    if xs.dtype.kind in "iu":
        return (np.sum(xs, axis=0, dtype=np.int64) // size).astype(xs.dtype)
    wide = np.float32 if xs.dtype == np.float16 else xs.dtype.type
    return (np.sum(xs, axis=0, dtype=wide) / wide(size)).astype(xs.dtype)


for dtype in map(np.dtype, DTYPES):
    for shape in [(0,), (), (1,), (3, 5), (1001,), (CHUNK // dtype.itemsize + 1,)]:
        mine, xs = brought(rank, shape, dtype), everyone(shape, dtype)
        for op, reference in {**REDUCTIONS, "mean": mean}.items():
            expected = np.asarray(reference(xs), dtype)
            check(comm.all_reduce(mine, op=op, name="r"), expected, "all_reduce", dtype, shape, op)
            out = np.empty_like(mine)
            assert comm.all_reduce(mine, op=op, name="r", out=out) is out
            check(out, expected, "out", dtype, shape, op)
            in_place = mine.copy()
            comm.all_reduce(in_place, op=op, name="r", out=in_place)
            check(in_place, expected, "in place", dtype, shape, op)
        for root in range(size):
            check(comm.broadcast(mine, root=root, name="b"), xs[root], "broadcast", dtype, shape, root)
        check(comm.all_gather(mine, name="g"), xs, "all_gather", dtype, shape)
        rows = brought(rank, (size * 2, *shape), dtype)
        summed = np.sum(everyone((size * 2, *shape), dtype), axis=0, dtype=dtype)
        check(comm.reduce_scatter(rows, op="sum", name="s"), summed[rank * 2 : rank * 2 + 2], "reduce_scatter", dtype)

# What isn't an array yet, and other byte orders.
check(comm.all_reduce(5, name="n"), np.asarray(5 * size), "a number")
check(comm.all_reduce([1, 2.5], op="mean", name="n"), np.array([1, 2.5]), "a list")
check(comm.all_gather(rank, name="n"), np.arange(size), "a number, gathered")
check(comm.reduce_scatter(range(size), name="n"), np.array([rank * size]), "a range")
check(comm.all_reduce(np.arange(3, dtype=">f4"), name="n"), np.arange(3, dtype=np.float32) * size, "big-endian")
# What only moves may be of any dtype.
for moved in (np.array([True, False, rank > 0]), np.array(1j * rank), np.array([["a", "bcd"]]), np.zeros((0, 2), bool),
              np.array(rank, "M8[s]"), np.array([(rank, 2.0)], [("a", "i2"), ("b", "f8")])):  # fmt: skip
    root = comm.broadcast(moved, root=size - 1, name="m")
    check(comm.all_gather(moved, name="m")[-1], root, "any dtype")
    assert (root.dtype, root.shape) == (moved.dtype, moved.shape)
    if rank == size - 1:
        check(root, moved, "any dtype")

# Parts of different length, and objects.
for dtype in map(np.dtype, (*DTYPES, "bool", "U3")):
    for inner in ((), (3,), (2, 0)):
        parts = comm.all_gather(np.full((2 * r + 1 if (r := rank) else 0, *inner), rank, dtype), name="u", uneven=True)
        for r, part in enumerate(parts):
            check(part, np.full((2 * r + 1 if r else 0, *inner), r, dtype), "uneven", dtype, inner)
objects = comm.all_gather_object(
    {"rank": rank, "x": [np.arange(rank), "s" * rank, None, b"b", np.float32(1)]}, name="o"
)
for r, each in enumerate(objects):
    check(each["x"].pop(0), np.arange(r), "array in an object")
    assert each == {"rank": r, "x": ["s" * r, None, b"b", 1.0]}, each

# Sums wrap in their own dtype, as arithmetic of NumPy's arrays does; means don't overflow, and truncate.
for dtype in map(np.dtype, ("int8", "uint8", "int32", "uint32", "int64", "uint64")):
    for value in (np.iinfo(dtype).max, np.iinfo(dtype).min):
        brings = np.full(3, value, dtype)
        wrapped = brings.copy()
        for _ in range(1, size):
            wrapped = wrapped + brings
        check(comm.all_reduce(brings, name="wraps"), wrapped, "wraps", dtype, value)
        check(comm.all_reduce(brings, op="mean", name="wraps"), brings, "mean", dtype, value)

# The mean of a number over the workers, each with a weight; some have no number.
others = list(range(1, size))
assert elastic.mean(rank) == sum(range(size)) / size
assert elastic.mean(rank, rank) == (sum(r * r for r in others) / sum(others) if others else None)
assert elastic.mean([np.full((1,), rank), "more"] if rank else None, 2) == (
    sum(others) / len(others) if others else None
)
assert elastic.mean(None) is None

# A view that isn't contiguous, and Fortran order.
wide = brought(rank, (6, 8), np.float32)
check(comm.all_reduce(wide[:, ::2], name="v"), everyone((6, 8), np.float32)[:, :, ::2].sum(axis=0), "view")
check(comm.all_reduce(wide.T, name="v"), everyone((6, 8), np.float32).sum(axis=0).T.copy(), "transposed")

# The same bits at every rank, and again in the next run of the operation.
noise = np.random.default_rng(rank).standard_normal(100_003).astype(np.float32)
first = comm.all_reduce(noise, op="mean", name="bits")
assert comm.all_reduce(noise, op="mean", name="bits").tobytes() == first.tobytes()
assert all(row.tobytes() == first.tobytes() for row in comm.all_gather(first, name="bits"))

comm.barrier()
print(f"rank {rank} of {size} fine")
