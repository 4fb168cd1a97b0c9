"""Whom the schedule wants next: the launcher hears of it, and starts them before they are wanted."""

from __future__ import annotations

from ms_kungfu import membership
from ms_kungfu.elastic.schedule import Schedule, entries, newcomers_ahead


class Ahead:
    """Of one training at one worker. The lowest living rank tells: once in each cluster version, and again where
    another entry is the next one.

    Not before a step of the version is done, whose first one compiles, and holds up all: the cores are needed, and what
    memory a worker takes isn't known. Nor while a size is asked for: those who are starting for it come first.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        self._known = entries(schedule)
        self._told: tuple[int, int, int] | None = None

    def look(self, step: int) -> None:
        """At the end of each step, before a change that it may bring. Not collective."""
        if not self._known or membership.is_changing():
            return
        wanted = newcomers_ahead(self._known, step, membership.size())
        news = (membership.cluster_version(), *wanted)
        if news != self._told and membership.speaks_for_all():
            self._told = news
            membership.expect(*wanted)
