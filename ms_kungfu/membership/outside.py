"""Report that a cluster change is waiting because this worker doesn't reach the end of a step.

The launcher knows each worker's last step, but only the worker itself knows the line that its program is running.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import FrameType
from typing import Any

from ms_kungfu.membership.deadlocks import may_wait_for_others, place_in_program
from ms_kungfu.membership.identity import lost_ranks
from ms_kungfu.membership.member import Member

_log = logging.getLogger(__name__)
_LIMIT_S = 30.0
_LOOK_EVERY_S = 1.0  # short, because `run_time` counts at most 2 s between two readings
_watched: set[int] = set()  # process IDs, as in `deadlocks`


class OutsideWatch:
    """Decide when to log a line, at most once per prepared version. The caller passes the time and all facts."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._activity: Any = None
        self._told = 0

    def look(self, now: float, version: int, prepared: int, activity: Any, waits: bool) -> float | None:
        """Return how many seconds this worker has delayed a cluster change; None if there is nothing to log now.

        Args:
            now: the time in seconds.
            version: the current cluster version.
            prepared: the newest prepared cluster version.
            activity: a value that changes whenever a step or a collective has ended.
            waits: whether the main thread is waiting for other workers in a collective.
        """
        if prepared <= version:
            self._since = None
        elif self._since is None or waits or activity != self._activity:
            self._since = now
        self._activity = activity
        if self._since is None or now - self._since < self._limit_s or self._told >= prepared:
            return None
        self._told = prepared
        return now - self._since


def start(member: Member) -> None:
    """Start the watch in a separate thread, once per process. Call this function if the cluster may change."""
    if os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    watch = OutsideWatch(_LIMIT_S)

    def keep_looking() -> None:
        while not member.detached:
            look(member, watch, sys._current_frames().get(threading.main_thread().ident or 0))
            member.ports.sleep(_LOOK_EVERY_S)

    member.ports.start_thread("kungfu-outside", keep_looking)


def look(member: Member, watch: OutsideWatch, frame: FrameType | None) -> None:
    """Check once, and log a line if one is due. `frame` is the frame of the main thread."""
    core, step = member.core, member.ended_steps.last
    if member.cluster is None:
        return
    prepared = int(core.announced_version())
    activity = step, member.cluster.version, core.traffic()[:2]
    waits = may_wait_for_others(frame)
    seconds = watch.look(member.ports.monotonic(), member.cluster.version, prepared, activity, waits)
    if seconds is None:
        return
    failed = lost_ranks()
    facts = (
        core.rank(), seconds, "none" if step is None else step, place_in_program(frame) or "none", prepared,
        ",".join(map(str, failed)) or "none",
    )  # fmt: skip
    if failed:
        _log.warning(
            "outside steps: rank=%d seconds=%.0f last_step=%s at=%s version=%d failed_ranks=%s. The cluster continues "
            "without the failed rank only at the end of the next step. If the program waits for that rank's work, "
            "such as a file, it waits forever: wait in a collective instead, which ends without failed ranks",
            *facts,
        )
    else:
        _log.info("outside steps: rank=%d seconds=%.0f last_step=%s at=%s version=%d failed_ranks=%s", *facts)
