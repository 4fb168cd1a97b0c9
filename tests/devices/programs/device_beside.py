"""Our GPU plugin beside MindSpore's own, on CUDA 11's real libraries, with a GPU or without.

device_beside.py FOLDER: where libcudart.so.11.0 is.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np

import ms_kungfu as kf
from ms_kungfu import _core
from ms_kungfu.ops import KungFuAllReduce

OURS = ("AllGather", "AllReduce", "AllReduceGradients", "AllReduceStart", "AllReduceWait", "Broadcast")
OURS += ("BroadcastInPlace", "Cluster", "ReduceScatter", "RequestModel", "Resize", "SaveModel")

ms.set_device("GPU")
assert ms.get_context("device_target") == "GPU"

plugin = ctypes.CDLL(str(Path(_core.__file__).parent / "plugins" / ms.__version__ / "libkungfu_ms_gpu.so"))
plugin.kungfu_ms_make.restype = ctypes.c_void_p
for name in OURS:
    assert plugin.kungfu_ms_make(f"KungFu{name}".encode()), f"MindSpore's factory knows no KungFu{name}"
for name in ("Assign", "MatMul", "ApplyMomentum"):
    assert plugin.kungfu_ms_make(name.encode()), f"the factory is not MindSpore's: it knows no {name}"
assert not plugin.kungfu_ms_make(b"KungFuNothing")

try:
    total = KungFuAllReduce()(ms.Tensor(np.arange(5, dtype=np.float32))).asnumpy()
except ImportError as error:  # after the layer has opened both libraries
    without_gpu = "no GPU device can be used: cudaGetDeviceCount: "
    assert without_gpu in str(error), error
    print(error)
else:
    assert (total == np.arange(5)).all()
    kf.finalize()

loaded = set(re.findall(r"\S*/lib(?:cudart|nccl|mindspore_gpu)\S*", Path("/proc/self/maps").read_text()))
print(*sorted(loaded), sep="\n")
assert [path for path in loaded if "libcudart" in path] == [os.path.realpath(f"{sys.argv[1]}/libcudart.so.11.0")], (
    loaded
)
assert sum("libnccl" in path for path in loaded) == 1, loaded
print("fine")
