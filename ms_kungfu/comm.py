"""Collectives over NumPy arrays, on the same runtime as the MindSpore primitives.

Every rank must call the same operation under the same `name`, with an array of the same shape and
dtype. If the calls don't match, every rank raises
:class:`~ms_kungfu.errors.CollectiveMismatchError`. Different threads may run operations with
different names at the same time. Data is copied only into and out of shared memory. The GIL is
released during an operation.

The input can be anything that ``np.asarray`` accepts: arrays of any layout, numbers, lists,
MindSpore tensors. A masked array is rejected, because its mask would be lost. `out` must be a
C-contiguous array: either the input itself or an array that doesn't overlap the input.

Reductions accept int8 to int64, uint8 to uint64, float16, float32, float64, and bfloat16 from
``ml_dtypes``. Operations that only move data (broadcast, all_gather, save) accept every dtype that
contains no Python objects.

Results are bitwise identical on every rank and in every run. 16-bit floats are summed in float32.
Sums and products of integers have the input's dtype and wrap around, like ``a + b`` of NumPy
arrays. For example, 200 + 100 in uint8 is 44. (``np.sum`` uses a wider dtype. If you need a wider
dtype, convert the array before the call.) A mean of integers doesn't overflow, and truncates
towards zero, unlike ``np.mean``, which returns a float.

If a collective waits in Python's main thread, Ctrl-C, or any other signal whose handler raises an
exception, ends the collective within 20 ms. Afterwards, this process can't communicate with its
cluster, and its later calls raise CollectiveAbortedError. The other workers' calls raise
CollectiveAbortedError too. With ``-recover``, the other workers continue as soon as this process
has ended.
"""

from __future__ import annotations

import itertools
import json
import weakref
from typing import TYPE_CHECKING, Any, Callable, Literal, NamedTuple, overload

import numpy as np

from . import runtime
from ._arrays import OPS as OPS
from ._arrays import UINT8, movable, native_input, number_of_op, output_like, reducible
from ._packing import decode, dtype_of, encode, layout_of
from .errors import InternalError
from .membership import check_caught_up, current

if TYPE_CHECKING:  # importing numpy.typing takes time
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[Any]
else:
    Array = np.ndarray


def _begin(name: str) -> None:
    """Prepare a collective.

    Raises:
        KungFuError: on a joining worker that hasn't caught up, if the collective isn't one of
            ms_kungfu's internal collectives.
    """
    member = current()
    if not member.begun:
        runtime.init()
    if member.catching_up and not name.startswith("kungfu/"):
        check_caught_up(f'collective "{name}"')


def all_reduce(array: ArrayLike, op: str = "sum", name: str = "unnamed", out: Array | None = None) -> Array:
    """Reduce an array element by element over all ranks.

    If a rank fails during the call, its input is either in the results of all survivors or in none of
    them. A mean is taken over the ranks whose input is in the result (docs/recovery.md).

    Args:
        array: this rank's input, of the same shape and dtype on every rank.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        name: the name that matches this rank's call with the other ranks' calls.
        out: the array for the result. Pass `array` itself to reduce in place. By default, the result is
            a new array.

    Returns:
        The result, with the shape and dtype of `array`. It is bitwise identical on every rank.

    Raises:
        ValueError: if `op` is unknown, if `out` has a different shape or dtype than `array`, or if
            `out` partly overlaps `array`.
        TypeError: if the dtype isn't supported, or if `out` isn't a NumPy array.
        KungFuError: see :mod:`ms_kungfu.errors`. For example, PeerLostError if a rank fails in a
            job without ``-recover``.
    """
    _begin(name)
    array = native_input(array)
    source, dtype = reducible(array)
    result = output_like(array, out)
    current().core.all_reduce(name, source, result if dtype < 0 else reducible(result)[0], number_of_op(op), dtype)
    return result


