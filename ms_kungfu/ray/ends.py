"""The results of a `ms_kungfu.ray.run` function on each worker, and the result for the caller. Pure."""

from __future__ import annotations

import pickle
import subprocess
import traceback
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

RETURNED, UNSENT, RAISED = "returned", "unsent", "raised"


class FunctionError(subprocess.CalledProcessError):
    """Training with a function has failed.

    Its cause (``__cause__``) is the worker's exception, if that could be pickled. `cmd` is the
    function's name.

    Args:
        returncode: kungfu-run's exit status.
        function: the function's name.
        rank: the rank of the worker that failed first. None if the function didn't fail, but for
            example a signal or a lack of memory ended the job.
        error: the exception's type and text, ``"ValueError: no such file"``.
        traceback: the exception's traceback, with the worker's lines.
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

    `at`: seconds since 1970. `data`: the returned value or raised exception, pickled; empty if pickling
    failed. `text`: a description of the exception, or of the value that couldn't be pickled.
    """

    kind: str
    version: int
    rank: int
    at: float
    data: bytes = b""
    text: str = ""
    traceback: str = ""


def end_by_value(value: object, version: int, rank: int, at: float, dumps: Callable[[Any], bytes]) -> End:
    """Return the `End` for a returned value."""
    try:
        return End(RETURNED, version, rank, at, dumps(value))
    except Exception as error:  # a `__reduce__` method may raise anything
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return End(UNSENT, version, rank, at, text=f"(of {kind}) can't be pickled: {_text(error)}")


def end_by_error(error: BaseException, version: int, rank: int, at: float, dumps: Callable[[Any], bytes]) -> End:
    """Return the `End` for an exception."""
    try:
        data = dumps(error)
    except Exception:  # if it can't be pickled, its text is enough
        data = b""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return End(RAISED, version, rank, at, data, _text(error), lines)


def values(function: str, ends: Sequence[End]) -> list[Any]:
    """Return the values that the last cluster's workers have returned, by rank.

    Raise TypeError if a value can't be unpickled.
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
    """Return the exception for a job that has ended with that exit status.

    The first worker's exception is used, because it may have caused the others.
    """
    raised = sorted((end for end in ends if end.kind == RAISED), key=lambda end: end.at)
    if not raised:
        return FunctionError(code, function)
    first = raised[0]
    error = FunctionError(code, function, first.rank, first.text, first.traceback)
    try:
        cause = pickle.loads(first.data)
    except Exception:  # an exception class from the worker's modules, or with a custom constructor
        cause = None
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def _text(error: BaseException) -> str:
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
