"""Which rank keeps others waiting for so long that it is an event (`job_events.StallBegan`). Pure.

1. A rank sleeps in an operation and says in shared memory for which rank, once that takes longer than a moment. The
   chain of such waits ends at one that lives and sleeps in none (`stuck.stuck_among`).
2. A stall begins once each look for `STALL_S` has found the same process there, and it has ended no step meanwhile. So
   a rank that is always last, and takes its time in each step, is a straggler and no stall, if the program counts
   steps. (`test_slow_rank_that_makes_steps_is_no_stall`.)
3. It ends with the first look that doesn't find the process there, or finds it a step further.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
STALL_S = 2.0


@dataclass
class Stall:
    """Others wait for a process. `began`: it has been reported, with this rank."""

    since: float
    step: int | None
    waiting: Sequence[int]
    began: bool = False
    rank: int | None = None


class StallWatch(Generic[K]):
    """The present stalls."""

    def __init__(self) -> None:
        self._stalls: dict[K, Stall] = {}

    def look(
        self, now: float, waited_for: Mapping[K, Sequence[int]], steps: Mapping[K, int | None]
    ) -> tuple[dict[K, Stall], dict[K, Stall]]:
        """Return the stalls that begin and those that end.

        Args:
            now: in seconds.
            waited_for: the ranks that wait for each process at the end of a chain.
            steps: the last step that each of these has ended; None: not known.
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
