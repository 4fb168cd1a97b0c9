"""Define a policy that evicts a worker that delays all other workers."""

from __future__ import annotations

import statistics
from typing import Any

from ms_kungfu.elastic.policy import Decision, Metrics, Policy


class StragglerPolicy(Policy):
    """Evict a worker that computes much longer than the median worker.

    The policy compares the workers' computation times. It can't compare the durations of their steps,
    because in synchronous training each step takes as long as the slowest worker needs. With two
    workers, the median is the faster worker's time. The policy evicts one worker at a time, and only
    if this raises the throughput. That is, the remaining workers' steps must become fast enough to
    outweigh the loss of one worker.

    Args:
        slowdown: a worker is a straggler if its computation takes at least this multiple of the
            median; above 1.
        patience: the number of consecutive slow steps after which the worker is evicted.
        min_size: the minimum number of workers that remain after an eviction.
        warmup: after each change of the cluster, the policy ignores this number of steps.

    Raises:
        ValueError: for a value outside of its range.
    """

    def __init__(self, slowdown: float = 2.0, patience: int = 20, min_size: int = 1, warmup: int = 3) -> None:
        if not slowdown > 1:
            raise ValueError(f"slowdown must be a factor above 1, got {slowdown!r}")
        if patience < 1 or min_size < 1 or warmup < 0:
            raise ValueError(
                f"patience and min_size must be at least 1, and warmup must be at least 0, got {patience=}, "
                f"{min_size=}, {warmup=}"
            )
        self._slowdown, self._patience, self._min_size, self._warmup = slowdown, patience, min_size, warmup
        self._slow_for: dict[int, int] = {}  # rank -> consecutive slow steps

    def after_step(self, q: Metrics) -> Decision | None:
        """Return a decision to evict a worker if the metrics `q` have shown a straggler for long enough."""
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
        """Return the state that a joining worker needs to make the same decisions, as JSON."""
        return sorted(self._slow_for.items())

    def restore(self, state: Any) -> None:
        """Continue from another worker's `state`."""
        self._slow_for = dict(state)
