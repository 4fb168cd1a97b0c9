"""Policies that choose the cluster size and learning rate from the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ms_kungfu.elastic.policies.throughput import candidates
from ms_kungfu.elastic.policy import Decision, Metrics, Policy


class NoiseScalePolicy(Policy):
    """Grow the cluster while the noise scale favors a larger batch; if it doesn't, shrink the cluster.

    Each worker keeps its local batch size `b`, so a step of `n` workers uses ``B = n * b`` samples.
    With a learning rate that fits the batch, a step makes the fraction ``1 / (1 + noise_scale /
    B)`` of the progress of a step without noise. With `n` workers, a step takes ``t(n)`` seconds
    for computation and communication. The policy measures ``t(n)`` at each size that the cluster
    reaches, and extrapolates to other sizes.

    For each size `n`, the policy computes how long training takes to make the progress that the
    current size `m` makes in H seconds. This takes ``H * progress rate(m) / progress rate(n)`` seconds,
    plus the duration of the resize. The cost of the size is ``time * n ** price``, and the best size
    has the lowest cost. The policy requests the best size under two conditions. Its cost must be lower
    than the current size's cost by the fraction `improvement`. It must also have been the best size in
    `patience` consecutive comparisons.

    If an `ElasticDataset` has a fixed global batch, that batch changes in proportion as soon as the
    cluster has the new size. With shards, the number of shards changes, but not their shape.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018.

    Args:
        max_size, min_size, sizes: see `ThroughputPolicy`.
        price: the price of a worker relative to time. 0 minimizes the training time, 1 minimizes
            the worker-seconds. The default of 0.5 minimizes the product ``time * worker-seconds``.
        improvement: the fraction of the cost that a change must save. A change back to the previous
            size must save twice that fraction, because the noise scale is a moving average.
        patience: the number of consecutive comparisons in which a size must be the best.
        interval: the number of steps between two comparisons.
        min_measurements: the number of noise scale measurements before the first change.
        resize_time: the assumed duration of a resize in seconds, until a resize has been measured.
        horizon: H in seconds. The default is the time for the remaining samples
            (``total_samples``). If their number isn't known, it is the time that training has run
            so far.
        max_step: the largest factor by which the cluster grows or shrinks in one resize. It limits
            the range of the extrapolation.
        probe: the number of steps of a single worker before the policy requests a second worker to
            measure the noise. A single worker can measure the noise only with shards.
        warmup: after each resize, the policy doesn't measure this number of steps, because code is
            compiled in them.

    Raises:
        ValueError: for a value outside of its range.
    """

    def __init__(
        self,
        max_size: int,
        min_size: int = 1,
        sizes: Sequence[int] | None = None,
        price: float = 0.5,
        improvement: float = 0.05,
        patience: int = 2,
        interval: int = 5,
        min_measurements: int = 10,
        resize_time: float = 5.0,
        horizon: float | None = None,
        max_step: float = 2.0,
        probe: int = 500,
        warmup: int = 3,
    ) -> None:
        self._sizes = candidates(min_size, max_size, sizes)
        if not 0 <= price <= 1:
            raise ValueError(f"price must be from 0 (time only) to 1 (worker-seconds only), got {price!r}")
        if not 0 <= improvement < 1:
            raise ValueError(f"improvement must be between 0 and 1, got {improvement!r}")
        if min(patience, interval, probe) < 1 or min(min_measurements, warmup) < 0:
            raise ValueError(
                "patience, interval and probe must be at least 1, and min_measurements and warmup must be at least "
                f"0, got {patience=}, {interval=}, {probe=}, {min_measurements=}, {warmup=}"
            )
        if not max_step > 1 or not resize_time >= 0 or (horizon is not None and not horizon > 0):
            raise ValueError(
                "max_step must be above 1, resize_time must be at least 0, and horizon must be positive, got "
                f"{max_step=}, {resize_time=}, {horizon=}"
            )
        self._price, self._improvement, self._patience, self._interval = price, improvement, patience, interval
        self._min_measurements, self._resize_time, self._horizon = min_measurements, resize_time, horizon
        self._max_step, self._probe, self._warmup = max_step, probe, warmup
        self._times: dict[int, tuple[float, float]] = {}  # size -> moving averages of the step and communication times
        self._wanted: int | None = None
        self._wanted_for = 0
        self._resizes: list[float] = []  # durations in seconds
        self._size = 0
        self._came_from = 0

    # -- measurements -------------------------------------------------------------------------------------------------

    def step_time(self, size: int) -> float:
        """Return the duration of a step at `size` in seconds, measured or extrapolated from other sizes."""
        if size in self._times:
            return self._times[size][0]
        nearest = min(self._times, key=lambda known: abs(math.log(known / size)))
        seconds, communication = self._times[nearest]
        if len(self._times) > 1:
            # Extrapolate along a line through the two nearest measured sizes. The line must not descend, because more
            # workers don't make a step shorter.
            other = min((s for s in self._times if s != nearest), key=lambda known: abs(math.log(known / size)))
            slope = max(0.0, (self._times[other][0] - seconds) / (other - nearest))
        else:
            slope = communication / (nearest - 1) if nearest > 1 else 0.0
        return max(seconds + slope * (size - nearest), seconds - communication, 1e-9)

    def cost(self, size: int, q: Metrics, noise_scale: float, horizon: float) -> float:
        """Return the cost of a size, ``time * size ** price``.

        Here, the time is how long training at that size takes to make the progress that the current
        size makes in `horizon` seconds.

        Args:
            size: the number of workers.
            q: the current metrics.
            noise_scale: the noise scale in samples.
            horizon: how many seconds training would continue at the current size.
        """

        def seconds_of_progress(n: int) -> float:
            return self.step_time(n) * (1 + noise_scale / (n * q.local_batch_size))

        seconds = horizon * seconds_of_progress(size) / seconds_of_progress(q.cluster_size)
        if size != q.cluster_size:
            seconds += self.resize_time
        return seconds * float(size) ** self._price

    @property
    def resize_time(self) -> float:
        """The expected duration of a resize in seconds: the mean of the last three resizes."""
        return sum(self._resizes[-3:]) / len(self._resizes[-3:]) if self._resizes else self._resize_time

    def horizon(self, q: Metrics) -> float:
        """Return how many seconds training would continue at the current size, given the metrics `q`."""
        if self._horizon is not None:
            return self._horizon
        if q.total_samples is not None and q.batch_size:
            steps = max(0.0, (q.total_samples - q.trained_samples) / q.batch_size)
            return steps * self.step_time(q.cluster_size)
        return q.training_time

    # -- decisions ----------------------------------------------------------------------------------------------------

    def after_step(self, q: Metrics) -> Decision | None:
        """Return a decision for another size if, given the metrics `q`, its cost is sufficiently lower."""
        self._observe(q)
        if q.steps_at_size <= self._warmup or q.cluster_size not in self._times or not q.batch_size:
            return None
        measures_alone = q.shards is not None and q.shards > 1
        overdue = q.gradient_noise_scale is None or q.steps_at_size >= self._probe
        if q.cluster_size == 1 and overdue and not measures_alone:
            second = min((size for size in self._sizes if size > 1), default=None)
            if second is None or (q.gradient_noise_scale is None and q.steps_at_size < self._interval):
                return None
            return self._change(second, "one worker can't measure the noise scale alone; two workers can")
        if q.gradient_noise_scale is None or q.noise_scale_steps < self._min_measurements or q.step % self._interval:
            return None
        # If noise hides the gradient, the noise scale is infinite. Limit it to a number far above the largest batch.
        noise = min(q.gradient_noise_scale, 1e3 * q.local_batch_size * self._sizes[-1])
        horizon = self.horizon(q)
        here = q.cluster_size
        near = [s for s in self._sizes if here / self._max_step <= s <= here * self._max_step and s != here]
        if not near:  # compare with the next smaller and the next larger size, however different they are
            near = [s for s in self._sizes if s < here][-1:] + [s for s in self._sizes if s > here][:1]
        stay = self.cost(here, q, noise, horizon)
        best = min(near, key=lambda size: self.cost(size, q, noise, horizon), default=here)
        change = self.cost(best, q, noise, horizon) if best != here else stay
        least = self._improvement * (2 if best == self._came_from else 1)
        if change >= (1 - least) * stay:
            self._wanted, self._wanted_for = None, 0
            return None
        self._wanted_for = self._wanted_for + 1 if best == self._wanted else 1
        self._wanted = best
        if self._wanted_for < self._patience:
            return None
        return self._change(
            best,
            f"noise scale {q.gradient_noise_scale:.3g} at a batch of {q.batch_size}: {best} workers instead of {here} "
            f"cost {change / stay - 1:+.0%} (a step {self.step_time(here) * 1e3:.3g} -> "
            f"{self.step_time(best) * 1e3:.3g} ms, the resize {self.resize_time:.2g} s, horizon {horizon:.3g} s)",
        )

    def _change(self, size: int, reason: str) -> Decision:
        self._wanted, self._wanted_for = None, 0
        return Decision(reason, size=size, keeps_local_batch=True)

    def _observe(self, q: Metrics) -> None:
        if q.cluster_size != self._size:
            if self._size and q.resize_time is not None:
                self._resizes.append(q.resize_time)
            self._came_from, self._size = self._size, q.cluster_size
            self._wanted, self._wanted_for = None, 0
        if q.steps_at_size <= self._warmup or q.step_time is None:
            return
        communication = q.communication_time or 0.0
        old = self._times.get(q.cluster_size)
        # The moving average adapts fast at first. Later the average covers about 20 steps, so that one slow step has
        # little effect.
        weight = max(0.05, 1 / (q.steps_at_size - self._warmup))
        if old is None:
            self._times[q.cluster_size] = (q.step_time, communication)
            return
        seconds = min(q.step_time, 3 * old[0])
        self._times[q.cluster_size] = (
            old[0] + weight * (seconds - old[0]),
            old[1] + weight * (min(communication, seconds) - old[1]),
        )

    def state(self) -> Any:
        """Return the state that a joining worker needs to make the same decisions, as JSON."""
        return {
            "times": [[size, *times] for size, times in sorted(self._times.items())],
            "wanted": [self._wanted, self._wanted_for],
            "resizes": self._resizes,
            "size": self._size,
            "came_from": self._came_from,
        }

    def restore(self, state: Any) -> None:
        """Continue from another worker's `state`."""
        self._times = {size: (seconds, communication) for size, seconds, communication in state["times"]}
        self._wanted, self._wanted_for = state["wanted"]
        self._resizes, self._size, self._came_from = list(state["resizes"]), state["size"], state["came_from"]


