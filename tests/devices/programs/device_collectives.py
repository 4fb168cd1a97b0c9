"""Every collective over device memory against NumPy: dtypes, operations, counts, several tensors, in place.

device_collectives.py TARGET ENGINE: what kf_device_engine() has to begin with at the end.
"""

from __future__ import annotations

import sys

import device_api as api
import numpy as np
from device_api import Array

import ms_kungfu as kf
from ms_kungfu import _device

target, engine = sys.argv[1:]
stream = api.begin(target)
rank, size = kf.current_rank(), kf.current_cluster_size()
CHUNK = 1 << 16  # bytes; KUNGFU_DEVICE_CHUNK_BYTES


def brought(by: int, count: int, salt: int = 0) -> np.ndarray:
    """Small whole numbers that depend on rank and index: exact in every dtype."""
    return (np.arange(count, dtype=np.int64) * 7 + by * 3 + salt) % 5 + 1


def reduced(op: str, count: int, dtype: str, salt: int = 0) -> np.ndarray:
    each = np.stack([brought(r, count, salt) for r in range(size)]).astype(np.float64)
    whole = {"sum": each.sum(0), "mean": each.mean(0), "min": each.min(0), "max": each.max(0), "prod": each.prod(0)}[op]
    if "int" in dtype:
        return np.trunc(whole).astype(np.int64).astype(dtype)  # products wrap
    return api.values(api.bits(whole, dtype), dtype)


def check(got: np.ndarray, want: np.ndarray, dtype: str, what: str) -> None:
    tolerance = {"bfloat16": 1 / 128, "float16": 1 / 1024}.get(dtype, 1e-6)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert np.allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=0), (what, got, want)


def run(dtype: str, counts: list[int], op: str) -> None:
    inputs = [Array.of(brought(rank, n, i), dtype, stream) for i, n in enumerate(counts)]
    outputs = [Array(n, dtype) for n in counts]
    what = f"{dtype} {op} {counts} rank {rank}"
    api.all_reduce(f"reduce/{dtype}", inputs, outputs, op, stream)
    for i, n in enumerate(counts):
        check(outputs[i].read(stream), reduced(op, n, dtype, i), dtype, "all_reduce " + what)
        assert (inputs[i].read(stream) == api.values(api.bits(brought(rank, n, i), dtype), dtype)).all(), what
    api.all_reduce(f"in place/{dtype}", inputs, inputs, op, stream)
    for i, n in enumerate(counts):
        check(inputs[i].read(stream), reduced(op, n, dtype, i), dtype, "in place " + what)

    wide = [Array.of(brought(rank, n * size, i), dtype, stream) for i, n in enumerate(counts)]
    api.reduce_scatter(f"scatter/{dtype}", wide, outputs, op, stream)
    for i, n in enumerate(counts):
        want = reduced(op, n * size, dtype, i)[rank * n : (rank + 1) * n]
        check(outputs[i].read(stream), want, dtype, "reduce_scatter " + what)
    for array in (*inputs, *outputs, *wide):
        array.free()


def move(dtype: str, counts: list[int]) -> None:
    inputs = [Array.of(brought(rank, n, i), dtype, stream) for i, n in enumerate(counts)]
    outputs = [Array(n, dtype) for n in counts]
    gathered = [Array(n * size, dtype) for n in counts]
    what = f"{dtype} {counts} rank {rank}"
    api.all_gather(f"gather/{dtype}", inputs, gathered, stream)
    root = size - 1
    api.broadcast(f"cast/{dtype}", inputs, outputs, root, stream)
    for i, n in enumerate(counts):
        want = api.values(api.bits(np.concatenate([brought(r, n, i) for r in range(size)]), dtype), dtype)
        assert (gathered[i].read(stream) == want).all(), "all_gather " + what
        want = api.values(api.bits(brought(root, n, i), dtype), dtype)
        assert (outputs[i].read(stream) == want).all(), "broadcast " + what
    api.broadcast(f"cast/{dtype}", inputs, inputs, 0, stream)
    for i, n in enumerate(counts):
        want = api.values(api.bits(brought(0, n, i), dtype), dtype)
        assert (inputs[i].read(stream) == want).all(), "broadcast in place " + what
    for array in (*inputs, *outputs, *gathered):
        array.free()


for dtype in api.DTYPES:
    move(dtype, [5, 0, 33])
    for op in api.OPS:
        run(dtype, [1, 0, 7, 64], op)
# Many chunks, with tensors that end inside of one, and one element over.
chunk = CHUNK // 4
run("float32", [3 * chunk + 1, 17, 7 * chunk], "sum")
run("float32", [chunk], "mean")
move("float32", [2 * chunk + 1, 5 * chunk])
assert _device.engine_in_use().startswith(engine), _device.engine_in_use()
stream.destroy()
kf.finalize()
print(f"rank {rank} of {size} fine")
