"""Records in MindSpore's SummaryRecord."""

from __future__ import annotations

import math
from typing import Any

from ms_kungfu.monitoring.record import StepRecord

_SCALARS = (
    "loss",
    "learning_rate",
    "cluster_size",
    "batch_size",
    "seconds",
    "communication_seconds",
    "exposed_seconds",
    "hidden_fraction",
    "slowdown",
    "gradient_norm",
    "gradient_variance",
    "gradient_noise_scale",
    "update_ratio",
)


def write(summary: Any, record: StepRecord) -> None:
    """Adds a record's scalars as ``kungfu/...`` to an open SummaryRecord."""
    import mindspore as ms
    import numpy as np

    for name in _SCALARS:
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            summary.add_value("scalar", f"kungfu/{name}", ms.Tensor(np.float32(value)))
    summary.record(record.step)
