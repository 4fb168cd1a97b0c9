"""Find workers that hang: their heartbeat counts don't change.

This module uses no clock and no I/O.

A separate thread in each worker counts heartbeats. A worker that has counted no heartbeat yet is importing or
compiling, and counts as hung only while it is stopped (SIGSTOP). A worker whose heartbeat thread waits for a core
doesn't hang, because the thread continues as soon as it gets a core. The states of the worker's other threads don't
matter: computing threads wait by spinning, so they are runnable even in a worker that hangs.
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
    """Find the workers whose heartbeat count hasn't changed for `limit_s` seconds.

    The caller checks the counts every `period_s` seconds.
    """

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
        """Return the keys of the workers that hang.

        Args:
            now: in seconds.
            beats: the heartbeat count of each worker. The count is an empty tuple before the first heartbeat.
            stopped: the workers that are stopped now (SIGSTOP).
            is_starved: returns whether a worker's heartbeat thread waits for a core. It is called for workers whose
                count hasn't changed.
        """
        # If the launcher itself hasn't run for a while, the workers might not have run either. So a longer gap counts
        # as only `_MAX_GAP_S`.
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
    """Return whether a signal has stopped the process; false if the process has exited."""
    try:
        return stat_of(pid)[0] == "T"
    except OSError:
        return False


def is_starved(pid: int) -> bool:
    """Return whether a worker's heartbeat thread couldn't count because it is waiting for a core.

    `pid` is the worker's PID, or the PID of a script that started the worker.
    """
    return any(_is_runnable(task) for each in (pid, *descendants(pid)) for task in _threads(each, _HEART))


def waits_for_a_core(pid: int) -> bool:
    """Return whether a thread of the process waits for a core, so that the process can't end after SIGKILL."""
    return any(map(_is_runnable, _threads(pid)))


def _threads(pid: int, name: str = "") -> list[Path]:
    """Return the process's threads with this name (by default all threads); none if the process has exited."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if not name or (task / "comm").read_text().strip() == name:
                    found.append(task)
    return found


def _is_runnable(task: Path) -> bool:
    """Return whether the thread is running or waits only for a core."""
    with contextlib.suppress(OSError):
        return stat_of(f"{task.parts[2]}/task/{task.name}")[0] == "R"
    return False