class AllReduce:
    """An all-reduce whose arguments are checked once and that runs many times.

    An `AllReduce` is like a persistent request in MPI. Create ``operation = AllReduce(array, result,
    name="loss")`` once, then call ``operation()`` in each step. A call takes a few microseconds less
    than :func:`all_reduce`, which matters for arrays of a few bytes. Every rank must call
    an `AllReduce` or :func:`all_reduce`, with the same name and with an array of the same shape and
    dtype.
    The object stays valid after a change of the cluster.

    Args:
        array: this rank's input, a C-contiguous NumPy array of the same shape and dtype on every rank.
            Each call reads the array's current elements.
        out: the array for the result. Pass `array` itself to reduce in place. By default, the result is
            a new array.
        op: as in :func:`all_reduce`.
        name: the name that matches this rank's calls with the other ranks' calls.

    Attributes:
        out: the array for the result.

    Raises:
        ValueError: if `op` is unknown, if `array` is strided or byte-swapped, or if `out` partly
            overlaps `array`. Also if `out` has a different shape or dtype than `array`.
        TypeError: if the dtype isn't supported, or if `array` or `out` isn't a NumPy array.
    """

    def __init__(self, array: Array, out: Array | None = None, op: str = "sum", name: str = "unnamed") -> None:
        if not isinstance(array, np.ndarray) or native_input(array) is not array:
            kind = "one that is strided or byte-swapped" if isinstance(array, np.ndarray) else type(array).__name__
            raise (ValueError if isinstance(array, np.ndarray) else TypeError)(
                f"array must be a C-contiguous NumPy array in native byte order, got {kind}"
            )
        source, dtype = reducible(array)
        self.out: Array = output_like(array, out)
        self._name = name
        operation = current().core.PreparedAllReduce(name, source, reducible(self.out)[0], number_of_op(op), dtype)
        self._run: Callable[[], None] = operation.run

    def __call__(self) -> Array:
        """Reduce the array's current elements over all ranks.

        Returns:
            `out`, which is bitwise identical on every rank.

        Raises:
            KungFuError: as in :func:`all_reduce`.
        """
        _begin(self._name)
        self._run()
        return self.out


class Handle:
    """An all-reduce in the background, which `all_reduce_async` has started.

    Args:
        name: the name of the operation.
        ticket: the number that the runtime has assigned to the operation, valid for one wait.
        output: the array to which the result is written.
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
            KungFuError: as in :func:`all_reduce`. A second call raises the same error again.
        """
        if not self._is_over:
            self._is_over = True  # the ticket is valid for one wait
            output, dtype = reducible(self._output)
            _started.pop(self._name, None)
            try:
                current().core.wait(self._ticket, output, dtype)
            except BaseException as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure
        return self._output


# The handles on which no caller has waited yet, by name.
_started: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()


def all_reduce_async(array: ArrayLike, op: str = "sum", name: str | None = None) -> Handle:
    """Start an all-reduce in the background.

    The call returns immediately. Operations begin in the order in which this rank starts them. This
    order must be the same on all ranks. One background thread runs the operations, concurrently
    with the caller's other collectives. Every rank must wait for each operation before the cluster
    changes (in `step_end` or `resize`). During a wait, Ctrl-C takes effect only when the wait ends.

    Args:
        array: this rank's input, of the same shape and dtype on every rank. The call copies the data,
            so the caller may modify `array` afterwards.
        op: as in :func:`all_reduce`.
        name: the name that matches this rank's call with the other ranks' calls. By default, the
            operation gets the first unused name of ``unnamed 1``, ``unnamed 2`` and so on. Any
            number of operations may run at the same time if all ranks start and await these
            operations in the same order.

    Returns:
        A handle, whose ``wait()`` returns the result.

    Raises:
        ValueError: if `op` is unknown, or if this process hasn't waited for an earlier operation with
            that name.
        TypeError: if the dtype isn't supported.
    """
    _begin(name or "unnamed")
    array, number = native_input(array), number_of_op(op)
    source, dtype = reducible(array)
    if name is None:
        name = next(each for k in itertools.count(1) if (each := f"unnamed {k}") not in _started)
    if name in _started:
        raise ValueError(
            f'an all-reduce "{name}" is still running; wait for it first, or give this all-reduce another name'
        )
    result = np.empty(array.shape, array.dtype)
    ticket = current().core.start_all_reduce(name, source, reducible(result)[0], number, dtype)
    handle = _started[name] = Handle(name, ticket, result)
    return handle


def broadcast(array: ArrayLike, root: int = 0, name: str = "unnamed", out: Array | None = None) -> Array:
    """Copy the array of rank `root` to every rank.

    Args:
        array: on the root, the data to send. On other ranks, only the shape and the dtype are used,
            which must be the same on every rank.
        root: the rank whose data is sent.
        name: the name that matches this rank's call with the other ranks' calls.
        out: the array for the result. Pass `array` itself to copy in place. By default, the result is a
            new array.

    Returns:
        The root's data, with the shape and dtype of `array`.

    Raises:
        ValueError: if `root` isn't a rank, or if `out` has a different shape or dtype than `array`.
        TypeError: if the dtype isn't supported, or if `out` isn't a NumPy array.
        PeerLostError: if the root fails before all of its data has arrived. Every survivor raises it.
            `out` then contains only the data that arrived. The next collective works.
            `ms_kungfu.agreement.told_by_one` retries with another root.
    """
    _begin(name)
    if root < 0:
        raise ValueError(f"root must be a rank, got {root}")
    array = native_input(array)
    source, dtype, kind = movable(array)
    result = output_like(array, out)
    current().core.broadcast(name, source, movable(result)[0], root, dtype, kind)
    return result


