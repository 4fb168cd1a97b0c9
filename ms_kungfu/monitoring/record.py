"""What is known of a step once it is done. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """The same at all workers, as it is made of what they tell each other. Times are in seconds.

    None stands for what isn't known: a loss that nobody gave, a noise scale before two workers have measured one.
    With an `interval` of more than one step, times and bytes are the mean over the steps since the last record.
    """

    step: int
    cluster_size: int
    batch_size: int
    """Samples of all workers together."""
    trained_samples: int
    """Of all workers, since training started."""
    loss: float | None
    """Mean over the workers, weighted by their samples."""
    learning_rate: float | None
    seconds: float
    """From step to step, at the slowest worker, without resizes."""
    compute_seconds: tuple[float, ...]
    """Of each worker: its step without what it spent in communication. In synchronous training this, and not the time
    of a step, tells who is slow."""
    communication_seconds: float
    """In collectives, at the worker that spent least there: it came last, and waited for nobody."""
    exposed_seconds: float
    """The same, as far as the program waited for it; the rest was hidden behind the backward pass."""
    hidden_fraction: float
    """Of all workers' time in collectives, how much was hidden."""
    received_bytes: tuple[int, ...]
    """By each worker, from all others together."""
    received_from: tuple[int, ...]
    """By this worker, from each rank. With the next, the only field that differs between workers."""
    bandwidth_from: tuple[float, ...]
    """The same in bytes a second of `communication_seconds`."""
    gradient_norm: float | None
    """Of the mean over all workers."""
    gradient_variance: float | None
    """Mean squared distance of a worker's gradient (with shards: a shard's) from the mean over all."""
    gradient_noise_scale: float | None
    """In samples, see `ms_kungfu.monitoring.noise_scale`; infinite where noise hides the gradient."""
    update_ratio: float | None
    """Norm of the last measured step's update over the norm of the weights."""
    monitor_seconds: float
    """CPU time that monitoring took, at the worker where it took most."""
    resize_seconds: float | None
    """What the last change of the cluster took; None before the first."""

    @property
    def slowest(self) -> int:
        """The rank that computed longest."""
        return max(range(len(self.compute_seconds)), key=self.compute_seconds.__getitem__)

    @property
    def slowdown(self) -> float:
        """How much longer the slowest worker computes than the median one (of two, than the other)."""
        ordered = sorted(self.compute_seconds)
        median = ordered[(len(ordered) - 1) // 2]
        return ordered[-1] / median if median > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity; it is written as the text "inf"."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.7g}")
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
