"""Reduces a step's gradients as MindSpore's kernels do, without MindSpore: several groups with one outcome."""

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