@overload
def all_gather(array: ArrayLike, name: str = "unnamed", uneven: Literal[False] = False) -> Array: ...


@overload
def all_gather(array: ArrayLike, name: str = "unnamed", *, uneven: Literal[True]) -> list[Array]: ...


def all_gather(array: ArrayLike, name: str = "unnamed", uneven: bool = False) -> Array | list[Array]:
    """Collect the arrays of all ranks, in rank order.

    The result includes failed ranks until the next cluster version. The entry of a failed rank contains
    zeros on every survivor. A living rank may also send zeros, so use
    `ms_kungfu.agreement.gather_living` to find out which ranks took part.

    With `uneven`, the entry of a failed rank has length 0. The ranks first exchange the lengths of
    their entries. Each rank then sends its entry, padded to the length of the longest entry.

    Args:
        array: this rank's input, of the same shape and dtype on every rank.
        name: the name that matches this rank's call with the other ranks' calls.
        uneven: whether the length of the first axis may differ between ranks. Pass the same value on
            every rank.

    Returns:
        The arrays, stacked along a new first axis, with shape ``(size, *array.shape)``. With `uneven`,
        a list of arrays by rank, with shapes ``(length, *array.shape[1:])``; ``np.concatenate`` joins
        them.

    Raises:
        TypeError: if the dtype isn't supported.
        ValueError: with `uneven`, if `array` is a scalar, which has no first axis.
        KungFuError: see :func:`all_reduce`.
    """
    array = native_input(array)
    if uneven:
        if array.ndim == 0:
            raise ValueError(
                f"all_gather(uneven=True) requires an array with at least one dimension, got {array.dtype}()"
            )
        kind = f"{array.dtype}(*{''.join(f', {length}' for length in array.shape[1:])}) in bytes "
        parts = _gather_bytes(movable(array)[0].reshape(-1).view(np.uint8), array.shape[0], name, kind)
        empty = np.empty((0, *array.shape[1:]), array.dtype)
        return [empty if part is None else _part(*part, like=array) for part in parts]
    _begin(name)
    source, dtype, kind = movable(array)
    result = np.empty((current().core.size(), *array.shape), array.dtype)
    current().core.all_gather(name, source, movable(result)[0], dtype, kind)
    return result


def _part(length: int, content: Array, like: Array) -> Array:
    return content.view(like.dtype).reshape(length, *like.shape[1:])


def _gather_bytes(
    content: Array, count: int, name: str, kind: str, limit: int | None = None
) -> list[tuple[int, Array] | None]:
    """Collect a count and bytes from each rank. Return them by rank, with None for a failed rank.

    This function is a collective. Every rank first sends two numbers, its count and its number of
    bytes. It then sends the two numbers again, followed by its bytes, which are padded to the largest
    number of bytes that any rank sends. If a rank fails between the two messages, its second message
    contains only zeros.

    Args:
        content: this rank's bytes, as uint8.
        count: the number of items that the bytes contain.
        name: the name of the operation.
        kind: a string that must be the same on all ranks.
        limit: the maximum number of bytes. If a rank sends more, every rank raises ValueError.
    """
    head = np.array([content.size + 1, count], np.int64)
    sizes = all_gather(head, name=f"{name}/lengths")[:, 0] - 1
    longest = int(sizes.max())
    if limit is not None and longest > limit:
        raise ValueError(
            f'"{name}": rank {int(sizes.argmax())} sends {longest} bytes; at most {limit} are allowed; '
            "send large arrays with all_gather(uneven=True)"
        )
    row = np.zeros(head.nbytes + longest, np.uint8)
    row[: head.nbytes] = head.view(np.uint8)
    row[head.nbytes : head.nbytes + content.size] = content
    rows = np.empty((current().core.size(), row.size), np.uint8)
    current().core.all_gather(name, row, rows, UINT8, kind)
    heads = rows[:, : head.nbytes].copy().view(np.int64)
    return [
        (int(number), each[head.nbytes : head.nbytes + int(size) - 1].copy()) if size else None
        for (size, number), each in zip(heads, rows)
    ]


#: The maximum number of bytes that a rank may send in `all_gather_object`.
MAX_OBJECT_BYTES = 16 << 20


