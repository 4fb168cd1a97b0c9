"""Text helpers for messages."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """Return a count with its noun: ``1 worker``, ``2 workers``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def printable(text: str) -> str:
    """Return another program's text without terminal control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
