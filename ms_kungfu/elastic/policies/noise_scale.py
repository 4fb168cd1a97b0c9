"""A policy for as many workers as the gradient's noise scale justifies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ms_kungfu.elastic.policies.throughput import candidates
from ms_kungfu.elastic.policy import Decision, Metrics, Policy


class NoiseScalePolicy(Policy):
    """Grow the cluster while the gradient noise scale says that the larger batch pays, else shrink it.

    A worker's batch stays the same, so `n` workers train ``B = n * b`` samples a step. With a learning
    rate that fits the batch, a step makes ``1 / (1 + noise_scale / B)`` of the progress that it would
    make without noise. It takes ``t(n)`` seconds: computation plus communication. These are measured at
    the sizes of this training so far, and extrapolated to others.

    The policy compares sizes by the time to make the progress of H seconds at the present size `m`.
    Training at `n` needs ``H * progress rate(m) / progress rate(n)`` plus the cost of the resize
    itself. The best size has the smallest ``time * n ** price``. The policy asks for it if it is
    `improvement` better than staying, and was the best one `patience` times in a row.

    An `ElasticDataset` that holds its global batch changes it in proportion, when the new size comes
    true. With shards it has so many more or fewer, of the same shape.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018.

    Args:
        max_size, min_size, sizes: see `ThroughputPolicy`.
        price: of a worker against time. With 0 training is the fastest, whatever it takes. The default
            of 0.5 weighs time and worker-seconds alike: ``time * worker-seconds`` is least. With 1 it
            takes the fewest worker-seconds.
        improvement: the least part of the cost that a change has to save. Returning to the size before
            the last change has to save twice as much: the noise scale is a moving average, and lags.
        patience: how often in a row a size has to be the best.
        interval: steps between two comparisons.
        min_measurements: of the noise scale, since training started, before the first change.
        resize_time: seconds that a change costs, until one has been measured.
        horizon: H in seconds. By default the time that the samples left take (``total_samples``); if
            that isn't known, as long as training has been going on.
        max_step: the largest factor by which the cluster grows or shrinks at a time; don't trust an
            extrapolation further than that.
        probe: steps that a single worker trains before a second one is requested, to measure the noise
            again. One worker alone can't measure it, unless it trains shards.
        warmup: steps after a change that are not measured, as they compile.

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
            raise ValueError(f"price lies between 0 (time counts) and 1 (worker-seconds count), got {price!r}")
        if not 0 <= improvement < 1:
            raise ValueError(f"improvement is a part between 0 and 1, got {improvement!r}")
        if min(patience, interval, probe) < 1 or min(min_measurements, warmup) < 0:
            raise ValueError(
                f"patience, interval and probe are 1 or more, min_measurements and warmup 0 or more, got {patience=}, "
                f"{interval=}, {probe=}, {min_measurements=}, {warmup=}"
            )
        if not max_step > 1 or not resize_time >= 0 or (horizon is not None and not horizon > 0):
            raise ValueError(
                f"max_step is above 1, resize_time not negative, horizon positive, got {max_step=}, {resize_time=}, "
                f"{horizon=}"
            )
        self._price, self._improvement, self._patience, self._interval = price, improvement, patience, interval
        self._min_measurements, self._resize_time, self._horizon = min_measurements, resize_time, horizon
        self._max_step, self._probe, self._warmup = max_step, probe, warmup
        self._times: dict[int, tuple[float, float]] = {}  # size -> moving averages of a step and its communication
        self._wanted: int | None = None
        self._wanted_for = 0
        self._resizes: list[float] = []  # seconds of each
        self._size = 0
        self._came_from = 0

    # -- measurements -------------------------------------------------------------------------------------------------

    def step_time(self, size: int) -> float:
        """Return the seconds of a step at `size`, measured or extrapolated from a measured size."""
        if size in self._times:
            return self._times[size][0]
        nearest = min(self._times, key=lambda known: abs(math.log(known / size)))
        seconds, communication = self._times[nearest]
        if len(self._times) > 1:
            # Straight through the two nearest sizes, and never falling: more workers don't make a step shorter.
            other = min((s for s in self._times if s != nearest), key=lambda known: abs(math.log(known / size)))
            slope = max(0.0, (self._times[other][0] - seconds) / (other - nearest))
        else:
            slope = communication / (nearest - 1) if nearest > 1 else 0.0
        return max(seconds + slope * (size - nearest), seconds - communication, 1e-9)

    def cost(self, size: int, q: Metrics, noise_scale: float, horizon: float) -> float:
        """Return ``time * size ** price`` for the progress of the present size in `horizon` seconds.

        Args:
            size: the number of workers.
            q: the metrics of the moment.
            noise_scale: in samples.
            horizon: seconds at the present size.
        """

        def seconds_of_progress(n: int) -> float:
            return self.step_time(n) * (1 + noise_scale / (n * q.local_batch_size))

        seconds = horizon * seconds_of_progress(size) / seconds_of_progress(q.cluster_size)
        if size != q.cluster_size:
            seconds += self.resize_time
        return seconds * float(size) ** self._price

    @property
    def resize_time(self) -> float:
        """The expected cost of a change, in seconds: the mean of the last ones."""
        return sum(self._resizes[-3:]) / len(self._resizes[-3:]) if self._resizes else self._resize_time

    def horizon(self, q: Metrics) -> float:
        """Return for how many seconds training would continue at the present size, by the metrics `q`."""
        if self._horizon is not None:
            return self._horizon
        if q.total_samples is not None and q.batch_size:
            steps = max(0.0, (q.total_samples - q.trained_samples) / q.batch_size)
            return steps * self.step_time(q.cluster_size)
        return q.training_time

    # -- decisions ----------------------------------------------------------------------------------------------------

    def after_step(self, q: Metrics) -> Decision | None:
        """Return a request for another size if it costs enough less by the metrics `q`."""
        self._observe(q)
        if q.steps_at_size <= self._warmup or q.cluster_size not in self._times or not q.batch_size:
            return None
        measures_alone = q.shards is not None and q.shards > 1
        overdue = q.gradient_noise_scale is None or q.steps_at_size >= self._probe
        if q.cluster_size == 1 and overdue and not measures_alone:
            second = min((size for size in self._sizes if size > 1), default=None)
            if second is None or (q.gradient_noise_scale is None and q.steps_at_size < self._interval):
                return None
            return self._change(second, "one worker alone can't measure the noise scale; it takes two")
        if q.gradient_noise_scale is None or q.noise_scale_steps < self._min_measurements or q.step % self._interval:
            return None
        # Noise that hides the gradient: any number above what the largest cluster could average out is enough.
        noise = min(q.gradient_noise_scale, 1e3 * q.local_batch_size * self._sizes[-1])
        horizon = self.horizon(q)
        here = q.cluster_size
        near = [s for s in self._sizes if here / self._max_step <= s <= here * self._max_step and s != here]
        if not near:  # the next one, at any distance
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
        # Fast at first, then over some 20 steps; one delayed step hardly counts.
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
        """Return what a joining worker needs to decide alike, as JSON."""
        return {
            "times": [[size, *times] for size, times in sorted(self._times.items())],
            "wanted": [self._wanted, self._wanted_for],
            "resizes": self._resizes,
            "size": self._size,
            "came_from": self._came_from,
        }

    def restore(self, state: Any) -> None:
        """Take another worker's `state`."""
        self._times = {size: (seconds, communication) for size, seconds, communication in state["times"]}
        self._wanted, self._wanted_for = state["wanted"]
        self._resizes, self._size, self._came_from = list(state["resizes"]), state["size"], state["came_from"]


class NoiseScaleLearningRate(Policy):
    """Set the learning rate that fits the batch.

    It is ``max_learning_rate / (1 + noise_scale / batch_size)``, with the simple noise scale instead of
    the one that knows the curvature.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equation 2.9.

    Args:
        max_learning_rate: the rate without noise, at an endless batch.
        exponent: of the denominator. 1 is for plain SGD; for Adam the paper finds a power between 0.5
            and 1.
        tolerance: changes by a smaller part aren't made.
        interval: steps between two looks.
        min_measurements: of the noise scale, before the first change.

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
                "max_learning_rate is positive, exponent and tolerance lie between 0 and 1, interval is 1 or more, got "
                f"{max_learning_rate=}, {exponent=}, {tolerance=}, {interval=}"
            )
        self._max, self._exponent, self._tolerance = max_learning_rate, exponent, tolerance
        self._interval, self._min_measurements = interval, min_measurements
        self._last: float | None = None

    def after_step(self, q: Metrics) -> Decision | None:
        """Return another learning rate if the metrics `q` ask for one."""
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
        """Return what a joining worker needs to decide alike, as JSON."""
        return self._last

    def restore(self, state: Any) -> None:
        """Take another worker's `state`."""
        self._last = state
