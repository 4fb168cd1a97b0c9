"""One rank that goes through many cluster versions, each with a team of the vendor's library of its own.

device_rebuilds.py TARGET VERSIONS
"""

from __future__ import annotations

import os
import sys

import device_api as api
import numpy as np
from device_api import Array

from ms_kungfu import _core, _device

target, versions = sys.argv[1], int(sys.argv[2])
stream = api.begin(target)
data = Array.of(np.arange(1000), "float32", stream)
out = Array(1000, "float32")
for version in range(2, 2 + versions):
    fd = _core.create_segment(1, version, 1)
    _core.join(fd, 0, "127.0.0.1:10000", True, 60, 60)
    os.close(fd)
    for op in ("sum", "mean"):
        api.all_reduce("rebuilt", [data], [out], op, stream)
        assert (out.read(stream) == np.arange(1000)).all(), (version, op)
    assert "staging" not in _device.engine_in_use(), _device.engine_in_use()
data.free()
out.free()
stream.destroy()
_core.reset()
_core.device_close()
print(f"{versions} versions fine")
