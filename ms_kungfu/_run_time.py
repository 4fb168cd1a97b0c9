"""Provide a clock for deadlines that doesn't count pauses of the whole job.

A job pauses, for example, because of SIGSTOP, a suspended Slurm step or a paused virtual machine. The system's clocks
continue during a pause. With such a clock, a process that continues after a pause would find that its deadline has
passed, although the process from which it expects an answer was paused as well. `run_time` doesn't count such pauses.

1. A thread that waits for a deadline of `run_time` waits in slices: it reads `run_time` at least every `SLICE_S`.
2. Suppose that two consecutive readings of `run_time` in a process are more than `MOST_GAP_S` apart. Then, between
   these readings, either no thread waited for a deadline, or the process did not run. `run_time` counts only
   `MOST_GAP_S` of the gap. The first case is harmless, because no deadline is pending.
   (`test_pause_counts_as_one_gap`.)
3. So a pause of any length shortens the other process's time for its answer by at most `MOST_GAP_S`.
4. Each wait still ends, because each reading counts the time since the previous reading, up to `MOST_GAP_S`. On a
   machine with too few cores, deadlines get longer, never shorter.

While this process is paused, time continues for other hosts and for leases. `leader_snapshot.TimeToAsk` handles this.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Callable

SLICE_S = 0.5
# This gap is longer than the delay that lost_hosts.Leases tolerates, so `Leases` still detects a pause that `run_time`
# has shortened to this gap.
MOST_GAP_S = 2.0


class RunClock:
    """A clock that returns seconds and doesn't count pauses. Only differences are meaningful. Thread-safe."""

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
        """Replace the lock in a forked child, because a thread that exists only in the parent may hold it."""
        self._lock = threading.Lock()


run_time = RunClock()
os.register_at_fork(after_in_child=run_time.after_fork)
