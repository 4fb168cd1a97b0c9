"""How an epoch is cut into steps and a step into the shares of the workers. Pure: positions in, positions out.

An epoch is a permutation of the samples, the same at every worker. Training walks along it: a step takes the next
samples of the permutation, a *global batch*, and each worker trains one contiguous block of them. All that has to be
known to go on after any change of membership is how far the walk has come.

Rules
- A step takes `global_batch` samples. What is left at the end of an epoch is trained too: when fewer than one and a
  half global batches remain, the last two steps share them evenly (the last step alone when one global batch or less
  remains). So no step is tiny, none is larger than asked for, and an epoch has ``ceil(total / global_batch)`` steps at
  any size. With `drop_remainder` the part that doesn't fill a global batch is left out instead.
- A step's samples are dealt in blocks as even as possible; the first ranks have one more where it doesn't divide.
- Only where a step has fewer samples than there are workers (the cluster grew when the epoch was all but over), a
  worker without a sample of its own repeats the step's last one: it has to bring a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def permutation(total: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The order of the samples in `epoch`, the same on every worker: int64 of shape (total,)."""
    if not shuffle:
        return np.arange(total, dtype=np.int64)
    return np.random.default_rng((seed, epoch)).permutation(total)


def step_stop(start: int, total: int, global_batch: int, drop_remainder: bool = False) -> int:
    """Where the step that starts at `start` ends; `start` itself when the epoch is over."""
    left = total - start
    if drop_remainder:
        return start + global_batch if left >= global_batch else start
    if left <= global_batch:
        return total
    if 2 * left < 3 * global_batch:
        return start + (left + 1) // 2
    return start + global_batch


def share(start: int, stop: int, rank: int, size: int) -> tuple[int, int]:
    """The block ``[first, last)`` of the step ``[start, stop)`` that `rank` of `size` trains; never empty."""
    each, extra = divmod(stop - start, size)
    first = start + rank * each + min(rank, extra)
    last = first + each + (1 if rank < extra else 0)
    return (first, last) if last > first else (stop - 1, stop)


def steps(start: int, total: int, global_batch: int, drop_remainder: bool = False) -> Iterator[tuple[int, int]]:
    """The steps ``(start, stop)`` from `start` to the end of the epoch."""
    while True:
        stop = step_stop(start, total, global_batch, drop_remainder)
        if stop == start:
            return
        yield start, stop
        start = stop


def count_steps(start: int, total: int, global_batch: int, drop_remainder: bool = False) -> int:
    """How many steps are left from `start` on."""
    left = total - start
    return left // global_batch if drop_remainder else -(-left // global_batch)
