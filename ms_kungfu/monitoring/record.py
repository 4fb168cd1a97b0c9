"""Define the record of one step's measurements. This module uses no clock and no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """The measurements of one step.

    The workers exchange their measurements, so the record is the same on all workers, except for
    `received_from` and `bandwidth_from`. Times are in seconds. None means that a value isn't known. For
    example, the loss isn't known if the program doesn't report it. If the monitor measures only every
    `interval`-th step, times and bytes are the mean over the steps since the last record.

    Args:
        step: the number of steps done since training started.
        cluster_size: the number of workers.
        batch_size: the number of samples in the step, over all workers.
        trained_samples: the number of samples on which all workers have trained since training started.
        loss: the mean loss over the workers, weighted by their numbers of samples.
        learning_rate: the learning rate of this step.
        seconds: the time from the end of the previous step to the end of this step, at the slowest
            worker, without resizes.
        compute_seconds: for each worker, the duration of the step without communication. In synchronous
            training, all workers' steps take equally long, so this field shows which worker is slow.
        communication_seconds: the time in collectives, at the worker for which it was shortest.
            That worker arrived last, so it didn't wait for another worker.
        exposed_seconds: the part of the time in collectives for which the program had to wait. The
            rest overlapped with the backward pass.
        hidden_fraction: the fraction of all workers' time in collectives that overlapped with the
            backward pass, 0 to 1.
        received_bytes: for each worker, the bytes that it received from all other workers.
        received_from: the bytes that this worker received from each rank.
        bandwidth_from: `received_from` divided by `communication_seconds`, in bytes per second.
        gradient_norm: the norm of the gradient after averaging over all workers.
        gradient_variance: the mean squared distance between a worker's gradient (with shards: a shard's
            gradient) and the mean gradient.
        gradient_noise_scale: the noise scale in samples; see `ms_kungfu.monitoring.noise_scale`. It is
            infinite if noise hides the gradient, and None before the first step with two workers or
            shards.
        update_ratio: the norm of the last measured step's update, divided by the norm of the weights.
        monitor_seconds: the CPU time of monitoring in the step, at the worker with the highest CPU
            time.
        resize_seconds: the duration of the last change of the cluster; None before the first change.
    """

    step: int
    cluster_size: int
    batch_size: int
    trained_samples: int
    loss: float | None
    learning_rate: float | None
    seconds: float
    compute_seconds: tuple[float, ...]
    communication_seconds: float
    exposed_seconds: float
    hidden_fraction: float
    received_bytes: tuple[int, ...]
    received_from: tuple[int, ...]
    bandwidth_from: tuple[float, ...]
    gradient_norm: float | None
    gradient_variance: float | None
    gradient_noise_scale: float | None
    update_ratio: float | None
    monitor_seconds: float
    resize_seconds: float | None

    @property
    def slowest(self) -> int:
        """The rank with the longest computation."""
        return max(range(len(self.compute_seconds)), key=self.compute_seconds.__getitem__)

    @property
    def slowdown(self) -> float:
        """The slowest worker's computation time, divided by the median.

        With two workers, the median is the faster worker's time.
        """
        ordered = sorted(self.compute_seconds)
        median = ordered[(len(ordered) - 1) // 2]
        return ordered[-1] / median if median > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON; infinity becomes "inf", because JSON has no such number."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.7g}")
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
