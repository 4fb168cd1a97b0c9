"""MindSpore's kernels for a device, made by MindSpore's factory and launched on the stand-ins.

device_kernels.py TARGET FOLDER: where what launches a kernel is, and the plugin for GPUs; the one for Ascend is the
package's.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import device_api as api
import mindspore
import numpy as np
from device_api import Array

import ms_kungfu as kf
from ms_kungfu import _core

target, folder = sys.argv[1], Path(sys.argv[2])
stream = api.begin(target)
rank, size = kf.current_rank(), kf.current_cluster_size()
if target == "Ascend":
    ctypes.CDLL(str(folder / "libmindspore_ops_ascend.so"))  # the double
plugins = Path(_core.__file__).parent / "plugins" / mindspore.__version__ if target == "Ascend" else folder
plugin = ctypes.CDLL(str(plugins / f"libkungfu_ms_{target.lower()}.so"))
plugin.kungfu_ms_make.restype = ctypes.c_void_p
plugin.kungfu_ms_version.restype = ctypes.c_char_p
assert plugin.kungfu_ms_version().decode() == mindspore.__version__
launcher = ctypes.CDLL(str(folder / "liblaunch.so"))


class Tensor(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("count", ctypes.c_int64), ("dtype", ctypes.c_char_p)]


def launch(name: str, attributes: str, inputs: list[Array], outputs: list[Array]) -> None:
    kernel = plugin.kungfu_ms_make(name.encode())
    assert kernel, f"MindSpore's factory knows no {name}"

    def tensors(arrays: list[Array]) -> ctypes.Array[Tensor]:
        return (Tensor * len(arrays))(*((a.memory, a.count, dtypes.get(id(a), a.dtype).encode()) for a in arrays))

    message = ctypes.create_string_buffer(4096)
    failed = launcher.launch(
        ctypes.c_void_p(kernel), name.encode(), attributes.encode(), tensors(inputs), ctypes.c_size_t(len(inputs)),
        tensors(outputs), ctypes.c_size_t(len(outputs)), stream.handle, message, ctypes.c_size_t(4096),
    )  # fmt: skip
    if failed:
        raise RuntimeError(message.value.decode())


dtypes: dict[int, str] = {}
index = np.arange(60, dtype=np.float32)
total = index * size + 100 * sum(range(size))


def mine(dtype: str = "float32") -> Array:
    return Array.of(index + 100 * rank, dtype, stream)


a, b, c = mine(), mine("int16"), mine()
outs = [Array(60, "float32"), Array(60, "int16"), Array(60, "float32")]
launch("KungFuAllReduce", "channel=reduce;op=sum", [a, b, c], outs)
assert all((out.read(stream) == total).all() for out in outs)
launch("KungFuAllReduceGradients", "channel=g;op=mean;names=[g,h;group_of=[#0,#1", [a, c], [outs[0], outs[2]])
assert all(np.allclose(out.read(stream), total / size) for out in (outs[0], outs[2]))

wide = Array(60 * size, "float32")
launch("KungFuAllGather", "channel=gather", [a], [wide])
assert (wide.read(stream) == np.concatenate([index + 100 * r for r in range(size)])).all()
part = Array(60 // size, "float32")
launch("KungFuReduceScatter", "channel=scatter;op=sum", [a], [part])
assert (part.read(stream) == np.split(total, size)[rank]).all()
launch("KungFuBroadcast", "channel=cast;root=#1", [a], [outs[0]])
assert (outs[0].read(stream) == index + 100).all()
assert (a.read(stream) == index + 100 * rank).all()
parameter = mine()
launch("KungFuBroadcastInPlace", "channel=parameters;root=#1", [parameter], [parameter])
assert (parameter.read(stream) == index + 100).all()

# In two halves: results, gradients and tickets into the wait, which gives them out in place.
tickets = [Array(1, "uint64"), Array(1, "uint64")]
launch("KungFuAllReduceStart", "channel=one;op=sum", [a], [outs[0], tickets[0]])
launch("KungFuAllReduceStart", "channel=two;op=sum", [c], [outs[2], tickets[1]])
everything = [outs[0], outs[2], a, c, *tickets]
launch("KungFuAllReduceWait", "num_tensors=[#1,#1", everything, everything)
assert (outs[0].read(stream) == total).all()
assert (outs[2].read(stream) == total).all()

# The model store: the others' as they were saved; one's own if no rank has saved under the name.
version, source = Array(1, "int64"), Array(2, "int64")
for times in (1, 2):
    model = Array.of(index * times + 100 * rank, "float32", stream)
    launch("KungFuSaveModel", "record=model", [model, b], [version])
    assert version.read(stream)[0] == times
kf.run_barrier()
neighbour = "neighbour=round-robin;seed=#0;prefetch=!"
launch("KungFuRequestModel", f"record=model;{neighbour}", [a, b], [outs[0], outs[1], source])
theirs = (rank + 1) % size
assert source.read(stream).tolist() == [theirs, 2]
assert (outs[0].read(stream) == index * 2 + 100 * theirs).all()
assert (outs[1].read(stream) == index + 100 * theirs).all()
launch("KungFuRequestModel", f"record=nothing;{neighbour}", [a, b], [outs[0], outs[1], source])
assert source.read(stream).tolist() == [-1, 0]
assert (outs[0].read(stream) == index + 100 * rank).all()

version, ranks = Array(1, "int64"), Array(1, "int64")
launch("KungFuCluster", "", [], [version, ranks])
assert (version.read(stream)[0], ranks.read(stream)[0]) == (kf.cluster_version(), size)

# The present size changes nothing, another one is refused, as there is no config server.
wanted, changed, detached = Array.of(np.array([size]), "uint32", stream), Array(1, "uint8"), Array(1, "uint8")
dtypes[id(changed)] = dtypes[id(detached)] = "bool"
launch("KungFuResize", "", [wanted], [changed, detached])
assert not changed.read(stream)[0]
assert not detached.read(stream)[0]
wanted.write(np.array([size + 1], np.uint32), stream)
for name, attributes, inputs, outputs, text in (
    ("KungFuResize", "", [wanted], [changed, detached], "ResizeError: resizing needs a config server"),
    ("KungFuAllReduce", "channel=x;op=average", [a], [outs[0]], 'InternalError: no reduction is called "average"'),
    ("KungFuBroadcast", "channel=x;root=#9", [a], [outs[0]], "ValueError: broadcast"),
    (
        "KungFuAllReduceWait",
        "num_tensors=[#1",
        [outs[0], a, tickets[0]],
        [outs[0], a, tickets[0]],
        "no started all-reduce",
    ),
    ("KungFuAllGather", "channel=gather", [a], [outs[0]], "StaleClusterError: KungFuAllGather"),
):
    try:
        launch(name, attributes, inputs, outputs)
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text} was not raised")
kf.finalize()
print(f"rank {rank} fine")
