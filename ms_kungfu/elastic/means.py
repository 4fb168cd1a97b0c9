"""The mean of a number, such as a loss, over the workers of a training."""

from __future__ import annotations

from typing import Any

import numpy as np

from ms_kungfu import comm, runtime
from ms_kungfu.elastic.program import is_behind
from ms_kungfu.monitoring.monitor import number_of


def mean(value: Any, samples: float = 1) -> float | None:
    """Return the mean of a number over the workers, weighted by `samples`.

    Collective, in synchronous training: all workers make the call in the same steps. Call it before
    ``step_end``, because a worker that joins there doesn't run the code after it in that step. The
    code after an epoch may call it, too. At a worker that has left, nothing is sent.

    If a worker fails meanwhile, the mean is over the other workers.

    Args:
        value: a number, a tensor, whose mean counts, or outputs of which the first is that. None if
            this worker has no number; then it has no weight either.
        samples: this worker's weight: the number of samples that `value` is the mean of.

    Returns:
        The mean, with the same bits on all workers. None if no worker has a number. At a worker that
        has left, its own number.

    Raises:
        ValueError: if `samples` is negative.
        KungFuError: see :func:`ms_kungfu.comm.all_reduce`.
    """
    if samples < 0:
        raise ValueError(f"samples must be at least 0, got {samples!r}")
    own = None if value is None else number_of(value)
    if runtime.detached() or is_behind():
        return own
    weighted = np.zeros(2) if own is None or not samples else np.array([own * samples, samples], np.float64)
    total, weight = comm.all_reduce(weighted, name="kungfu/mean")
    return float(total / weight) if weight else None
