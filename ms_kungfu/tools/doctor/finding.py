"""The result of a check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    OK = "ok"
    MISSING = "missing"  # not there, and not needed by the rest
    WRONG = "wrong"  # the installed software can't work like this


@dataclass(frozen=True)
class Finding:
    """`remedy` says what to do; empty: nothing."""

    topic: str
    status: Status
    found: str
    remedy: str = ""


def ok(topic: str, found: str, remedy: str = "") -> Finding:
    return Finding(topic, Status.OK, found, remedy)


def missing(topic: str, found: str, remedy: str = "") -> Finding:
    return Finding(topic, Status.MISSING, found, remedy)


def wrong(topic: str, found: str, remedy: str) -> Finding:
    return Finding(topic, Status.WRONG, found, remedy)
