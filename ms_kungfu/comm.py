"""Collectives over NumPy arrays, on the same runtime as the MindSpore primitives.

Every rank calls the same operation under the same `name` with an array of the same shape and dtype.
A difference raises :class:`~ms_kungfu.errors.CollectiveMismatchError` at every rank. Different
threads may have operations of different names in flight at once. Data is copied only into and out
of shared memory, and the GIL is released.

The input is whatever ``np.asarray`` takes: arrays of any layout, numbers, lists, tensors of
MindSpore. A masked array is rejected, as its mask would be lost. `out` is a C-contiguous array: the
input itself, or one that doesn't overlap it.

Reductions take int8 to int64, uint8 to uint64, float16, float32, float64, and bfloat16 as
``ml_dtypes`` defines it. Operations that only move data (broadcast, all_gather, save) take every
dtype without objects.

Results have the same bits on every rank and in every run. 16-bit floats accumulate in float32. Sums
and products of integers have the input's dtype and wrap in it, as ``a + b`` of NumPy's arrays does:
uint8 200 + 100 is 44. (``np.sum`` takes a wider dtype by itself; convert before the call.) A mean
of integers doesn't overflow. It truncates towards zero, unlike ``np.mean``, which gives a float.

Ctrl-C, or another signal whose handler raises, ends a waiting collective on Python's main thread:
the exception is raised within 20 ms. This process has finished with its cluster then, and later
calls raise CollectiveAbortedError. So do the other workers' calls; with ``-recover`` those go on
without this process as soon as it has ended.
"""

from __future__ import annotations

import itertools
import json
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from . import runtime
from ._packing import decode, dtype_of, encode, layout_of
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
# types that the buffer protocol describes and the runtime computes with, as NumPy's chars
_NUMBERS = frozenset("bBhHiIlLqQefd")


def _op(op: str) -> int:
    try:
        return OPS[op]
    except KeyError:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}") from None


def _begin(name: str) -> None:
    """Prepare a collective.

    Raises:
        KungFuError: at a joining worker, for a collective that the other workers don't come to. The
            collectives of ms_kungfu itself bring it to them.
    """
    runtime.init()
    if current().catching_up and not name.startswith("kungfu/"):
        check_caught_up(f'collective "{name}"')


def _input(value: ArrayLike) -> Array:
    """Return the input as a C-contiguous array in the machine's byte order."""
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
    """Return the array as the buffer protocol can show it, and its dtype's number in the C ABI.

    The number is -1 if the buffer itself shows the dtype.
    """
    if array.dtype.char in _NUMBERS:
        return array, -1
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), _BFLOAT16
    raise TypeError(
        f"no reduction takes an array of {array.dtype}; (u)int8 to 64, float16, bfloat16, float32 and float64 work"
    )


def _movable(array: Array) -> tuple[Array, int, str]:
    """Return the same for operations that only move data, and a name of the layout.

    A dtype without a number in the runtime travels as bytes under its name.
    """
    if array.dtype.char in _NUMBERS or array.dtype.name == "bfloat16":
        return (*_reducible(array), "")
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} can't be shared; `comm.all_gather_object` collects objects")
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
    """Reduce an array element by element over all ranks.

    If a rank fails meanwhile, its input is in the result of all survivors or of none. A mean is that of
    the ranks whose input is in it (docs/recovery.md).

    Args:
        array: this rank's input, of the same shape and dtype at every rank.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        name: matches the call with those of the other ranks.
        out: the array for the result; `array` itself for in place. A new array by default.

    Returns:
        The result, of the shape and dtype of `array`, with the same bits at every rank.

    Raises:
        ValueError: for an unknown `op`, or an `out` that doesn't fit or overlaps `array` in part.
        TypeError: for a dtype or an `out` that doesn't fit.
        KungFuError: see :mod:`ms_kungfu.errors`. It is PeerLostError if a rank fails and the job
            doesn't go on (``-recover``).
    """
    _begin(name)
    array = _input(array)
    source, dtype = _reducible(array)
    result = _output(array, out)
    current().core.all_reduce(name, source, _reducible(result)[0], _op(op), dtype)
    return result


