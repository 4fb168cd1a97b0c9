"""Which workers hang: their heartbeats, counted by a thread of their own, don't move. Pure: the caller passes the time.

A worker whose heartbeat hasn't begun imports or compiles: it counts as hung only while it is stopped (SIGSTOP). A
worker whose heartbeat thread waits for a core doesn't hang: the machine lacks cores, and the thread will count. Its
other threads prove nothing, since those of a computation spin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Callable

from ms_kungfu._processes import descendants, stat_of

_MAX_GAP_S = 2.0
_HEART = "kungfu-beat"  # heartbeat.cc starts this thread


class HangWatch:
    """Find the workers whose count hasn't moved for `limit_s`, examined every `period_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.period_s = min(1.0, limit_s / 10)
        self._last_look: float | None = None
        self._beats: dict[int, tuple[int, ...]] = {}
        self._stopped: set[int] = set()
        self._still_s: dict[int, float] = {}

    def hung(
        self,
        now: float,
        beats: Mapping[int, tuple[int, ...]],
        stopped: Collection[int] = (),
        is_starved: Callable[[int], bool] = lambda key: False,
    ) -> list[int]:
        """Return the keys of the workers that hang, given the counts of all; without counts a heartbeat hasn't begun.

        `stopped`: those that are stopped now. `is_starved` is called for those whose counts haven't moved.
        """
        # If the launcher itself has not run for a while, the workers may not have either.
        passed = 0.0 if self._last_look is None else min(now - self._last_look, _MAX_GAP_S)
        self._last_look = now
        self._still_s = {
            key: self._still_s.get(key, 0.0) + passed
            if beat == self._beats.get(key)
            and (not is_starved(key) if beat else key in stopped and key in self._stopped)
            else 0.0
            for key, beat in beats.items()
        }
        self._beats, self._stopped = dict(beats), set(stopped)
        return [key for key, still_s in self._still_s.items() if still_s >= self._limit_s]


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process; false if it has exited."""
    try:
        return stat_of(pid)[0] == "T"
    except OSError:
        return False


def is_starved(pid: int) -> bool:
    """Return whether a worker's heartbeat thread waits for a core: with one it would have counted.

    `pid` may be a script's, with the worker below it.
    """
    return any(_is_runnable(task) for each in (pid, *descendants(pid)) for task in _threads(each, _HEART))


def waits_for_a_core(pid: int) -> bool:
    """Return whether one of its threads waits for a core. The process got SIGKILL and computes nothing any more."""
    return any(map(_is_runnable, _threads(pid)))


def _threads(pid: int, name: str = "") -> list[Path]:
    """Return the process's threads of this name; none if it has exited."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if not name or (task / "comm").read_text().strip() == name:
                    found.append(task)
    return found


def _is_runnable(task: Path) -> bool:
    """Return whether the thread runs, or will once it gets a core."""
    with contextlib.suppress(OSError):
        return stat_of(f"{task.parts[2]}/task/{task.name}")[0] == "R"
    return False