class NoiseScaleLearningRate(Policy):
    """Set the learning rate that fits the batch.

    The rate is ``max_learning_rate / (1 + noise_scale / batch_size)``. Here, the noise scale is the
    paper's simple noise scale, which doesn't include the curvature.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equation 2.9.

    Args:
        max_learning_rate: the learning rate for an infinite batch, which has no noise.
        exponent: the exponent of the denominator. Use 1 for plain SGD; for Adam, the paper finds an
            exponent between 0.5 and 1.
        tolerance: the policy changes the rate only if the relative change is larger than this.
        interval: the number of steps between two checks.
        min_measurements: the number of noise scale measurements before the first change.

    Raises:
        ValueError: for a value outside of its range.
    """

    def __init__(
        self,
        max_learning_rate: float,
        exponent: float = 1.0,
        tolerance: float = 0.05,
        interval: int = 1,
        min_measurements: int = 10,
    ) -> None:
        if not max_learning_rate > 0 or not 0 < exponent <= 1 or not 0 <= tolerance < 1 or interval < 1:
            raise ValueError(
                "max_learning_rate must be positive, exponent and tolerance must be between 0 and 1, and interval "
                f"must be at least 1, got {max_learning_rate=}, {exponent=}, {tolerance=}, {interval=}"
            )
        self._max, self._exponent, self._tolerance = max_learning_rate, exponent, tolerance
        self._interval, self._min_measurements = interval, min_measurements
        self._last: float | None = None

    def after_step(self, q: Metrics) -> Decision | None:
        """Return a decision for another learning rate if the metrics `q` require one."""
        noise = q.gradient_noise_scale
        if noise is None or q.noise_scale_steps < self._min_measurements or not q.batch_size:
            return None
        if q.step % self._interval:
            return None
        rate = self._max / (1 + noise / q.batch_size) ** self._exponent if math.isfinite(noise) else None
        if rate is None or (self._last and abs(rate / self._last - 1) <= self._tolerance):
            return None
        self._last = rate
        return Decision(f"noise scale {noise:.3g} at a batch of {q.batch_size}", learning_rate=rate)

    def state(self) -> Any:
        """Return the state that a joining worker needs to make the same decisions, as JSON."""
        return self._last

    def restore(self, state: Any) -> None:
        """Continue from another worker's `state`."""
        self._last = state
