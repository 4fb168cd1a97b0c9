"""Describe how the function of `ms_kungfu.ray.run` has ended on each worker, and derive the caller's result.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import pickle
import subprocess
import traceback
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

RETURNED, UNSENT, RAISED = "returned", "unsent", "raised"


class FunctionError(subprocess.CalledProcessError):
    """Training with a function has failed.

    If the worker's exception could be pickled, it is the cause (``__cause__``) of this error. `cmd` is
    the function's name.

    Args:
        returncode: kungfu-run's exit status.
        function: the function's name.
        rank: the rank of the worker that failed first. None if the function didn't raise an exception,
            for example because a signal or a lack of memory ended the job.
        error: the exception's type and text, such as ``"ValueError: no such file"``.
        traceback: the exception's traceback in the worker, as text.
    """

    def __init__(
        self, returncode: int, function: str, rank: int | None = None, error: str = "", traceback: str = ""
    ) -> None:
        super().__init__(returncode, function)
        self.rank, self.error, self.traceback = rank, error, traceback

    def __str__(self) -> str:
        if self.rank is None:
            return (
                f"{self.cmd}: training has failed, with exit status {self.returncode}; see the reason in its last lines"
            )
        return f"{self.cmd} has failed at rank {self.rank}: {self.error}"


class End(NamedTuple):
    """How the function has ended on one worker.

    Args:
        kind: `RETURNED`, `UNSENT` (the returned value can't be pickled) or `RAISED`.
        version: the worker's cluster version.
        rank: the worker's rank.
        at: when the function ended, in seconds since 1970.
        data: the pickled value or exception. It is empty if pickling has failed.
        text: a description of the exception, or of the value that can't be pickled.
        traceback: the exception's traceback.
    """

    kind: str
    version: int
    rank: int
    at: float
    data: bytes = b""
    text: str = ""
    traceback: str = ""


def end_by_value(value: object, version: int, rank: int, at: float, dumps: Callable[[Any], bytes]) -> End:
    """Return the `End` of a worker on which the function has returned `value`."""
    try:
        return End(RETURNED, version, rank, at, dumps(value))
    except Exception as error:  # a `__reduce__` method may raise anything
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return End(UNSENT, version, rank, at, text=f"(of {kind}) can't be pickled: {_text(error)}")


def end_by_error(error: BaseException, version: int, rank: int, at: float, dumps: Callable[[Any], bytes]) -> End:
    """Return the `End` of a worker on which the function has raised `error`."""
    try:
        data = dumps(error)
    except Exception:  # if the exception can't be pickled, send only its text
        data = b""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return End(RAISED, version, rank, at, data, _text(error), lines)


def values(function: str, ends: Sequence[End]) -> list[Any]:
    """Return the values that the workers in the last cluster have returned, sorted by rank.

    Raises:
        TypeError: a value couldn't be pickled or can't be unpickled.
    """
    came = [end for end in ends if end.kind != RAISED]
    last = max((end.version for end in came), default=0)
    found = {}
    for end in sorted(end for end in came if end.version == last):
        if end.kind == UNSENT:
            raise TypeError(f"training succeeded, but the value that {function} returned at rank {end.rank} {end.text}")
        try:
            found[end.rank] = pickle.loads(end.data)
        except Exception as error:
            raise TypeError(
                f"training succeeded, but the value that {function} returned at rank {end.rank} can't be unpickled: "
                f"{_text(error)}"
            ) from error
    return [value for _, value in sorted(found.items())]


def failure(function: str, code: int, ends: Sequence[End]) -> FunctionError:
    """Return the exception for a job that has ended with the exit status `code`.

    The result describes the exception that was raised first, which may have caused the others.
    """
    raised = sorted((end for end in ends if end.kind == RAISED), key=lambda end: end.at)
    if not raised:
        return FunctionError(code, function)
    first = raised[0]
    error = FunctionError(code, function, first.rank, first.text, first.traceback)
    try:
        cause = pickle.loads(first.data)
    except Exception:  # e.g. an exception class that only the worker can import, or one with a custom constructor
        cause = None
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def _text(error: BaseException) -> str:
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
