"""The measurements of a step. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """The measurements of a step, the same at all workers, which exchange what it is made of.

    Times are in seconds. None stands for an unknown value: a loss that the program doesn't give, or a
    noise scale before two workers have measured one. With an `interval` of more than one step, times
    and bytes are the mean over the steps since the last record.

    Args:
        step: steps done since training started.
        cluster_size: the number of workers.
        batch_size: samples of all workers together.
        trained_samples: of all workers, since training started.
        loss: mean over the workers, weighted by their samples.
        learning_rate: at this step.
        seconds: from step to step, at the slowest worker, without resizes.
        compute_seconds: of each worker, its step without its communication. In synchronous training
            this, and not the time of a step, shows which worker is slow.
        communication_seconds: in collectives, at the worker that spent least there: it came last, and
            waited for no other.
        exposed_seconds: the same, as far as the program waited for it; the backward pass hid the rest.
        hidden_fraction: of all workers' time in collectives, how much was hidden, 0 to 1.
        received_bytes: by each worker, from all others together.
        received_from: bytes that this worker received from each rank. With the next, the only field
            that differs between workers.
        bandwidth_from: the same in bytes a second of `communication_seconds`.
        gradient_norm: of the mean over all workers.
        gradient_variance: mean squared distance of a worker's gradient (with shards: a shard's) from
            the mean over all.
        gradient_noise_scale: in samples, see `ms_kungfu.monitoring.noise_scale`; infinite if noise
            hides the gradient.
        update_ratio: norm of the last measured step's update over the norm of the weights.
        monitor_seconds: CPU time of monitoring, at the worker that spent most.
        resize_seconds: duration of the last change of the cluster; None before the first.
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
        """The rank that computed longest."""
        return max(range(len(self.compute_seconds)), key=self.compute_seconds.__getitem__)

    @property
    def slowdown(self) -> float:
        """The slowest worker's computation over the median one's; of two workers, over the other's."""
        ordered = sorted(self.compute_seconds)
        median = ordered[(len(ordered) - 1) // 2]
        return ordered[-1] / median if median > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON.

        JSON has no infinity; it is the text "inf".
        """
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.7g}")
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
