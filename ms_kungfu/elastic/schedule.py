"""Parse schedules. A schedule maps steps to cluster sizes. This module uses no clock and no I/O."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Callable, Optional, Union

Schedule = Union[Mapping[int, int], str, Callable[[int], Optional[int]]]
"""``{step: size}``, a string like ``"10:2,20:4,40:1"``, or a function of the step that returns a size or None."""

SizeRule = Callable[[int], Optional[int]]

_PAIR = re.compile(r"\s*(-?[0-9]+)\s*:\s*(-?[0-9]+)\s*")
_FORM = "write step:size pairs such as '10:2,20:4,40:1'"


def parse_schedule(schedule: Schedule | None) -> SizeRule:
    """Return a schedule as a function ``size_after(step)``, which returns the size to request after a step, or None.

    An entry applies only at its own step. So the workers request its size once, and a worker that joins later doesn't
    request the size again. Step 0 means before the first step. Raise ValueError or TypeError for an invalid schedule.

    >>> rule = parse_schedule("10:2,20:4")
    >>> rule(9), rule(10), rule(20)
    (None, 2, 4)
    """
    if schedule is None:
        return lambda step: None
    if callable(schedule) and not isinstance(schedule, Mapping):
        return _checked(schedule)
    return dict(entries(schedule)).get


def entries(schedule: Schedule | None) -> list[tuple[int, int]]:
    """Return the ``(step, size)`` pairs of a schedule, sorted by step. Return [] if the schedule is a function.

    Raise ValueError or TypeError for an invalid schedule.
    """
    if isinstance(schedule, str):
        return sorted(_table(_pairs(schedule)).items())
    if isinstance(schedule, Mapping):
        return sorted(_table(schedule.items()).items())
    if schedule is None or callable(schedule):
        return []
    raise TypeError(f"schedule must be a dict, a string or a function of the step, got {schedule!r}; {_FORM}")


def newcomers_ahead(known: Sequence[tuple[int, int]], step: int, size: int) -> tuple[int, int]:
    """Return the number of new workers for the next resize in a schedule, and the cluster size after that resize.

    `known` contains the schedule's `entries`. The next resize is the first entry that is at `step` or later and has a
    size other than `size`. Return (0, size) if there is no such entry, or if the cluster shrinks at that entry.

    Later entries are ignored, because their workers would wait for a long time, and would compete for resources with
    the workers for the next resize.

    >>> newcomers_ahead([(10, 2), (20, 4), (40, 1)], 10, 2)
    (2, 4)
    >>> newcomers_ahead([(10, 2), (20, 4), (40, 1)], 21, 4)
    (0, 4)
    """
    following = range(bisect_left(known, (step, 0)), len(known))
    there = next((known[i][1] for i in following if known[i][1] != size), size)
    return max(0, there - size), max(size, there)


def _pairs(text: str) -> Iterable[tuple[int, int]]:
    for entry in text.split(","):
        pair = _PAIR.fullmatch(entry)
        if pair is None:
            raise ValueError(f"schedule {text!r}: {entry.strip()!r} is not step:size with integers; {_FORM}")
        yield int(pair[1]), int(pair[2])


def _table(entries: Iterable[tuple[int, int]]) -> dict[int, int]:
    table: dict[int, int] = {}
    for step, size in entries:
        step, size = _integer(step, "step"), _integer(size, "size")
        if step < 0:
            raise ValueError(f"schedule entry '{step}:{size}': a step is 0 or more, got {step}; {_FORM}")
        if size < 1:
            raise ValueError(
                f"schedule entry '{step}:{size}': a cluster has at least 1 worker, got size {size}; {_FORM}"
            )
        if step in table:
            raise ValueError(f"schedule has two entries for step {step}; keep one entry for each step")
        table[step] = size
    if not table:
        raise ValueError(f"the schedule is empty; {_FORM}, or leave it out (None)")
    return table


def _integer(value: object, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"schedule: the {what} must be an integer, got {value!r}; {_FORM}") from None


def _checked(rule: SizeRule) -> SizeRule:
    def size_after(step: int) -> int | None:
        size = rule(step)
        if size is None:
            return None
        if _integer(size, "size") < 1:
            raise ValueError(
                f"the schedule returned size {size} for step {step}; return 1 or more, or None to keep the current size"
            )
        return index(size)

    return size_after
