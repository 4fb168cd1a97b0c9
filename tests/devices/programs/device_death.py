"""One of the ranks dies in the middle of a collective. Joins a segment directly, without a launcher.

device_death.py TARGET FD RANK SIZE VICTIM FAULT KIND
"""

from __future__ import annotations

import sys
import time

import device_api as api
import numpy as np
from device_api import Array

from ms_kungfu import _core, _device, errors

target, kind = sys.argv[1], sys.argv[7]
fd, rank, size, victim = (int(text) for text in sys.argv[2:6])
fault = sys.argv[6]
_core.join(fd, rank, f"127.0.0.1:{10000 + rank}", False, 60, 60)
_device.open_device(target)
api.use_device(rank)
stream = api.Stream()
dtype = "int16" if kind == "staging" else "float32"  # which the vendor's libraries don't reduce
data = Array.of(np.arange(200_000) % 7 + rank, dtype, stream)
out = Array(200_000, dtype)
if rank == victim:
    api.fail(fault)
began = time.monotonic()
try:
    for _ in range(3):
        api.all_reduce("death", [data], [out], "sum", stream)
except errors.PeerLostError as error:
    assert f"rank {victim}" in str(error), error
    # Nothing of it is under way any more: the stand-in would complain.
    data.free()
    out.free()
    stream.destroy()
    _core.reset()
    _core.device_close()
    print(f"rank {rank}: PeerLostError after {time.monotonic() - began:.1f} s")
