"""Check arguments. Modules share these checks so that their error messages are the same."""

from __future__ import annotations

from operator import index
from typing import Any


def at_least(least: int, value: Any, what: str) -> int:
    """Return `value` as a plain int. Raise ValueError unless it is an integer (not a bool) of `least` or more."""
    try:
        number = None if isinstance(value, bool) else int(index(value))
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{what} must be an integer of {least} or more, got {value!r}")
    return number