def all_gather_object(value: Any, name: str = "unnamed") -> list[Any]:
    """Collect one object from each rank, in rank order.

    An object is None, a number, a string, bytes, a NumPy array, or a list or dict of objects.
    Objects are sent as msgpack, never as pickles, so no rank can run code on another rank.

    Args:
        value: this rank's object, of at most 16 MiB as msgpack. A tuple or set arrives as a list. A
            NumPy scalar arrives as a number.
        name: the name that matches this rank's call with the other ranks' calls.

    Returns:
        The objects by rank. The entry of a failed rank is None.

    Raises:
        TypeError: if the type of an object isn't supported.
        OverflowError: if an integer has more than 64 bits.
        ValueError: if a rank's object has more than 16 MiB. Every rank raises it.
        KungFuError: see :func:`all_reduce`.
    """
    content = np.frombuffer(encode(value), np.uint8)
    parts = _gather_bytes(content, 1, name, "object in bytes ", MAX_OBJECT_BYTES)
    return [None if part is None else decode(part[1].tobytes()) for part in parts]


def reduce_scatter(array: ArrayLike, op: str = "sum", name: str = "unnamed") -> Array:
    """Reduce an array over all ranks, and return this rank's part of the result.

    A failed rank's input isn't in any part, and a mean is taken over the ranks that took part. No
    survivor receives the failed rank's part of the result, so that part is missing.

    Args:
        array: this rank's input, of the same shape and dtype on every rank. The length of its first
            axis must be divisible by the number of ranks.
        op: as in :func:`all_reduce`.
        name: the name that matches this rank's call with the other ranks' calls.

    Returns:
        On rank r, the r-th of `size` equal parts of the result, with shape ``(array.shape[0] / size,
        *array.shape[1:])``.

    Raises:
        ValueError: if `op` is unknown, or if the first axis can't be divided evenly.
        TypeError: if the dtype isn't supported.
        KungFuError: see :func:`all_reduce`.
    """
    _begin(name)
    array, size = native_input(array), current().core.size()
    source, dtype = reducible(array)
    if array.ndim == 0 or array.shape[0] % size:
        raise ValueError(f"the first axis of {array.shape} can't be scattered evenly over {size} ranks")
    result = np.empty((array.shape[0] // size, *array.shape[1:]), array.dtype)
    current().core.reduce_scatter(name, source, reducible(result)[0], number_of_op(op), dtype)
    return result


def barrier() -> None:
    """Wait until every living rank has called this function.

    On a joining worker, the call returns immediately, as `ms_kungfu.run_barrier` does.
    """
    runtime.run_barrier()


class Saved(NamedTuple):
    """A copy of an array that a rank has saved under a name."""

    value: Array
    """The array, with the shape and dtype with which it was saved."""
    version: int
    """The number of times that the rank has saved an array under this name, starting at 1."""


def save(name: str, array: ArrayLike) -> int:
    """Save a copy of an array, which other workers can :func:`request`.

    This call isn't a collective and doesn't wait for other workers. For each name, the latest array
    stays in shared memory until this process ends. The memory is twice the size of the array. A process
    may use up to 256 names.

    Args:
        name: the name of the array, of at most 127 bytes.
        array: the array to save. All arrays that are saved under one name must have the same shape and
            dtype.

    Returns:
        The version, which is the number of times that this process has saved under the name.

    Raises:
        ValueError: if an array of a different shape or dtype was saved under `name` before, or if
            `name` is longer than 127 bytes.
        TypeError: if the dtype contains Python objects.
    """
    runtime.init()
    array = native_input(array)
    return current().core.save(name, layout_of(array), array.reshape(-1).view(np.uint8))


def request(rank: int, name: str) -> Saved | None:
    """Return a copy of the array that a rank has most recently saved under a name.

    This call isn't a collective, and it doesn't interrupt the other worker. The copy is always
    consistent, even if that worker saves again or fails during the call. A later request to the
    same worker never returns an older version. If the worker is on another host, the copy is sent
    over the network. If that host is lost during the call, the worker counts as ended.

    Args:
        rank: the rank that saved the array.
        name: the name under which it was saved.

    Returns:
        The copy and its version, or None if the rank has saved nothing yet or has ended.

    Raises:
        ValueError: if there is no such rank, or if an optimizer has saved its model under that name.
        CollectiveTimeoutError: if the rank saves so often that no consistent copy can be made, or if
            the rank's host isn't lost but doesn't answer within KUNGFU_COLLECTIVE_TIMEOUT.
        StaleClusterError: if the rank is on another host and the cluster changes before the copy
            arrives.
        InternalError: if the copy doesn't match the shape and dtype with which it was saved.
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
        raise InternalError(f'"{name}" of rank {rank} has {nbytes} bytes, which isn\'t the size of a {layout}')
    version = current().core.request(rank, name, layout, value.reshape(-1).view(np.uint8))
    return Saved(value, version) if version else None
