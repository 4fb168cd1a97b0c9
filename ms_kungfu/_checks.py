"""What is asked of arguments in many places, and said of them alike."""

from __future__ import annotations

from operator import index
from typing import Any


def at_least(least: int, value: Any, what: str) -> int:
    """`value` as an int. ValueError unless it is an integer (no bool) of `least` or more."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{what} is an integer of {least} or more, got {value!r}")
    return number
