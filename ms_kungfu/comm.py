"""Collectives over NumPy arrays, on the same runtime as the MindSpore primitives.

Every rank calls the same operation under the same `name` with an array of the same shape and dtype; a difference
raises :class:`~ms_kungfu.errors.CollectiveMismatchError` at every rank. Different names may be in flight at once from
different threads. Nothing is copied but into and out of shared memory; the GIL is released. Arrays must be
C-contiguous where they are written to, others are made so.

dtypes: int8 to int64, uint8 to uint64, float16, float32, float64, and bfloat16 as ``ml_dtypes`` defines it. Results
have the same bits on every rank and in every run; 16-bit floats accumulate in float32.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _core, runtime
from .errors import InternalError

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


class Saved(NamedTuple):
    """What a rank has saved under a name."""

    value: Array
    version: int
    """How many times it has saved under this name, from 1."""


def save(name: str, array: Array) -> int:
    """Keep a copy of `array` for the other workers to :func:`request`; returns its version, from 1.

    Not collective, and nobody is waited for. The latest version of each name is kept for as long as this process lives,
    in shared memory, twice as large as the array. Up to 256 names a process.

    Raises:
        ValueError: where `name` had another shape or dtype before, or is longer than 127 bytes.
    """
    runtime.init()
    array = np.ascontiguousarray(array) if not array.flags.c_contiguous else array
    return _core.save(name, _layout(array), array.reshape(-1).view(np.uint8))


def request(rank: int, name: str) -> Saved | None:
    """A copy of what rank `rank` has saved latest under `name`; None where it has saved nothing yet, or has ended.

    Not collective: the other worker isn't stopped, nor asked. The copy is whole, whatever that worker does meanwhile,
    and so it is if that worker dies meanwhile. Versions that are requested of a worker never go back.

    Raises:
        ValueError: where there is no such rank, or an optimizer has saved its model under that name.
        CollectiveTimeoutError: where the owner saves again and again before a copy is made.
    """
    runtime.init()
    if rank < 0:
        raise ValueError(f"rank must be at least 0, got {rank}")
    layout, nbytes, version = _core.describe_saved(rank, name)
    if version == 0:
        return None
    kind, _, shape = layout.partition(" ")
    if not shape.startswith("["):
        raise ValueError(f'rank {rank} has saved a "{layout}" under "{name}", not an array')
    value = np.empty(json.loads(shape), _dtype(kind))
    if value.nbytes != nbytes:
        raise InternalError(f'"{name}" of rank {rank} has {nbytes} bytes, which are no {layout}')
    version = _core.request(rank, name, layout, value.reshape(-1).view(np.uint8))
    return Saved(value, version) if version else None


def _layout(array: Array) -> str:
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} can't be shared")
    return f"{array.dtype.name if array.dtype.name == 'bfloat16' else array.dtype.str} {json.dumps(array.shape)}"


def _dtype(kind: str) -> Any:
    if kind == "bfloat16":
        return np.dtype(import_module("ml_dtypes").bfloat16)  # whoever has saved one has it
    return np.dtype(kind)
