"""Find the ranks for which others wait so long that the wait counts as a stall (`job_events.StallBegan`).

This module uses no clock and no I/O.

1. If a rank sleeps in an operation for longer than a moment, it writes to shared memory which rank it waits for. These
   waits form chains of processes. At the end of a chain is a process that is alive and doesn't sleep in an operation
   (`stuck.stuck_among`).

2. A stall begins if each check during `STALL_S` has found the same process at the end of a chain, and the process
   hasn't finished a step in that time. So if the program counts steps, a rank that is only the slowest in each step is
   a straggler and doesn't cause a stall. (`test_slow_rank_that_makes_steps_is_no_stall`.)

3. A stall ends at the first check at which the process isn't at the end of a chain, or has finished a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)
STALL_S = 2.0


class Stall(Struct):
    """Other ranks wait for a process.

    Args:
        since: when a check first found the process at the end of a chain.
        step: the last step that the process has finished; None if it is unknown.
        waiting: the ranks that wait for the process.
        began: whether the stall has been reported.
        rank: the rank of the process in that report.
    """

    since: float
    step: int | None
    waiting: Sequence[int]
    began: bool = False
    rank: int | None = None


class StallWatch(Generic[K]):
    """Track the present stalls."""

    def __init__(self) -> None:
        self._stalls: dict[K, Stall] = {}

    def look(
        self, now: float, waited_for: Mapping[K, Sequence[int]], steps: Mapping[K, int | None]
    ) -> tuple[dict[K, Stall], dict[K, Stall]]:
        """Check all processes. Return the stalls that begin at this check, and the stalls that end at it.

        Args:
            now: in seconds.
            waited_for: for each process at the end of a chain, the ranks that wait for it.
            steps: the last step that each of these processes has finished; None if it is unknown.
        """
        ended = {
            each: stall
            for each, stall in self._stalls.items()
            if each not in waited_for or steps.get(each) != stall.step
        }
        for each in ended:
            del self._stalls[each]
        began: dict[K, Stall] = {}
        for each, ranks in waited_for.items():
            stall = self._stalls.setdefault(each, Stall(now, steps.get(each), ranks))
            stall.waiting = ranks
            if not stall.began and now - stall.since >= STALL_S:
                stall.began, began[each] = True, stall
        return began, {each: stall for each, stall in ended.items() if stall.began}