class Handle:
    """A running all-reduce in the background, as `all_reduce_async` returns it.

    Args:
        name: of the operation.
        ticket: the runtime's number of the operation; good for one wait.
        output: the array that the result is written to.
    """

    def __init__(self, name: str, ticket: int, output: Array) -> None:
        self._name, self._ticket, self._output = name, ticket, output
        self._is_over = False
        self._failure: BaseException | None = None

    def wait(self) -> Array:
        """Wait for the result.

        Returns:
            The result. A second call returns the same array.

        Raises:
            KungFuError: as :func:`all_reduce` does. A second call raises it again.
        """
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
    """Start an all-reduce in the background.

    The call returns at once. Operations begin in the order of these calls, which is the same at all
    ranks. One thread runs them, beside collectives of the caller's. Each is waited for at every rank,
    before the cluster changes (a `step_end`, a `resize`). Ctrl-C takes effect when a wait is over.

    Args:
        array: this rank's input, of the same shape and dtype at every rank. It is copied, so it may
            change meanwhile.
        op: as in :func:`all_reduce`.
        name: matches the call with those of the other ranks. By default the first unused of a list of
            names. So any number of operations may be under way, if all ranks start and wait for them in
            one order.

    Returns:
        A handle, whose ``wait()`` returns the result.

    Raises:
        ValueError: for an unknown `op`, or while another operation of that name hasn't been waited for.
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
    """Copy the array of rank `root` to every rank.

    Args:
        array: the data at the root. At other ranks only its shape and dtype count, which are the same
            at every rank.
        root: the rank whose data is sent.
        name: matches the call with those of the other ranks.
        out: the array for the result; `array` itself for in place. A new array by default.

    Returns:
        The root's data, of the shape and dtype of `array`.

    Raises:
        ValueError: for a root that is no rank, or an `out` that doesn't fit.
        TypeError: for a dtype or an `out` that doesn't fit.
        PeerLostError: at every survivor, if the root fails before all of its data has arrived. An `out`
            then holds the part that did, and the next collective works.
            `ms_kungfu.agreement.told_by_one` asks another root.
    """
    _begin(name)
    if root < 0:
        raise ValueError(f"root must be a rank, got {root}")
    array = _input(array)
    source, dtype, kind = _movable(array)
    result = _output(array, out)
    current().core.broadcast(name, source, _movable(result)[0], root, dtype, kind)
    return result


@overload
def all_gather(array: ArrayLike, name: str = "unnamed", uneven: Literal[False] = False) -> Array: ...


@overload
def all_gather(array: ArrayLike, name: str = "unnamed", *, uneven: Literal[True]) -> list[Array]: ...


def all_gather(array: ArrayLike, name: str = "unnamed", uneven: bool = False) -> Array | list[Array]:
    """Collect the arrays of all ranks, in their order.

    A failed rank counts until the next cluster version. Its entry is zeros, the same at every survivor,
    and not to be distinguished from zeros that a rank brought. `ms_kungfu.agreement.gather_living`
    returns which ranks took part.

    With `uneven` the entry of a failed rank has length 0. The ranks first exchange their lengths, and
    each of the entries travels as long as the longest one.

    Args:
        array: this rank's input, of the same shape and dtype at every rank.
        name: matches the call with those of the other ranks.
        uneven: whether the first axis may have another length at each rank. The same at every rank.

    Returns:
        The arrays, stacked along a new first axis, of shape ``(size, *array.shape)``. With `uneven` a
        list of them by rank, of shapes ``(length, *array.shape[1:])``; ``np.concatenate`` joins them.

    Raises:
        TypeError: for a dtype that doesn't fit.
        ValueError: for a number, which has no first axis, with `uneven`.
        KungFuError: see :func:`all_reduce`.
    """
    array = _input(array)
    if uneven:
        if array.ndim == 0:
            raise ValueError(f"all_gather(uneven=True) takes arrays with a first axis, got {array.dtype}()")
        kind = f"{array.dtype}(*{''.join(f', {length}' for length in array.shape[1:])}) in bytes "
        parts = _gather_bytes(_movable(array)[0].reshape(-1).view(np.uint8), array.shape[0], name, kind)
        empty = np.empty((0, *array.shape[1:]), array.dtype)
        return [empty if part is None else _part(*part, like=array) for part in parts]
    _begin(name)
    source, dtype, kind = _movable(array)
    result = np.empty((current().core.size(), *array.shape), array.dtype)
    current().core.all_gather(name, source, _movable(result)[0], dtype, kind)
    return result


def _part(length: int, content: Array, like: Array) -> Array:
    return content.view(like.dtype).reshape(length, *like.shape[1:])


def _gather_bytes(
    content: Array, count: int, name: str, kind: str, limit: int | None = None
) -> list[tuple[int, Array] | None]:
    """Return each rank's count and bytes, None for a failed rank; collective.

    Every rank brings at first how much it brings, then its bytes, up to the most that a rank brings. In front are the
    numbers again, which are zero for a rank that has failed meanwhile.

    Args:
        content: uint8.
        count: of whatever the bytes stand for.
        name: of the operation.
        kind: compared between the ranks.
        limit: ValueError at every rank if one brings more bytes.
    """
    head = np.array([content.size + 1, count], np.int64)
    sizes = all_gather(head, name=f"{name}/lengths")[:, 0] - 1
    longest = int(sizes.max())
    if limit is not None and longest > limit:
        raise ValueError(
            f'"{name}": rank {int(sizes.argmax())} brings {longest} bytes, at most {limit} are allowed; '
            "send large arrays by all_gather(uneven=True)"
        )
    row = np.zeros(head.nbytes + longest, np.uint8)
    row[: head.nbytes] = head.view(np.uint8)
    row[head.nbytes : head.nbytes + content.size] = content
    rows = np.empty((current().core.size(), row.size), np.uint8)
    current().core.all_gather(name, row, rows, _UINT8, kind)
    heads = rows[:, : head.nbytes].copy().view(np.int64)
    return [
        (int(number), each[head.nbytes : head.nbytes + int(size) - 1].copy()) if size else None
        for (size, number), each in zip(heads, rows)
    ]


#: The most bytes that a rank brings to `all_gather_object`.
MAX_OBJECT_BYTES = 16 << 20


def all_gather_object(value: Any, name: str = "unnamed") -> list[Any]:
    """Collect an object of each rank, in their order.

    An object is None, a number, text, bytes or an array of NumPy's, or lists and dicts of objects. It
    travels as msgpack, never as a pickle: no rank can run code at another one.

    Args:
        value: this rank's object, of at most 16 MiB as msgpack. A tuple or set arrives as a list, a
            scalar of NumPy's as a number.
        name: matches the call with those of the other ranks.

    Returns:
        The objects by rank. That of a rank that has failed is None.

    Raises:
        TypeError: for an object of another type.
        OverflowError: for an integer of more than 64 bits.
        ValueError: at every rank, if one brings more than 16 MiB.
        KungFuError: see :func:`all_reduce`.
    """
    content = np.frombuffer(encode(value), np.uint8)
    parts = _gather_bytes(content, 1, name, "object in bytes ", MAX_OBJECT_BYTES)
    return [None if part is None else decode(part[1].tobytes()) for part in parts]


def reduce_scatter(array: ArrayLike, op: str = "sum", name: str = "unnamed") -> Array:
    """Reduce an array over all ranks, and return this rank's part of the result.

    A failed rank contributes to no part, and a mean is that of the ranks that took part. No rank gets
    the failed rank's own part, so the survivors' parts don't make up the whole then.

    Args:
        array: this rank's input, of the same shape and dtype at every rank. Its first axis must be
            divisible by the number of ranks.
        op: as in :func:`all_reduce`.
        name: matches the call with those of the other ranks.

    Returns:
        At rank r, part r of the result, of shape ``(array.shape[0] / size, *array.shape[1:])``.

    Raises:
        ValueError: for an unknown `op`, or a first axis that can't be scattered evenly.
        TypeError: for a dtype that doesn't fit.
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
    """Wait until every living rank is here.

    A joining worker passes, as in `ms_kungfu.run_barrier`.
    """
    runtime.run_barrier()


