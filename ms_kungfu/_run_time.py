"""Deadlines that survive a pause of the whole job: SIGSTOP, a suspended Slurm step, a paused virtual machine.

Every clock runs while a process is stopped. So a process that wakes up after a pause would find its deadline passed,
although the awaited process was stopped as well and couldn't answer. `run_time` leaves such pauses out.

1. A thread that waits for a deadline of `run_time` reads it at least every `SLICE_S`: it waits in slices.
2. So two readings of one process that are further apart than `MOST_GAP_S` have time between them in which no thread of
   it waited for a deadline, or in which the process did not run. Of that distance only `MOST_GAP_S` counts. The first
   kind is harmless: no deadline is running then. (`test_pause_counts_as_one_gap`.)
3. A pause costs the awaited process at most `MOST_GAP_S` of its time, however long it is.
4. A wait still ends: each reading counts the time since the last one in full, or `MOST_GAP_S`. A machine that is short
   of cores makes deadlines longer, never shorter.

Other hosts and leases follow the real clock while this one is paused: `leader_snapshot.TimeToAsk` uses that.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Callable

SLICE_S = 0.5
# More than lost_hosts.Leases allows for a late look, so that a shortened pause still counts as one there.
MOST_GAP_S = 2.0


class RunClock:
    """Seconds, of which only differences have a meaning. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._read = monotonic()
        self._paused = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._monotonic()
            self._paused += max(0.0, now - self._read - MOST_GAP_S)
            self._read = now
            return now - self._paused

    def after_fork(self) -> None:
        """Renew the lock in a forked child: the thread that held it may not exist there."""
        self._lock = threading.Lock()


run_time = RunClock()
os.register_at_fork(after_in_child=run_time.after_fork)
