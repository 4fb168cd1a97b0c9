"""Which workers stand still: their heartbeats, counted by a thread of their own, don't move. Pure: a clock is given.

One that has not begun to count, because it imports or compiles, stands still only while it is stopped (SIGSTOP).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ms_kungfu._processes import stat_of

_MAX_GAP_S = 2.0


class HangWatch:
    """Finds the workers whose count has not moved for `limit_s`, looked at every `period_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.period_s = min(1.0, limit_s / 10)
        self._last_look: float | None = None
        self._beats: dict[int, tuple[int, ...]] = {}
        self._stopped: set[int] = set()
        self._still_s: dict[int, float] = {}

    def hung(self, now: float, beats: Mapping[int, tuple[int, ...]], stopped: Collection[int] = ()) -> list[int]:
        """The keys of those that hang, given everybody's counts; no counts: it has not begun to count. `stopped`: those
        of them that are stopped at this moment."""
        # If the launcher itself has not run for a while, the workers may not have either.
        passed = 0.0 if self._last_look is None else min(now - self._last_look, _MAX_GAP_S)
        self._last_look = now
        self._still_s = {
            key: self._still_s.get(key, 0.0) + passed
            if beat == self._beats.get(key) and (beat or (key in stopped and key in self._stopped))
            else 0.0
            for key, beat in beats.items()
        }
        self._beats, self._stopped = dict(beats), set(stopped)
        return [key for key, still_s in self._still_s.items() if still_s >= self._limit_s]


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal; not where it is gone."""
    try:
        return stat_of(pid)[0] == "T"
    except OSError:
        return False
