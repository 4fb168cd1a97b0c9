"""Collectives over NumPy arrays, on the same runtime as the MindSpore primitives.

Every rank calls the same operation under the same `name` with an array of the same shape and dtype; a difference
raises :class:`~ms_kungfu.errors.CollectiveMismatchError` at every rank. Different names may be in flight at once from
different threads. Nothing is copied but into and out of shared memory; the GIL is released.

What is brought is whatever ``np.asarray`` takes: arrays of any layout, numbers, lists, tensors of MindSpore. A masked
array is refused, as its mask would be lost. `out` is a C-contiguous array, the input itself or apart from it.

dtypes of reductions: int8 to int64, uint8 to uint64, float16, float32, float64, and bfloat16 as ``ml_dtypes`` defines
it; of what only moves (broadcast, all_gather, save) besides these every one without objects. Results have the same bits
on every rank and in every run; 16-bit floats accumulate in float32. Sums and products of integers are of the input's
dtype and wrap in it, as ``a + b`` of NumPy's arrays does: uint8 200 + 100 is 44. (``np.sum`` takes a wider dtype
by itself; do so before the call.) A mean of integers doesn't overflow; it truncates towards zero, where ``np.mean``
gives a float.

Ctrl-C, or another signal whose handler raises, ends a collective that waits, if it is called on Python's main thread:
the exception is raised within 20 ms. This process has finished with its cluster then: later calls raise
CollectiveAbortedError. So do the other workers' (or, with ``-recover``, they go on without this one as soon as it has
ended).
"""

from __future__ import annotations

import itertools
import json
import weakref
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import runtime
from .errors import InternalError
from .membership import check_caught_up, current

if TYPE_CHECKING:  # numpy.typing takes as long as a tenth of NumPy
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[Any]
else:
    Array = np.ndarray

#: ``op`` of the reductions -> number in the C ABI. ``mean`` of integers truncates towards zero.
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3, "prod": 4}
_UINT8, _BFLOAT16 = 1, 9
_NUMBERS = frozenset("bBhHiIlLqQefd")  # what the buffer protocol tells and the runtime computes with, as NumPy's chars


def _op(op: str) -> int:
    try:
        return OPS[op]
    except KeyError:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}") from None


def _begin(name: str) -> None:
    """Before a collective. KungFuError at a joining worker whose collective the other workers don't come to; those of
    ms_kungfu itself bring it to them."""
    runtime.init()
    if current().catching_up and not name.startswith("kungfu/"):
        check_caught_up(f'collective "{name}"')


def _input(value: ArrayLike) -> Array:
    """What was brought as a C-contiguous array in the machine's byte order."""
    if type(value) is not np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("the mask of a masked array would be lost; bring array.filled(...), or data and mask apart")
        value = np.asarray(value)
    if not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return value


def _reducible(array: Array) -> tuple[Array, int]:
    """The array as the buffer protocol can show it, and its dtype's number in the C ABI (-1: told by the buffer)."""
    if array.dtype.char in _NUMBERS:
        return array, -1
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), _BFLOAT16
    raise TypeError(
        f"no reduction takes an array of {array.dtype}; (u)int8 to 64, float16, bfloat16, float32 and float64 work"
    )


def _movable(array: Array) -> tuple[Array, int, str]:
    """The same for what only moves; what isn't a number to the runtime goes as bytes under its dtype's name."""
    if array.dtype.char in _NUMBERS or array.dtype.name == "bfloat16":
        return (*_reducible(array), "")
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} can't be shared")
    return array.reshape(-1).view(np.uint8), _UINT8, f"{array.dtype}{array.shape} in bytes "


def _output(array: Array, out: Array | None) -> Array:
    if out is None:
        return np.empty(array.shape, array.dtype)
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out must be an array of NumPy's, got {type(out).__name__}")
    if out.dtype != array.dtype or out.shape != array.shape:
        raise ValueError(f"out must be {array.dtype}{array.shape}, got {out.dtype}{out.shape}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out must be C-contiguous and not read-only, got one with\n{out.flags}")
    return out


