"""Compute the mean of a number, such as a loss, over the workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ms_kungfu import comm, runtime
from ms_kungfu.elastic.program import is_behind
from ms_kungfu.monitoring.monitor import number_of


def mean(value: Any, samples: float = 1) -> float | None:
    """Return the mean of a number over the workers, weighted by `samples`.

    The function is collective: in synchronous training, all workers must call it in the same steps.
    Call the function before ``step_end``, because a worker that joins in ``step_end`` doesn't run
    the code after ``step_end`` in that step. The code after an epoch may also call the function. On
    a worker that has left, the function doesn't communicate.

    If a worker fails during the call, the result is the mean over the other workers.

    Args:
        value: this worker's number. A tensor counts as the mean of its elements, and a list or tuple of
            outputs as its first output. If `value` is None, this worker doesn't contribute.
        samples: this worker's weight: the number of samples over which `value` is the mean.

    Returns:
        The mean, bitwise identical on all workers. None if no worker has a number. On a worker that
        has left: its own number.

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
