"""Report the schedule's next size to the launcher, so that the launcher starts the new workers early."""

from __future__ import annotations

from ms_kungfu import membership
from ms_kungfu.elastic.schedule import Schedule, entries, newcomers_ahead


class Ahead:
    """Report the next size in the schedule to the launcher.

    The lowest living rank reports once in each cluster version, and again if the next entry of the schedule changes.
    The rank reports only after the version's first step. During that step, the workers need the cores for compiling,
    and the launcher doesn't know yet how much memory a worker needs. During a resize, the rank doesn't report, because
    the launcher must first start the workers for that resize.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        self._known = entries(schedule)
        self._told: tuple[int, int, int] | None = None

    def look(self, step: int) -> None:
        """Report the next size if a report is due. Called at the end of a step, before the cluster may change.

        Not collective.
        """
        if not self._known or membership.is_changing():
            return
        wanted = newcomers_ahead(self._known, step, membership.size())
        news = (membership.cluster_version(), *wanted)
        if news != self._told and membership.speaks_for_all():
            self._told = news
            membership.expect(*wanted)
