"""Record which ranks contributed to this process's reductions. Training and datasets use these outcomes."""

from __future__ import annotations

import weakref
from typing import Any


class Outcomes:
    """Pass the outcome of each reduction in this process to each `Reductions` object, exactly once."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.owners: weakref.WeakSet[Reductions] = weakref.WeakSet()
        # cluster version -> participants in its last reductions; a few bytes per version
        self.by_version: dict[int, list[int]] = {}
        self.of_nobody = Reductions(self)  # for callers without an object of their own

    def look(self) -> None:
        gradient, latest, commits, first, last = self.core.take_reductions()
        for each in self.owners:
            each.add(gradient, latest, commits, first, last)

    def end_version(self, version: int) -> None:
        """Save the participants of the last reductions at the end of a cluster version, for `by_version`."""
        self.look()
        latest = max(each.latest() for each in self.owners)
        self.by_version[version] = list(self.core.members_of(latest))
        for each in self.owners:
            each.forget()


class Reductions:
    """The outcomes in one cluster version since its owner last took them.

    Training and each dataset own one object each, so taking the outcomes from one object doesn't affect the others.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.forget()
        outcomes.owners.add(self)

    def forget(self) -> None:
        """Drop the outcomes so far. A generation is stored as its number plus 1, and 0 stands for no reduction."""
        self._gradient = self._any = self._commits = self._first = self._last = 0

    def add(self, gradient: int, latest: int, commits: int, first: int, last: int) -> None:
        """Add the outcomes of further reductions.

        `gradient`, `latest`: the generation of the latest gradient reduction, and of the latest reduction of any kind.
        `commits`: the number of committed gradient reductions. `first`, `last`: the generations of the first and of the
        last commit.
        """
        self._gradient, self._any = max(self._gradient, gradient), max(self._any, latest)
        self._commits, self._first, self._last = self._commits + commits, self._first or first, last or self._last

    def latest(self) -> int:
        """Return the generation in which the last gradient reduction ended, or else the last all-reduce."""
        return max((self._gradient or self._any) - 1, 0)

    def take_participants(self) -> list[int]:
        """Return the ranks that took part in the gradient reductions since the last call, sorted.

        Return all ranks if there was no gradient reduction. The result is the same at all returned ranks that are in
        the current cluster.
        """
        self._outcomes.look()
        latest = self.latest()
        self._gradient = self._any = 0
        return list(self._outcomes.core.members_of(latest))

    def take_commits(self) -> tuple[int, list[int]]:
        """Return the number of gradient reductions since the last call, and the ranks that failed between them.

        The failed ranks took part in the first reduction, whose update is done, but not in the last. The reductions of
        a plan's groups count as one reduction, because they end with the same participants.
        """
        self._outcomes.look()
        commits, first, last = self._commits, self._first, self._last
        self._commits = self._first = self._last = 0
        if first == last:
            return commits, []
        members_of = self._outcomes.core.members_of
        stayed = members_of(last - 1)
        return commits, [rank for rank in members_of(first - 1) if rank not in stayed]
