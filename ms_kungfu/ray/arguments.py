"""Check the arguments of `ms_kungfu.ray.run`. Errors name these arguments instead of flags.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import shlex
from collections.abc import Sequence
from typing import Any, Callable

_RESOURCES = ("cpus_per_worker", "gpus_per_worker", "npus_per_worker")


def function_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_function(function: Callable[..., Any]) -> None:
    """Raise TypeError if the function needs arguments, because the workers call it without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a C function without a signature
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]
    if needed:
        name = function_name(function)
        raise TypeError(
            f"workers call {name} without arguments, but it needs {', '.join(needed)}; "
            f"pass functools.partial({name}, ...) or a lambda"
        )


def command_words(command: object) -> list[str]:
    """Return the words of a command.

    Raises:
        TypeError: `command` isn't a list of words.
        ValueError: `command` is empty.
    """
    if isinstance(command, str):
        raise TypeError(f"command_or_function={command!r} is a string; pass the command's words: {_split(command)}")
    if not isinstance(command, Sequence) or not all(isinstance(word, (str, os.PathLike)) for word in command):
        raise TypeError(
            f"command_or_function={command!r} is neither a function nor the words of a command, "
            "like ['python', 'train.py']"
        )
    if not command:
        raise ValueError("command_or_function is empty; pass a command's words, like ['python', 'train.py']")
    return [str(os.fspath(word)) for word in command]


def further_flags(flags: object) -> list[str]:
    if isinstance(flags, str):
        raise TypeError(f"flags={flags!r} is a string; pass a list: {_split(flags)}")
    if not isinstance(flags, Sequence) or not all(isinstance(word, str) for word in flags):
        raise TypeError(f"flags={flags!r} is not a list of kungfu-run's flags, like ['-recover=replace']")
    return [*flags]


def least_and_most(num_workers: object) -> tuple[int, int]:
    pair = (num_workers, num_workers) if isinstance(num_workers, int) else num_workers
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(count) is int for count in pair):
        raise TypeError(f"num_workers={num_workers!r} is neither a number nor a pair (minimum, maximum)")
    least, most = pair
    if least < 1:
        raise ValueError(f"num_workers={num_workers!r}: a job needs at least 1 worker")
    if most < least:
        raise ValueError(f"num_workers={num_workers!r}: the maximum, {most}, is less than the minimum, {least}")
    return least, most


def amount(name: str, value: object) -> float:
    """Return `value`, which must be an amount of a resource or a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is not a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} is not an amount; pass a number that is 0 or more")
    return value


def resources(*counts: object) -> list[str]:
    """Return kungfu-run's flags for the number of CPUs, GPUs and NPUs per worker."""
    found = [amount(name, count) for name, count in zip(_RESOURCES, counts)]
    if not any(found):
        raise ValueError("cpus_per_worker=0: a worker needs more than 0 CPUs, GPUs or NPUs of a node")
    return [f"-{name.replace('_', '-')}={count}" for name, count in zip(_RESOURCES, found)]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote without an end
        return text.split()
