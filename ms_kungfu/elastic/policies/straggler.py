"""A policy that evicts a worker which delays all others."""

from __future__ import annotations

import statistics
from typing import Any

from ms_kungfu.elastic.policy import Decision, Metrics, Policy


class StragglerPolicy(Policy):
    """Evict a worker that computes much longer than the median worker.

    It looks at what a worker computes, not at how long its steps take. In synchronous training all
    steps take as long as the slowest worker's. With two workers the other one is the median. It evicts
    one worker at a time. It evicts none if that would lose more than it wins: the others' step, without
    the straggler, times the workers left, against now.

    Args:
        slowdown: the factor between a straggler's computation and the median, above 1.
        patience: for how many steps in a row.
        min_size: the fewest workers that an eviction leaves.
        warmup: steps after a change that are ignored.

    Raises:
        ValueError: for a value outside of its range.
    """

    def __init__(self, slowdown: float = 2.0, patience: int = 20, min_size: int = 1, warmup: int = 3) -> None:
        if not slowdown > 1:
            raise ValueError(f"slowdown is a factor above 1, got {slowdown!r}")
        if patience < 1 or min_size < 1 or warmup < 0:
            raise ValueError(
                f"patience and min_size are 1 or more, warmup is 0 or more, got {patience=}, {min_size=}, {warmup=}"
            )
        self._slowdown, self._patience, self._min_size, self._warmup = slowdown, patience, min_size, warmup
        self._slow_for: dict[int, int] = {}  # rank -> steps in a row

    def after_step(self, q: Metrics) -> Decision | None:
        """Return an eviction if the metrics `q` have shown a straggler for long enough."""
        times = q.compute_times
        if q.steps_at_size <= self._warmup or len(times) < 2 or len(times) != q.cluster_size:
            self._slow_for = {}
            return None
        median = statistics.median_low(times)
        slow = {rank for rank, seconds in enumerate(times) if seconds > self._slowdown * median}
        self._slow_for = {rank: self._slow_for.get(rank, 0) + 1 for rank in slow}
        overdue = [rank for rank, steps in self._slow_for.items() if steps >= self._patience]
        if not overdue or q.cluster_size - 1 < self._min_size:
            return None
        rank = max(overdue, key=times.__getitem__)
        others = max(seconds for r, seconds in enumerate(times) if r != rank)
        if (len(times) - 1) / others <= len(times) / times[rank]:
            return None
        self._slow_for = {}
        return Decision(
            f"rank {rank} has computed more than {self._slowdown:g} times as long as the median worker for "
            f"{self._patience} steps (now {times[rank] * 1e3:.3g} ms against {median * 1e3:.3g} ms)",
            evict=(rank,),
        )

    def state(self) -> Any:
        """Return what a joining worker needs to decide alike, as JSON."""
        return sorted(self._slow_for.items())

    def restore(self, state: Any) -> None:
        """Take another worker's `state`."""
        self._slow_for = dict(state)
