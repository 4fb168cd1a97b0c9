"""What a training tells its monitor of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.monitoring.record import StepRecord


def begin(monitor: Monitor, optimizers: Sequence[Any], step: int) -> None:
    # Not all that requires a gradient: MindSpore's moments do, by their copied flags.
    monitor.begin([p for optimizer in optimizers for p in optimizer.parameters], step)


def step_end(
    monitor: Monitor,
    optimizers: Sequence[Any],
    step: int,
    loss: Any,
    samples: int | None,
    shards: Sequence[int],
    trained: int | None,
) -> StepRecord | None:
    """The record of the step just done, its number counted from 1; None between two that are measured. Collective."""
    from ms_kungfu.elastic.learning_rates import learning_rate_of  # loads MindSpore

    if samples is None:
        samples = next((o.device_batch_size for o in optimizers if getattr(o, "device_batch_size", None)), 0)
    monitor.gradient_scale = float(getattr(optimizers[0], "loss_scale", 1.0)) if optimizers else 1.0
    return monitor.step_end(samples, loss, learning_rate_of(optimizers, step - 1), step, shards, trained)