def all_reduce(array: ArrayLike, op: str = "sum", name: str = "unnamed", out: Array | None = None) -> Array:
    """Element-wise `op` (sum, mean, min, max, prod) over all ranks; same shape at every rank.

    What a rank brings that dies meanwhile is in the result of all survivors or of none, and a mean is that of those
    whose part is in it (docs/recovery.md).

    Args:
        out: where to put the result; `array` itself for in place. A new array by default.

    Raises:
        ValueError, TypeError: for an op, dtype or `out` that doesn't fit, or an `out` that overlaps `array` in part.
        KungFuError: see :mod:`ms_kungfu.errors`. PeerLostError where a rank dies and nobody goes on (``-recover``).
    """
    _begin(name)
    array = _input(array)
    source, dtype = _reducible(array)
    result = _output(array, out)
    current().core.all_reduce(name, source, _reducible(result)[0], _op(op), dtype)
    return result


class Handle:
    """An all-reduce that goes on in the background: what `all_reduce_async` returns."""

    def __init__(self, name: str, ticket: int, output: Array) -> None:
        self._name, self._ticket, self._output = name, ticket, output
        self._is_over = False
        self._failure: BaseException | None = None

    def wait(self) -> Array:
        """The result, once it is there; the same one at a second call. Raises what :func:`all_reduce` does, at a second
        call again."""
        if not self._is_over:
            self._is_over = True  # its ticket is good for one wait
            output, dtype = _reducible(self._output)
            _started.pop(self._name, None)
            try:
                current().core.wait(self._ticket, output, dtype)
            except BaseException as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure
        return self._output


_started: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()  # and not waited for


def all_reduce_async(array: ArrayLike, op: str = "sum", name: str | None = None) -> Handle:
    """As :func:`all_reduce`, in the background: returns at once, and ``.wait()`` of what it returns has the result.

    `array` is copied, so it may change meanwhile. Operations begin in the order of these calls, which is the same at
    all ranks; one thread runs them, beside collectives of the caller's. Each is waited for at every rank, before the
    cluster changes (a `step_end`, a `resize`). Ctrl-C is looked at when a wait is over. Without a name it has the first
    of a list that is free, so as many as one likes may be under way, started and waited for in one order at all ranks.

    Raises:
        ValueError: while another one of that name hasn't been waited for, or for an op that doesn't fit.
        TypeError: for a dtype that doesn't fit.
    """
    _begin(name or "unnamed")
    array, number = _input(array), _op(op)
    source, dtype = _reducible(array)
    if name is None:
        name = next(each for k in itertools.count(1) if (each := f"unnamed {k}") not in _started)
    if name in _started:
        raise ValueError(f'an all-reduce "{name}" is under way; wait for it first, or give this one another name')
    result = np.empty(array.shape, array.dtype)
    ticket = current().core.start_all_reduce(name, source, _reducible(result)[0], number, dtype)
    handle = _started[name] = Handle(name, ticket, result)
    return handle


def broadcast(array: ArrayLike, root: int = 0, name: str = "unnamed", out: Array | None = None) -> Array:
    """`array` of rank `root` at every rank; elsewhere only shape and dtype of `array` count.

    Raises:
        ValueError, TypeError: for a root that is no rank, or a dtype or `out` that doesn't fit.
        PeerLostError: at every survivor, where the root dies before all of its data is there. An `out` then holds what
            has come of it; the next collective works. `ms_kungfu.agreement.told_by_one` asks another root.
    """
    _begin(name)
    if root < 0:
        raise ValueError(f"root must be a rank, got {root}")
    array = _input(array)
    source, dtype, kind = _movable(array)
    result = _output(array, out)
    current().core.broadcast(name, source, _movable(result)[0], root, dtype, kind)
    return result


def all_gather(array: ArrayLike, name: str = "unnamed") -> Array:
    """The arrays of all ranks, in their order, stacked along a new first axis: shape ``(size, *array.shape)``.

    In the place of a rank that has died, and counts until the next cluster version, are zeros: the same at every
    survivor, and not to be told from zeros that were brought. `ms_kungfu.agreement.gather_living` tells who took part.
    """
    _begin(name)
    array = _input(array)
    source, dtype, kind = _movable(array)
    result = np.empty((current().core.size(), *array.shape), array.dtype)
    current().core.all_gather(name, source, _movable(result)[0], dtype, kind)
    return result


