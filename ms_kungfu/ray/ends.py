"""The results of a function of `ms_kungfu.ray.run` at each worker, and the caller's result. Pure."""

from __future__ import annotations

import pickle
import subprocess
import traceback
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

RETURNED, UNSENT, RAISED = "returned", "unsent", "raised"


class FunctionError(subprocess.CalledProcessError):
    """Training by a function has failed.

    Its cause (``__cause__``) is the worker's exception, if that could be sent. `cmd` is the function's
    name.

    Args:
        returncode: kungfu-run's exit status.
        function: the function's name.
        rank: of the worker that failed first. None if it wasn't the function that failed (a signal, no
            memory).
        error: that exception's type and text, ``"ValueError: no such file"``.
        traceback: the same with the worker's lines.
    """

    def __init__(
        self, returncode: int, function: str, rank: int | None = None, error: str = "", traceback: str = ""
    ) -> None:
        super().__init__(returncode, function)
        self.rank, self.error, self.traceback = rank, error, traceback

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.cmd}: training has failed, with exit status {self.returncode}; its last lines say why"
        return f"{self.cmd} has failed at rank {self.rank}: {self.error}"


class End(NamedTuple):
    """How the function has ended at one worker.

    `at`: seconds since 1970. `data`: the returned value or raised exception, pickled; empty if it can't be. `text`:
    describes the exception, or the value that can't be sent.
    """

    kind: str
    version: int
    rank: int
    at: float
    data: bytes = b""
    text: str = ""
    traceback: str = ""


def end_by_value(value: object, version: int, rank: int, at: float, dumps: Callable[[Any], bytes]) -> End:
    """Return the end by a returned value."""
    try:
        return End(RETURNED, version, rank, at, dumps(value))
    except Exception as error:  # any exception of a `__reduce__`
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return End(UNSENT, version, rank, at, text=f"(of {kind}) can't be pickled: {_text(error)}")


def end_by_error(error: BaseException, version: int, rank: int, at: float, dumps: Callable[[Any], bytes]) -> End:
    """Return the end by an exception."""
    try:
        data = dumps(error)
    except Exception:  # its text is enough
        data = b""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return End(RAISED, version, rank, at, data, _text(error), lines)


def values(function: str, ends: Sequence[End]) -> list[Any]:
    """Return what the last cluster's workers have returned, by their ranks.

    It raises TypeError if one of the values can't be read.
    """
    came = [end for end in ends if end.kind != RAISED]
    last = max((end.version for end in came), default=0)
    found = {}
    for end in sorted(end for end in came if end.version == last):
        if end.kind == UNSENT:
            raise TypeError(f"training has ended well, but what {function} returned at rank {end.rank} {end.text}")
        try:
            found[end.rank] = pickle.loads(end.data)
        except Exception as error:
            raise TypeError(
                f"training has ended well, but what {function} returned at rank {end.rank} can't be read here: "
                f"{_text(error)}"
            ) from error
    return [value for _, value in sorted(found.items())]


def failure(function: str, code: int, ends: Sequence[End]) -> FunctionError:
    """Return the exception of a job that has ended with that exit status.

    The first one is the one that may have caused the others.
    """
    raised = sorted((end for end in ends if end.kind == RAISED), key=lambda end: end.at)
    if not raised:
        return FunctionError(code, function)
    first = raised[0]
    error = FunctionError(code, function, first.rank, first.text, first.traceback)
    try:
        cause = pickle.loads(first.data)
    except Exception:  # an exception of the worker's own modules, or one with a constructor of its own
        cause = None
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def _text(error: BaseException) -> str:
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
