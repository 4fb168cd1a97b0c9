"""What came of this process's reductions: who took part in them, for whoever asks (a training, a dataset)."""

from __future__ import annotations

import weakref
from typing import Any


class Outcomes:
    """Of all reductions of this process, told to each of its owners once."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.owners: weakref.WeakSet[Reductions] = weakref.WeakSet()
        self.by_version: dict[int, list[int]] = {}  # who took part in the last ones of a version; some bytes for each
        self.of_nobody = Reductions(self)  # for those who have none of their own

    def look(self) -> None:
        gradient, latest, commits, first, last = self.core.take_reductions()
        for each in self.owners:
            each.add(gradient, latest, commits, first, last)

    def end_version(self, version: int) -> None:
        """Keeps who took part in the last reductions that somebody has not asked for, as the cluster version ends."""
        self.look()
        latest = max(each.latest() for each in self.owners)
        self.by_version[version] = list(self.core.members_of(latest))
        for each in self.owners:
            each.forget()


class Reductions:
    """What came of them since its owner last asked, in one cluster version.

    Each owner has its own: a training isn't told less because a dataset has asked meanwhile."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.forget()
        outcomes.owners.add(self)

    def forget(self) -> None:
        """Counts from here. The generations are from 1; 0 where there was none."""
        self._gradient = self._any = self._commits = self._first = self._last = 0

    def add(self, gradient: int, latest: int, commits: int, first: int, last: int) -> None:
        """More has come: the generations of the latest gradient reduction and of the latest of any kind, how many
        commits there were, and the generations of the first and of the last of them."""
        self._gradient, self._any = max(self._gradient, gradient), max(self._any, latest)
        self._commits, self._first, self._last = self._commits + commits, self._first or first, last or self._last

    def latest(self) -> int:
        """The generation in which the last gradient reduction ended; where there was none, the last all-reduce."""
        return max((self._gradient or self._any) - 1, 0)

    def take_participants(self) -> list[int]:
        """The ranks of the present cluster that took part in the gradient reductions since the last call, sorted; all
        where there was none. The same at all of these ranks."""
        self._outcomes.look()
        latest = self.latest()
        self._gradient = self._any = 0
        return list(self._outcomes.core.members_of(latest))

    def take_commits(self) -> tuple[int, list[int]]:
        """How many gradient reductions there were, and the ranks that died between them: they took part in the first,
        whose update is done, and not in the last. The reductions of a plan's groups, which are of one mind, are one."""
        self._outcomes.look()
        commits, first, last = self._commits, self._first, self._last
        self._commits = self._first = self._last = 0
        if first == last:
            return commits, []
        members_of = self._outcomes.core.members_of
        stayed = members_of(last - 1)
        return commits, [rank for rank in members_of(first - 1) if rank not in stayed]