def reduce_scatter(array: ArrayLike, op: str = "sum", name: str = "unnamed") -> Array:
    """This rank's part of the reduction: shape ``(array.shape[0] / size, *array.shape[1:])``.

    The first axis must be divisible by the number of ranks; rank r gets the r-th part. A rank that has died brings
    nothing to any part, a mean is that of those who took part, and the dead rank's own part is nobody's: the survivors'
    parts don't make up the whole then.

    Raises:
        ValueError, TypeError: for an op or dtype that doesn't fit, or a first axis that can't be scattered evenly.
        KungFuError: see :func:`all_reduce`.
    """
    _begin(name)
    array, size = _input(array), current().core.size()
    source, dtype = _reducible(array)
    if array.ndim == 0 or array.shape[0] % size:
        raise ValueError(f"the first axis of {array.shape} can't be scattered evenly over {size} ranks")
    result = np.empty((array.shape[0] // size, *array.shape[1:]), array.dtype)
    current().core.reduce_scatter(name, source, _reducible(result)[0], _op(op), dtype)
    return result


def barrier() -> None:
    """Wait until every rank that lives is here. A joining worker passes, as in `ms_kungfu.run_barrier`."""
    runtime.run_barrier()


class Saved(NamedTuple):
    """What a rank has saved under a name."""

    value: Array
    version: int
    """How many times it has saved under this name, from 1."""


def save(name: str, array: ArrayLike) -> int:
    """Keep a copy of `array` for the other workers to :func:`request`; returns its version, from 1.

    Not collective, and nobody is waited for. The latest version of each name is kept for as long as this process lives,
    in shared memory, twice as large as the array. Up to 256 names a process.

    Raises:
        ValueError: where `name` had another shape or dtype before, or is longer than 127 bytes.
    """
    runtime.init()
    array = _input(array)
    return current().core.save(name, _layout(array), array.reshape(-1).view(np.uint8))


def request(rank: int, name: str) -> Saved | None:
    """A copy of what rank `rank` has saved latest under `name`; None where it has saved nothing yet, or has ended.

    Not collective: the other worker isn't stopped, nor asked. The copy is whole, whatever that worker does meanwhile,
    and so it is if that worker dies meanwhile. Versions that are requested of a worker never go back. Of a worker on
    another host it comes over the network; where that host is lost meanwhile, the worker has ended.

    Raises:
        ValueError: where there is no such rank, or an optimizer has saved its model under that name.
        CollectiveTimeoutError: where the owner saves again and again before a copy is made, or its host doesn't answer
            within KUNGFU_COLLECTIVE_TIMEOUT and isn't lost either.
        StaleClusterError: where the rank is on another host, and the cluster changes before the copy is here.
    """
    runtime.init()
    if rank < 0:
        raise ValueError(f"rank must be at least 0, got {rank}")
    layout, nbytes, version = current().core.describe_saved(rank, name)
    if version == 0:
        return None
    kind, _, shape = layout.partition(" ")
    if not shape.startswith("["):
        raise ValueError(f'rank {rank} has saved a "{layout}" under "{name}", not an array')
    value = np.empty(json.loads(shape), _dtype(kind))
    if value.nbytes != nbytes:
        raise InternalError(f'"{name}" of rank {rank} has {nbytes} bytes, which are no {layout}')
    version = current().core.request(rank, name, layout, value.reshape(-1).view(np.uint8))
    return Saved(value, version) if version else None


def _layout(array: Array) -> str:
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} can't be shared")
    return f"{array.dtype.name if array.dtype.name == 'bfloat16' else array.dtype.str} {json.dumps(array.shape)}"


def _dtype(kind: str) -> Any:
    if kind != "bfloat16":
        return np.dtype(kind)
    try:  # NumPy has none; whoever has saved one has one of these
        return np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError:
        return np.dtype(import_module("mindspore.common.np_dtype").bfloat16)
