"""One of the ranks dies in the middle of a collective. Joins a segment directly, without a launcher.

device_death.py TARGET FD RANK SIZE VICTIM FAULT WHERE RECOVERS
"""

from __future__ import annotations

import sys

import device_api as api
import numpy as np
from device_api import Array

from ms_kungfu import _core, _device, errors
from ms_kungfu.membership.reductions import Outcomes

target, where, recovers = sys.argv[1], sys.argv[7], sys.argv[8] == "1"
fd, rank, size, victim = (int(text) for text in sys.argv[2:6])
fault = sys.argv[6]
_core.join(fd, rank, f"127.0.0.1:{10000 + rank}", False, 60, 60)
_device.open_device(target)
api.use_device(rank)
stream = api.Stream()
dtype = "int16" if where == "staging" else "float32"  # which the vendor's libraries don't reduce
NAMES = [f"group/{i}" for i in range(3)]
data = [Array.of((np.arange(100_000) + i) % 7 + 10**rank, dtype, stream) for i in range(len(NAMES))]
out = [Array(100_000, dtype) for _ in NAMES]


def members(i: int) -> list[int]:
    """The participants of group `i`, read from its sum: each rank brings another power of ten."""
    got = out[i].read(stream).astype(np.int64)
    for some in ([0, 1, 2], [r for r in range(size) if r != victim]):
        if (got == len(some) * ((np.arange(100_000) + i) % 7) + sum(10**r for r in some)).all():
            return some
    raise AssertionError(f"rank {rank}, group {i}: neither the sum of all nor that of the survivors: {got[:10]}")


reductions = Outcomes(_core).of_nobody
if rank == victim:
    api.fail(fault)
try:
    for step in range(3):
        api.all_reduce_gradients(NAMES, data, out, "sum", stream)
        print(f"step {step}:", *(members(i) for i in range(len(NAMES))), "of", reductions.take_participants())
except errors.PeerLostError as error:
    assert not recovers and f"rank {victim}" in str(error), error
    print("PeerLostError")
# Nothing of it is under way any more: the stand-in would complain.
for array in (*data, *out):
    array.free()
stream.destroy()
_core.reset()
_core.device_close()
