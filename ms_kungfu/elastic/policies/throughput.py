"""Define a policy that finds the size beyond which throughput no longer grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ms_kungfu.elastic.policy import Decision, Metrics, Policy


def candidates(min_size: int, max_size: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the `sizes` that lie between `min_size` and `max_size`.

    If `sizes` is None, start with `min_size`, double it while the result is below `max_size`, and end
    with `max_size`.
    """
    if not 1 <= min_size <= max_size:
        raise ValueError(f"min_size must be from 1 to max_size, got min_size={min_size} and max_size={max_size}")
    if sizes is None:
        sizes = [min_size]
        while sizes[-1] * 2 < max_size:
            sizes.append(sizes[-1] * 2)
        sizes = sorted({*sizes, max_size})
    chosen = tuple(sorted({size for size in sizes if min_size <= size <= max_size}))
    if not chosen:
        raise ValueError(f"none of the sizes {list(sizes)} lies between {min_size} and {max_size}")
    return chosen


class ThroughputPolicy(Policy):
    """Grow the cluster while the throughput (samples per second) grows sufficiently.

    The policy tries one larger size after another. It keeps the last size at which the throughput has
    grown sufficiently.

    Args:
        max_size: the maximum number of workers.
        min_size: the minimum number of workers.
        sizes: the sizes to try, in ascending order. By default, the policy doubles `min_size` up to
            `max_size`.
        efficiency: the fraction of the ideal gain that a larger size must reach. From 2 to 4
            workers, the throughput ideally doubles, so 0.5 requires 1.5 times the throughput.
        window: the number of steps that are measured at a size; the policy uses their median.
        warmup: after each resize, the policy doesn't measure this number of steps, because code is
            compiled in them.
        drop: the fraction by which the throughput at the chosen size must change to start a new
            search. The throughput may change, for example, because of another job on the machine.
            The search begins at the smallest size. With None, there is never a new search.

    Raises:
        ValueError: for a value outside of its range.
    """

    def __init__(
        self,
        max_size: int,
        min_size: int = 1,
        sizes: Sequence[int] | None = None,
        efficiency: float = 0.5,
        window: int = 20,
        warmup: int = 3,
        drop: float | None = 0.3,
    ) -> None:
        if not 0 < efficiency <= 1:
            raise ValueError(
                f"efficiency must be above 0 and at most 1 (a fraction of the ideal gain), got {efficiency!r}"
            )
        if window < 1 or warmup < 0:
            raise ValueError(f"window must be at least 1, and warmup must be at least 0, got {window=}, {warmup=}")
        if drop is not None and not 0 < drop < 1:
            raise ValueError(f"drop must be between 0 and 1, or None, got {drop!r}")
        self._sizes = candidates(min_size, max_size, sizes)
        self._efficiency, self._window, self._warmup, self._drop = efficiency, window, warmup, drop
        self._samples: list[float] = []  # samples per second in the steps at the current size
        self._size = 0  # the size to which `_samples` belongs
        self._found: dict[int, float] = {}  # size -> throughput
        self._settled: float | None = None  # throughput at the final size; None during a search

    def after_step(self, q: Metrics) -> Decision | None:
        """Return a decision for the next size to try or for the best size, given the metrics `q`."""
        if q.cluster_size != self._size:
            self._size, self._samples = q.cluster_size, []
        if q.steps_at_size <= self._warmup or not q.step_time or not q.batch_size:
            return None
        self._samples.append(q.batch_size / q.step_time)
        if len(self._samples) < self._window:
            return None
        now, self._samples = statistics.median(self._samples), []
        if self._settled is not None:
            if self._drop is None or abs(now / self._settled - 1) <= self._drop:
                return None
            changed = f"throughput at {q.cluster_size} workers went from {self._settled:.4g} to {now:.4g} samples/s"
            self._settled, self._found = None, {}
            if q.cluster_size > self._sizes[0]:
                return Decision(f"{changed}; searching anew", size=self._sizes[0])
        size = q.cluster_size
        self._found[size] = now
        smaller = max((s for s in self._found if s < size), default=None)
        if smaller is not None and not self._worth(smaller, size):
            self._settled = self._found[smaller]
            gained = now / self._found[smaller]
            return Decision(
                f"{size} workers train {now:.4g} samples/s, {gained:.2f} times as many as {smaller} workers, but "
                f"{self._asked(smaller, size):.2f} times are required",
                size=smaller,
            )
        larger = min((s for s in self._sizes if s > size), default=None)
        if larger is not None and larger in self._found and not self._worth(size, larger):
            larger = None
        if larger is None:
            self._settled = now
            return None
        return Decision(f"{size} workers train {now:.4g} samples/s; trying {larger}", size=larger)

    def _asked(self, small: int, large: int) -> float:
        return 1 + self._efficiency * (large / small - 1)

    def _worth(self, small: int, large: int) -> bool:
        return self._found[large] >= self._asked(small, large) * self._found[small]

    def state(self) -> Any:
        """Return the state that a joining worker needs to make the same decisions, as JSON."""
        return [self._samples, self._size, sorted(self._found.items()), self._settled]

    def restore(self, state: Any) -> None:
        """Continue from another worker's `state`."""
        self._samples, self._size, found, self._settled = state
        self._found = dict(found)
