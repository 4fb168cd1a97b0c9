"""The outcomes of this process's reductions: which ranks took part in them, for a training or a dataset."""

from __future__ import annotations

import weakref
from typing import Any


class Outcomes:
    """The outcomes of all reductions of this process; each of its owners gets them once."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.owners: weakref.WeakSet[Reductions] = weakref.WeakSet()
        # participants in the last reductions of a version; some bytes for each
        self.by_version: dict[int, list[int]] = {}
        self.of_nobody = Reductions(self)  # for callers without an object of their own

    def look(self) -> None:
        gradient, latest, commits, first, last = self.core.take_reductions()
        for each in self.owners:
            each.add(gradient, latest, commits, first, last)

    def end_version(self, version: int) -> None:
        """Keep the participants in the last reductions that an owner hasn't taken, as the cluster version ends."""
        self.look()
        latest = max(each.latest() for each in self.owners)
        self.by_version[version] = list(self.core.members_of(latest))
        for each in self.owners:
            each.forget()


class Reductions:
    """The outcomes since its owner last took them, in one cluster version.

    Each owner has its own: a training loses nothing if a dataset takes its outcomes meanwhile.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.forget()
        outcomes.owners.add(self)

    def forget(self) -> None:
        """Count from here. The generations are from 1; 0 without one."""
        self._gradient = self._any = self._commits = self._first = self._last = 0

    def add(self, gradient: int, latest: int, commits: int, first: int, last: int) -> None:
        """Add outcomes.

        `gradient`, `latest`: the generations of the latest gradient reduction and of the latest of any kind. `commits`:
        how many there were. `first`, `last`: the generations of the first and of the last commit.
        """
        self._gradient, self._any = max(self._gradient, gradient), max(self._any, latest)
        self._commits, self._first, self._last = self._commits + commits, self._first or first, last or self._last

    def latest(self) -> int:
        """Return the generation in which the last gradient reduction ended; without one, the last all-reduce."""
        return max((self._gradient or self._any) - 1, 0)

    def take_participants(self) -> list[int]:
        """Return the ranks that took part in the gradient reductions since the last call, sorted; all without one.

        The result is the same at all of these ranks of the present cluster.
        """
        self._outcomes.look()
        latest = self.latest()
        self._gradient = self._any = 0
        return list(self._outcomes.core.members_of(latest))

    def take_commits(self) -> tuple[int, list[int]]:
        """Return how many gradient reductions there were, and the ranks that failed between them.

        Those ranks took part in the first, whose update is done, and not in the last. The reductions of a plan's groups
        count as one: they end alike.
        """
        self._outcomes.look()
        commits, first, last = self._commits, self._first, self._last
        self._commits = self._first = self._last = 0
        if first == last:
            return commits, []
        members_of = self._outcomes.core.members_of
        stayed = members_of(last - 1)
        return commits, [rank for rank in members_of(first - 1) if rank not in stayed]
