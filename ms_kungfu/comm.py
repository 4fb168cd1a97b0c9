"""Collectives over NumPy arrays, on the same runtime as the MindSpore primitives.

Every rank calls the same operation under the same `name` with an array of the same shape and dtype; a difference
raises :class:`~ms_kungfu.errors.CollectiveMismatchError` at every rank. Different names may be in flight at once from
different threads. Nothing is copied but into and out of shared memory; the GIL is released. Arrays must be
C-contiguous where they are written to, others are made so.

dtypes: int8 to int64, uint8 to uint64, float16, float32, float64, and bfloat16 as ``ml_dtypes`` defines it. Results
have the same bits on every rank and in every run; 16-bit floats accumulate in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core, runtime

Array = NDArray[Any]

#: ``op`` of the reductions -> number in the C ABI. ``mean`` of integers truncates towards zero.
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3, "prod": 4}
_BFLOAT16 = 9


def _op(op: str) -> int:
    try:
        return OPS[op]
    except KeyError:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}") from None


def _plain(array: Array) -> tuple[Array, int]:
    """The array as the buffer protocol can show it, and its dtype's number in the C ABI (-1: told by the buffer)."""
    # The kind first: NumPy makes up the name anew at each call, which takes longer than a small reduction.
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
        return array.view(np.uint16), _BFLOAT16
    return array, -1


def _output(array: Array, out: Array | None, shape: tuple[int, ...]) -> Array:
    if out is None:
        return np.empty(shape, array.dtype)
    if out.dtype != array.dtype or out.shape != shape:
        raise ValueError(f"out must be {array.dtype}{shape}, got {out.dtype}{out.shape}")
    return out


def all_reduce(array: Array, op: str = "sum", name: str = "unnamed", out: Array | None = None) -> Array:
    """Element-wise `op` (sum, mean, min, max, prod) over all ranks; same shape at every rank.

    Args:
        out: where to put the result; `array` itself for in place. A new array by default.

    Raises:
        ValueError, TypeError: for an op, dtype or `out` that doesn't fit.
        KungFuError: see :mod:`ms_kungfu.errors`.
    """
    runtime.init()
    array = np.ascontiguousarray(array) if not array.flags.c_contiguous else array
    result = _output(array, out, array.shape)
    source, dtype = _plain(array)
    _core.all_reduce(name, source, _plain(result)[0], _op(op), dtype)
    return result


def broadcast(array: Array, root: int = 0, name: str = "unnamed", out: Array | None = None) -> Array:
    """`array` of rank `root` at every rank; elsewhere only shape and dtype of `array` count."""
    runtime.init()
    if root < 0:
        raise ValueError(f"root must be a rank, got {root}")
    array = np.ascontiguousarray(array) if not array.flags.c_contiguous else array
    result = _output(array, out, array.shape)
    source, dtype = _plain(array)
    _core.broadcast(name, source, _plain(result)[0], root, dtype)
    return result


def all_gather(array: Array, name: str = "unnamed") -> Array:
    """The arrays of all ranks, in their order, stacked along a new first axis: shape ``(size, *array.shape)``."""
    runtime.init()
    array = np.ascontiguousarray(array) if not array.flags.c_contiguous else array
    result = np.empty((_core.size(), *array.shape), array.dtype)
    source, dtype = _plain(array)
    _core.all_gather(name, source, _plain(result)[0], dtype)
    return result


def reduce_scatter(array: Array, op: str = "sum", name: str = "unnamed") -> Array:
    """This rank's part of the reduction: shape ``(array.shape[0] / size, *array.shape[1:])``.

    The first axis must be divisible by the number of ranks; rank r gets the r-th part.
    """
    runtime.init()
    size = _core.size()
    if array.ndim == 0 or array.shape[0] % size:
        raise ValueError(f"the first axis of {array.shape} can't be scattered evenly over {size} ranks")
    array = np.ascontiguousarray(array) if not array.flags.c_contiguous else array
    result = np.empty((array.shape[0] // size, *array.shape[1:]), array.dtype)
    source, dtype = _plain(array)
    _core.reduce_scatter(name, source, _plain(result)[0], _op(op), dtype)
    return result


def barrier() -> None:
    """Waits until every rank is here."""
    runtime.run_barrier()
