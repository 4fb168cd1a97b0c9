"""Deadlines that survive a pause of the whole job: SIGSTOP, a suspended Slurm step, a paused virtual machine.

Every clock continues while a process is stopped. With such a clock, a process that wakes up after a pause would find
its deadline passed, although the awaited process was stopped as well and couldn't answer. `run_time` leaves such
pauses out.

1. A thread that waits for a deadline of `run_time` waits in slices: it reads `run_time` at least every `SLICE_S`.
2. Suppose that two consecutive readings of a process are more than `MOST_GAP_S` apart. Then in between either no
   thread waited for a deadline or the process did not run. Only `MOST_GAP_S` of the gap counts. The first case is
   harmless, because no deadline is pending. (`test_pause_counts_as_one_gap`.)
3. A pause reduces the time of the awaited process by at most `MOST_GAP_S`, however long the pause is.
4. Each wait still ends, because each reading counts the time since the previous reading, up to `MOST_GAP_S`. If a
   machine has too few cores, deadlines get longer, never shorter.

Other hosts and leases follow the real clock while this process is paused. `leader_snapshot.TimeToAsk` handles that.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Callable

SLICE_S = 0.5
# More than the delay that lost_hosts.Leases tolerates, so that a shortened pause still counts as a pause there.
MOST_GAP_S = 2.0


class RunClock:
    """Return seconds without pauses. Only differences are meaningful. Thread-safe."""

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
        """Replace the lock in a forked child, because the thread that held it may not exist in the child."""
        self._lock = threading.Lock()


run_time = RunClock()
os.register_at_fork(after_in_child=run_time.after_fork)
