"""Define the result of a check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    OK = "ok"
    MISSING = "missing"  # not installed, but everything else works without it
    WRONG = "wrong"  # something is installed, but it can't work in its present state


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy`: the action for the user; empty if nothing needs to be done."""

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
