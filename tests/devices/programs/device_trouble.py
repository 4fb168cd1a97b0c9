"""A device that fails at one rank: a typed error at every rank, and the next operation goes through.

device_trouble.py TARGET
"""

from __future__ import annotations

import sys

import device_api as api
import numpy as np
from device_api import Array

import ms_kungfu as kf
from ms_kungfu import errors

target = sys.argv[1]
stream = api.begin(target)
rank, size = kf.current_rank(), kf.current_cluster_size()
names = {
    "GPU": {"malloc": ("cudaMalloc", 2), "copy": ("cudaMemcpyAsync", 700), "reduce": ("ncclAllReduce", 1)},
    "Ascend": {"malloc": ("aclrtMalloc", 207001), "copy": ("aclrtMemcpyAsync", 507011), "reduce": ("HcclAllReduce", 4)},
}[target]
names["health"] = ("ncclCommGetAsyncError", 6) if target == "GPU" else ("HcclGetCommAsyncError", 21)
data = Array.of(np.arange(5000) + rank, "float32", stream)
small = Array.of(np.arange(5000) % 7 + rank, "int16", stream)  # which no vendor's library reduces
want = np.arange(5000, dtype=np.float32) * size + size * (size - 1) // 2
out, small_out = Array(5000, "float32"), Array(5000, "int16")


def reduce() -> None:
    api.all_reduce("reduce", [data], [out], "sum", stream)
    assert (out.read(stream) == want).all()


def stage() -> None:
    api.all_reduce("stage", [small], [small_out], "max", stream)
    assert (small_out.read(stream) == np.arange(5000) % 7 + size - 1).all()


def in_place() -> None:
    again = Array.of(np.arange(5000) + rank, "float32", stream)
    if rank == 1:
        api.fail(f"{names['malloc'][0]}:1:{names['malloc'][1]}")
    api.all_reduce("in place", [again], [again], "sum", stream)


def expect(body, *texts: str, within: int = 1) -> None:
    for _ in range(within):
        try:
            body()
        except errors.DeviceError as error:
            for text in texts:
                assert text in str(error), (text, str(error))
            return
    raise AssertionError(f"{texts} was not reported at rank {rank}")


reduce()
stage()
for what, body in (("reduce", reduce), ("health", reduce), ("copy", stage)):
    function, code = names[what]
    for n in (1, 2) if what == "health" else (1,):
        if rank == 1:
            api.fail(f"{function}:{n}:{code}")
        where = f'all_reduce "{body.__name__}": ' if what != "copy" else "all_reduce"
        expect(body, where, "rank 1: ", str(code), within=n)  # an operation that ends at once asks only once
        body()  # on a new team, where it had one
expect(in_place, "rank 1: ")

# This rank alone; no other has to know of it.
try:
    Array(1 << 20, "float64")
except errors.DeviceError as error:
    assert "out of memory" in str(error), error
    assert "Malloc of 8388608 bytes" in str(error), error
else:
    raise AssertionError("there is no end of memory")
reduce()
stream.destroy()
kf.finalize()
print(f"rank {rank} fine")
