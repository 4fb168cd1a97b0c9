"""Record which ranks contributed to this process's reductions. Training and datasets use these records."""

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
        self.of_nobody = Reductions(self)  # for callers that don't have their own `Reductions`

    def look(self) -> None:
        taken = self.core.take_reductions()
        if any(taken):
            for each in self.owners:
                each.add(*taken)

    def end_version(self, version: int) -> None:
        """Save the participants in the last reductions of a cluster version that has ended."""
        self.look()
        latest = max(each.latest() for each in self.owners)
        self.by_version[version] = list(self.core.members_of(latest))
        for each in self.owners:
            each.forget()


class Reductions:
    """Collect the outcomes of a cluster version's reductions for one consumer.

    The consumer is the training or a dataset. It takes the outcomes with `take_participants` or `take_commits`, which
    cover the reductions since the last call. Each consumer has its own object. So if one consumer takes the outcomes,
    the other consumers' objects still contain them.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.forget()
        outcomes.owners.add(self)

    def forget(self) -> None:
        """Discard the outcomes so far. A generation is stored as its number plus 1; 0 means no generation."""
        self._gradient = self._any = self._commits = self._first = self._last = 0

    def add(self, gradient: int, latest: int, commits: int, first: int, last: int) -> None:
        """Add the outcomes of further reductions.

        Args:
            gradient: the generation of the latest gradient reduction.
            latest: the generation of the latest reduction of any kind.
            commits: the number of committed gradient reductions.
            first: the generation of the first commit.
            last: the generation of the last commit.
        """
        self._gradient, self._any = max(self._gradient, gradient), max(self._any, latest)
        self._commits, self._first, self._last = self._commits + commits, self._first or first, last or self._last

    def latest(self) -> int:
        """Return the generation of the last gradient reduction, or of the last all-reduce if there is none."""
        return max((self._gradient or self._any) - 1, 0)

    def take_participants(self) -> list[int]:
        """Return the sorted ranks that took part in the gradient reductions since the last call.

        If there was no gradient reduction, return all ranks. All returned ranks that are in the current cluster get the
        same result.
        """
        self._outcomes.look()
        latest = self.latest()
        self._gradient = self._any = 0
        return list(self._outcomes.core.members_of(latest))

    def take_commits(self) -> tuple[int, list[int]]:
        """Return the number of gradient reductions since the last call, and the ranks that failed between them.

        Such a rank took part in the first of these reductions, whose update is done, but not in the last. The
        reductions of a plan's groups count as one reduction, because they all end with the same participants.
        """
        self._outcomes.look()
        commits, first, last = self._commits, self._first, self._last
        self._commits = self._first = self._last = 0
        if first == last:
            return commits, []
        members_of = self._outcomes.core.members_of
        stayed = members_of(last - 1)
        return commits, [rank for rank in members_of(first - 1) if rank not in stayed]
