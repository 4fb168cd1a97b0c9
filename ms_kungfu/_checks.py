"""Checks of arguments that many places need, with the same messages."""

from __future__ import annotations

from operator import index
from typing import Any


def at_least(least: int, value: Any, what: str) -> int:
    """Return `value` as an int. ValueError unless it is an integer (no bool) of `least` or more."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{what} is an integer of {least} or more, got {value!r}")
    return number
