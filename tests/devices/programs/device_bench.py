"""Staging's all-reduce beside what bounds it: the copies to and from the host, and the reduction on the host.

device_bench.py TARGET MEGABYTES: prints one line of JSON at rank 0. All figures are the bytes of the tensor by the
time of the slowest rank, with all ranks at work at once, the best of some rounds each.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Callable

import device_api as api
import numpy as np
from device_api import Array

import ms_kungfu as kf
from ms_kungfu import _device, comm

target, nbytes = sys.argv[1], int(sys.argv[2]) << 20
stream = api.begin(target)
rank, size = kf.current_rank(), kf.current_cluster_size()
chunk = int(os.environ.get("KUNGFU_DEVICE_CHUNK_BYTES", 4 << 20))
count = nbytes // 4
data = Array.of(np.arange(count, dtype=np.float32) % 1024 + rank, "float32", stream)
out = Array(count, "float32")
pinned = ctypes.c_void_p()
api.call("kf_device_malloc_host", ctypes.byref(pinned), ctypes.c_uint64(nbytes))
host = np.frombuffer((ctypes.c_char * nbytes).from_address(pinned.value or 0), np.float32)
host[:] = 1


def slowest(body: Callable[[], None], rounds: int = 5) -> float:
    """GB/s."""
    best = float("inf")
    for _ in range(rounds + 1):
        comm.barrier()
        began = time.perf_counter()
        body()
        took = np.array([time.perf_counter() - began])
        best = min(best, float(comm.all_reduce(took, op="max", name="took")[0]))
    return nbytes / best / 1e9


def copy(kind: int) -> None:
    to, source = (data.memory, pinned) if kind == 0 else (pinned, data.memory)
    for at in range(0, nbytes, chunk):
        call = (ctypes.c_void_p(to.value + at), ctypes.c_void_p(source.value + at))
        api.call("kf_device_copy", *call, ctypes.c_uint64(min(chunk, nbytes - at)), kind, stream.handle)
    stream.synchronize()


def reduce_on_host() -> None:
    step = chunk // 4
    for at in range(0, count, step):
        part = host[at : at + step]
        api.call(
            "kf_all_reduce", b"bench/host", api.tensor_of(part), ctypes.c_size_t(1), api.DTYPES.index("float32"), 3,
            None,
        )  # fmt: skip


def reduce() -> None:
    api.all_reduce("bench/device", [data], [out], "sum", stream)


figures = {
    "device_to_host": slowest(lambda: copy(1)),
    "host_to_device": slowest(lambda: copy(0)),
    "host_reduction": slowest(reduce_on_host),
}
data.write(np.arange(count, dtype=np.float32) % 1024 + rank, stream)
figures["staging_all_reduce"] = slowest(reduce)
want = (np.arange(count, dtype=np.float32) % 1024) * size + sum(range(size))
assert (out.read(stream) == want).all()
bound = min(figures["device_to_host"], figures["host_to_device"], figures["host_reduction"])
if rank == 0:
    result = {name: round(figure, 3) for name, figure in figures.items()}
    result.update(
        unit="GB/s", bytes=nbytes, ranks=size, chunk_bytes=chunk, engine=_device.engine_in_use(),
        share_of_bound=round(figures["staging_all_reduce"] / bound, 3),
    )  # fmt: skip
    print(json.dumps(result), flush=True)
api.call("kf_device_free_host", pinned)
data.free()
out.free()
kf.finalize()
