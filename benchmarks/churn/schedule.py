"""Choose the time and the victim of each kill, depending only on the scenario, its interval and a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

SCENARIOS = ("none", "kill", "resize", "host")
SIZES = (2, 4)
"""The alternating sizes of the `resize` scenario. A job begins with 4 workers."""
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """An action in a run, `at` seconds after its workers have warmed up.

    `draw`, in [0, 1), selects the victim of a "kill". `size` is the new size of a "resize".
    """

    at: float
    action: str
    draw: float = 0.0
    size: int = 0


def events(scenario: str, every: float, seconds: float, seed: int) -> list[Event]:
    """Return the events of a run in order.

    Two events are `every` seconds apart on average. A kill comes up to a tenth of `every` earlier or later, so that
    kills hit all moments of a step. "host" kills a host, and "host-back" restarts it half an interval later.

    >>> [round(event.at, 1) for event in events("resize", 20, 70, 1)]
    [20, 40, 60]
    >>> events("none", 0, 70, 1)
    []
    """
    if scenario == "none":
        return []
    rng = random.Random(f"{scenario}:{every:g}:{seed}")
    found: list[Event] = []
    for number in range(1, int(seconds / every) + 1):
        at = number * every
        if scenario == "kill":
            found.append(Event(at + rng.uniform(-0.1, 0.1) * every, "kill", rng.random()))
        elif scenario == "resize":
            found.append(Event(at, "resize", size=SIZES[(number - 1) % len(SIZES)]))
        else:
            found += [Event(at, "host"), Event(at + every / 2, "host-back")]
    return [event for event in found if event.at < seconds]


def victim(workers: Sequence[T], draw: float) -> T:
    """Return one of the living workers.

    >>> victim(["a", "b", "c", "d"], 0.74)
    'c'
    """
    return workers[int(draw * len(workers))]
