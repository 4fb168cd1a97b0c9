"""Which workers keep the others waiting though they live: an endless loop, a deadlock of the program's own. Pure.

A worker whose heart beats is not hung (`hangs`), and still may never come to the collective that the others wait in.
Each rank says in shared memory for which rank it sleeps, and, once most of its deadline has passed, that it is overdue.

1. A *stuck* process lives, sleeps in no wait itself, and is where an overdue wait leads if one follows which process
   waits for which. Ranks that wait for each other in a circle brought different operations: none of them is stuck.
   (`test_circle_has_no_stuck_rank`.)
2. The launcher acts on what it has found in every look for a while, so that a rank which arrives in that time isn't
   taken for stuck, nor one of another host whose words are a look old. (`test_rank_that_arrives_is_not_confirmed`.)
3. From the decision to the end of the process the others don't give up (`Board::SetEnding`): else they would fail for
   a rank that is being ended. If it arrives meanwhile, no wait is overdue any more, and it goes on.

Between hosts the ranks wait for their host's link. A link that sleeps for none of its own host's ranks waits for the
other links, or, if none of its ranks waits for it, for its ranks to come.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


def stuck_among(alive: Collection[K], waits: Iterable[tuple[K, K, bool]]) -> dict[K, list[K]]:
    """The stuck ones, each with those that are overdue because of it.

    Args:
        alive: the processes that nobody has declared dead.
        waits: (sleeper, the one that it sleeps for, whether it is overdue); links are among them, and never alive.
    """
    awaits: dict[K, list[K]] = {}
    overdue: list[K] = []
    for sleeper, awaited, is_overdue in waits:
        awaits.setdefault(sleeper, []).append(awaited)
        if is_overdue and sleeper in alive and sleeper not in overdue:
            overdue.append(sleeper)
    stuck: dict[K, list[K]] = {}
    for sleeper in overdue:
        passed, left = {sleeper}, list(awaits[sleeper])
        while left:
            at = left.pop()
            if at in passed:
                continue
            passed.add(at)
            left += awaits.get(at, ())
            if at in alive and at not in awaits:
                stuck.setdefault(at, []).append(sleeper)
    return stuck


def waits_between_hosts(
    told: Mapping[str, Sequence[tuple[int, int, bool]]], ranks: Mapping[str, Collection[int]]
) -> list[tuple[int | str, int | str, bool]]:
    """Of a version over several hosts. `told`: what each has of its own ranks, with -1 for its link; a link has the
    name of its host then. `ranks`: those of each host."""
    waits: list[tuple[int | str, int | str, bool]] = []
    for host, own in told.items():
        waits += [(host if a < 0 else a, host if b < 0 else b, is_overdue) for a, b, is_overdue in own]
        if any(sleeper < 0 for sleeper, *_ in own):
            continue
        # It has nothing to exchange before a rank of its host comes, which waits for it then.
        is_idle = not any(awaited < 0 for _, awaited, _ in own)
        waits += [(host, other, False) for other in (ranks[host] if is_idle else told) if other != host]
    return waits


class StuckWatch(Generic[K]):
    """Tells of the processes that every look for `sure_s` has found stuck."""

    def __init__(self, sure_s: float) -> None:
        self._sure_s = sure_s
        self._since: dict[K, float] = {}

    def look(self, now: float, found: Collection[K]) -> list[K]:
        self._since = {each: self._since.get(each, now) for each in found}
        return [each for each, since in self._since.items() if now - since >= self._sure_s]
