"""Reduces a step's gradients as MindSpore's kernels do, without MindSpore: several groups with one outcome.

The library is the one that has been joined through _core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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


def check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.kf_last_error.restype = ctypes.c_char_p
        raise RuntimeError(f"status {status}: {library.kf_last_error().decode()}")


def reduce_together(library: ctypes.CDLL, gradients: Sequence[np.ndarray]) -> None:
    """Each a group of float32 of another size; to their mean over the workers, weighted by samples, in place."""
    tensors = [Tensor(g.ctypes.data, g.ctypes.data, g.size) for g in gradients]
    names = [f"gradients/{g.size}".encode() for g in gradients]
    groups = [Group(name, ctypes.pointer(t), 1, FLOAT32, None) for name, t in zip(names, tensors)]
    together = (Group * len(groups))(*groups)
    check(library, library.kf_all_reduce_gradients(together, ctypes.c_size_t(len(groups)), MEAN))


def reduce_in_background(library: ctypes.CDLL, gradients: Sequence[np.ndarray]) -> None:
    """The same in two halves: all are started, and then waited for."""
    tensors = [Tensor(g.ctypes.data, g.ctypes.data, g.size) for g in gradients]
    started = (Started * len(tensors))()
    for i, tensor in enumerate(tensors):
        name, ticket, one = f"gradients/{tensor.count}".encode(), ctypes.c_uint64(), ctypes.pointer(tensor)
        begun = library.kf_start_all_reduce(name, one, ctypes.c_size_t(1), FLOAT32, MEAN, None, ctypes.byref(ticket))
        check(library, begun)
        started[i] = Started(ticket.value, one, 1)
    check(library, library.kf_wait(started, ctypes.c_size_t(len(tensors))))


MANNERS = {"together": reduce_together, "background": reduce_in_background}
