"""Reduces a step's gradients as MindSpore's kernels do, without MindSpore: several groups with one outcome."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FLOAT32, MEAN = 10, 1


class Tensor(ctypes.Structure):
    _fields_ = (("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("count", ctypes.c_uint64))


class Group(ctypes.Structure):
    """Of c_api.h."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("tensors", ctypes.POINTER(Tensor)), ("num_tensors", ctypes.c_size_t),
        ("dtype", ctypes.c_int), ("layout", ctypes.c_char_p),
    )  # fmt: skip


class Started(ctypes.Structure):
    """Of c_api.h."""

    _fields_ = (("ticket", ctypes.c_uint64), ("tensors", ctypes.POINTER(Tensor)), ("num_tensors", ctypes.c_size_t))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The one that has been joined through _core."""
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libkungfu_runtime" in line
    }
    (path,) = mapped  # two copies would be two peers
    return ctypes.CDLL(path)


def check(status: int) -> None:
    if status:
        library = runtime()
        library.kf_last_error.restype = ctypes.c_char_p
        raise RuntimeError(f"status {status}: {library.kf_last_error().decode()}")


def reduce_together(gradients: Sequence[np.ndarray]) -> None:
    """Each a group of float32 of another size; to their mean over the workers, weighted by samples, in place."""
    tensors = [Tensor(g.ctypes.data, g.ctypes.data, g.size) for g in gradients]
    names = [f"gradients/{g.size}".encode() for g in gradients]
    groups = [Group(name, ctypes.pointer(t), 1, FLOAT32, None) for name, t in zip(names, tensors)]
    together = (Group * len(groups))(*groups)
    check(runtime().kf_all_reduce_gradients(together, ctypes.c_size_t(len(groups)), MEAN))


def reduce_in_background(gradients: Sequence[np.ndarray]) -> None:
    """The same in two halves: all are started, and then waited for."""
    tensors = [Tensor(g.ctypes.data, g.ctypes.data, g.size) for g in gradients]
    started = (Started * len(tensors))()
    for i, tensor in enumerate(tensors):
        name, ticket, one = f"gradients/{tensor.count}".encode(), ctypes.c_uint64(), ctypes.pointer(tensor)
        begun = runtime().kf_start_all_reduce(name, one, ctypes.c_size_t(1), FLOAT32, MEAN, None, ctypes.byref(ticket))
        check(begun)
        started[i] = Started(ticket.value, one, 1)
    check(runtime().kf_wait(started, ctypes.c_size_t(len(tensors))))


MANNERS = {"together": reduce_together, "background": reduce_in_background}
