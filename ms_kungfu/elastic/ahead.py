"""Report to the launcher which size the schedule has next, so that it starts the workers early."""

from __future__ import annotations

from ms_kungfu import membership
from ms_kungfu.elastic.schedule import Schedule, entries, newcomers_ahead


class Ahead:
    """Reports of one training at one worker.

    The lowest living rank reports once in each cluster version, and again if another entry becomes the next one. It
    does so only after the first step of the version, which compiles and delays all. Until then the cores are needed,
    and the memory of a worker isn't known. Nor does it report while a size is requested: the workers that start for it
    come first.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        self._known = entries(schedule)
        self._told: tuple[int, int, int] | None = None

    def look(self, step: int) -> None:
        """Report at the end of a step, before a change that it may bring. Not collective."""
        if not self._known or membership.is_changing():
            return
        wanted = newcomers_ahead(self._known, step, membership.size())
        news = (membership.cluster_version(), *wanted)
        if news != self._told and membership.speaks_for_all():
            self._told = news
            membership.expect(*wanted)
