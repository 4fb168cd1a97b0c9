"""The C ABI of the device layer for the programs beside this file, and arrays in the device's memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

import ms_kungfu as kf
from ms_kungfu import _core, errors

OPS = ("sum", "mean", "min", "max", "prod")  # in the order of kf_op
# In the order of kf_dtype. NumPy has no bfloat16: its bits travel as uint16.
DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32")
DTYPES += ("float64",)

_lib = ctypes.CDLL(str(Path(_core.__file__).with_name("libkungfu_runtime.so")))
_lib.kf_last_error.restype = ctypes.c_char_p
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 0, 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = [("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("count", ctypes.c_uint64)]


def call(name: str, *args: object) -> None:
    """Calls a function of the C ABI and raises what it fails with."""
    if getattr(_lib, name)(*args) != 0:
        raise errors.from_message(_lib.kf_last_error().decode())


def use_device(index: int) -> None:
    """For this thread."""
    call("kf_device_use", ctypes.c_uint32(index))


def count_devices() -> int:
    count = ctypes.c_uint32()
    call("kf_device_count", ctypes.byref(count))
    return count.value


class Stream:
    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        call("kf_stream_create", ctypes.byref(self.handle))

    def synchronize(self) -> None:
        call("kf_stream_synchronize", self.handle)

    def destroy(self) -> None:
        call("kf_stream_destroy", self.handle)


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` as elements of `dtype`, rounded to the nearest even where they don't fit."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values.astype(dtype))
    word = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


def values(raw: np.ndarray, dtype: str) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else raw


class Array:
    """Elements in the device's memory."""

    def __init__(self, count: int, dtype: str) -> None:
        self.count, self.dtype, self.nbytes = count, dtype, count * itemsize(dtype)
        self.memory = ctypes.c_void_p()
        call("kf_device_malloc", ctypes.byref(self.memory), ctypes.c_uint64(max(self.nbytes, 1)))

    @classmethod
    def of(cls, data: np.ndarray, dtype: str, stream: Stream) -> Array:
        raw = bits(data, dtype)
        array = cls(raw.size, dtype)
        array.write(raw, stream)
        return array

    def write(self, raw: np.ndarray, stream: Stream) -> None:
        call(
            "kf_device_copy", self.memory, raw.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(self.nbytes),
            _TO_DEVICE, stream.handle,
        )  # fmt: skip
        stream.synchronize()

    def copy_from(self, other: Array, stream: Stream) -> None:
        """On the device, without the host waiting for it."""
        call("kf_device_copy", self.memory, other.memory, ctypes.c_uint64(self.nbytes), _ON_DEVICE, stream.handle)

    def read(self, stream: Stream) -> np.ndarray:
        raw = np.empty(self.count, np.uint16 if self.dtype == "bfloat16" else self.dtype)
        call(
            "kf_device_copy", raw.ctypes.data_as(ctypes.c_void_p), self.memory, ctypes.c_uint64(self.nbytes),
            _TO_HOST, stream.handle,
        )  # fmt: skip
        stream.synchronize()
        return values(raw, self.dtype)

    def free(self) -> None:
        call("kf_device_free", self.memory)


def _tensors(inputs: list[Array], outputs: list[Array]) -> ctypes.Array[_Tensor]:
    # An empty tensor may come without memory.
    pairs = [(i.memory, o.memory, i.count) for i, o in zip(inputs, outputs)]
    return (_Tensor * len(pairs))(*pairs)


def tensor_of(host: np.ndarray) -> ctypes.Array[_Tensor]:
    """In place, in the host's memory."""
    memory = host.ctypes.data_as(ctypes.c_void_p)
    return (_Tensor * 1)((memory, memory, host.size))


def _dtype(inputs: list[Array]) -> int:
    return DTYPES.index(inputs[0].dtype)


def all_reduce(name: str, inputs: list[Array], outputs: list[Array], op: str, stream: Stream) -> None:
    tensors = _tensors(inputs, outputs)
    call(
        "kf_device_all_reduce", name.encode(), tensors, ctypes.c_size_t(len(inputs)), _dtype(inputs), OPS.index(op),
        None, stream.handle,
    )  # fmt: skip


def broadcast(name: str, inputs: list[Array], outputs: list[Array], root: int, stream: Stream) -> None:
    tensors = _tensors(inputs, outputs)
    call(
        "kf_device_broadcast", name.encode(), tensors, ctypes.c_size_t(len(inputs)), _dtype(inputs),
        ctypes.c_uint32(root), None, stream.handle,
    )  # fmt: skip


def all_gather(name: str, inputs: list[Array], outputs: list[Array], stream: Stream) -> None:
    tensors = _tensors(inputs, outputs)
    call(
        "kf_device_all_gather", name.encode(), tensors, ctypes.c_size_t(len(inputs)), _dtype(inputs), None,
        ctypes.c_uint32(0), stream.handle,
    )  # fmt: skip


def reduce_scatter(name: str, inputs: list[Array], outputs: list[Array], op: str, stream: Stream) -> None:
    tensors = _tensors(inputs, outputs)
    call(
        "kf_device_reduce_scatter", name.encode(), tensors, ctypes.c_size_t(len(inputs)), _dtype(inputs),
        OPS.index(op), None, ctypes.c_uint32(0), stream.handle,
    )  # fmt: skip


class _Group(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("num_tensors", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("layout", ctypes.c_char_p),
    ]


def all_reduce_gradients(names: list[str], inputs: list[Array], outputs: list[Array], op: str, stream: Stream) -> None:
    """One tensor for each name."""
    tensors = _tensors(inputs, outputs)
    groups = (_Group * len(names))(
        *(
            (name.encode(), ctypes.pointer(tensors[i]), 1, DTYPES.index(inputs[i].dtype), None)
            for i, name in enumerate(names)
        )
    )
    call("kf_device_all_reduce_gradients", groups, ctypes.c_size_t(len(names)), OPS.index(op), stream.handle)


def start_all_reduce(name: str, inputs: list[Array], outputs: list[Array], op: str, stream: Stream) -> int:
    tensors = _tensors(inputs, outputs)
    ticket = ctypes.c_uint64()
    call(
        "kf_device_start_all_reduce", name.encode(), tensors, ctypes.c_size_t(len(inputs)), _dtype(inputs),
        OPS.index(op), None, stream.handle, ctypes.byref(ticket),
    )  # fmt: skip
    return ticket.value


def wait(tickets: list[int]) -> None:
    call("kf_device_wait", (ctypes.c_uint64 * len(tickets))(*tickets), ctypes.c_size_t(len(tickets)))


def fail(spec: str) -> None:
    """Stand-ins only: FUNCTION:N:CODE, counted from now."""
    ctypes.CDLL("libstandin.so").standin_fail(spec.encode())


def begin(target: str) -> Stream:
    """Joins the cluster with the device that belongs to this local rank."""
    segment = os.environ.get("KUNGFU_TEST_SEGMENT")  # of tests/devices/ranks.py, else under kungfu-run
    if segment is not None:
        fd, rank = (int(text) for text in segment.split(":"))
        _core.join(fd, rank, f"127.0.0.1:{10000 + rank}", False, 60, 60)
    kf.init(device=target)
    local_rank = kf.current_rank() if segment is not None else kf.current_local_rank()
    use_device(local_rank % count_devices())
    return Stream()