class Saved(NamedTuple):
    """A copy of what a rank has saved under a name."""

    value: Array
    """The array, of the shape and dtype that were saved."""
    version: int
    """How many times the rank has saved under this name, from 1."""


def save(name: str, array: ArrayLike) -> int:
    """Keep a copy of an array for the other workers to :func:`request`.

    Not collective, and it waits for no other worker. The latest version of each name is kept for as
    long as this process lives, in shared memory, in twice the size of the array. A process may save up
    to 256 names.

    Args:
        name: at most 127 bytes.
        array: what to keep; each name keeps its shape and dtype.

    Returns:
        The version, which is how many times this process has saved under the name, from 1.

    Raises:
        ValueError: if `name` had another shape or dtype before, or is longer than 127 bytes.
        TypeError: for a dtype with objects.
    """
    runtime.init()
    array = _input(array)
    return current().core.save(name, layout_of(array), array.reshape(-1).view(np.uint8))


def request(rank: int, name: str) -> Saved | None:
    """Return a copy of what a rank has saved latest under a name.

    Not collective: the other worker is neither stopped nor asked. The copy is whole, whatever that
    worker does meanwhile, its failure included. The versions that are requested of a worker never go
    back. From a worker on another host the copy comes over the network. If that host is lost meanwhile,
    the worker has ended.

    Args:
        rank: whose array.
        name: under which it was saved.

    Returns:
        The copy and its version, or None if the rank has saved nothing yet or has ended.

    Raises:
        ValueError: if there is no such rank, or an optimizer has saved its model under that name.
        CollectiveTimeoutError: if the owner saves again and again before a copy is made. Also if its
            host doesn't answer within KUNGFU_COLLECTIVE_TIMEOUT and isn't lost either.
        StaleClusterError: if the rank is on another host, and the cluster changes before the copy is
            here.
        InternalError: if the copy doesn't fit the shape and dtype that it was saved with.
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
    value = np.empty(json.loads(shape), dtype_of(kind))
    if value.nbytes != nbytes:
        raise InternalError(f'"{name}" of rank {rank} has {nbytes} bytes, which are no {layout}')
    version = current().core.request(rank, name, layout, value.reshape(-1).view(np.uint8))
    return Saved(value, version) if version else None
