"""The tally: one weight per sample, which counts how often the training used the sample.

Each worker adds `marks` to its gradients. The marks are averaged over the workers like any gradient, and `counted`
converts the mean to whole numbers. So the counts are part of the weights: if a step is undone, or a system goes back to
a checkpoint, the step's counts are undone, too. No system needs its own records.

A worker with b samples sets the mark 1/b at each of its samples and at its slot. At these places, the mean over the
workers, weighted by their samples or not, is 1/S, where S is the number of samples of all workers in the step. So the
mean itself reveals S, without the number of workers that took part, and mean * S is 1 at each sample of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOTS = 16
"""The most workers of a step. Each has its own slot, for example its rank."""
EXTRA = SLOTS + 1
"""Numbers after the samples: the slots, and whether a worker has been asked to stop."""
_ROUNDING = 0.2


def marks(total: int, chosen: NDArray[Any], slot: int, stop: bool) -> NDArray[np.float32]:
    """Return the marks that a worker adds to its gradients, float32 of shape (total + EXTRA,).

    Args:
        total: number of samples of an epoch.
        chosen: the indices of the worker's samples in this step.
        slot: the worker's slot.
        stop: whether the worker has been asked to stop.
    """
    found = np.zeros(total + EXTRA, np.float32)
    np.add.at(found, chosen, np.float32(1 / len(chosen)))
    found[total + slot] = 1 / len(chosen)
    found[-1] = stop
    return found


def counted(mean: Any) -> Any:
    """Compute the numbers that a step adds to the tally, from the mean of the workers' marks, in NumPy or PyTorch.

    The last number is positive if a worker has been asked to stop. The slots are 0.
    """
    added = mean / mean[-EXTRA:-1].max()
    added[-EXTRA:-1] = 0
    return added


@dataclass(frozen=True)
class Trained:
    """How often the training used the samples, according to the final weights."""

    useful: int
    """Number of samples in the weights, where each counts once per epoch."""
    lost: int
    """Number of samples that finished epochs have not trained, summed over the epochs."""
    twice: int
    """Number of times that samples were trained more than once in an epoch."""


def read(counts: NDArray[Any], epochs: float) -> Trained:
    """Compare the counts with the number of epochs that the program reports.

    In an unfinished epoch, a sample may be used or unused. Raise ValueError if a count isn't a whole number: then a
    mean didn't cover exactly the workers that took part.

    >>> read(np.array([2.0, 1.0, 3.0, 2.0]), 2)
    Trained(useful=7, lost=1, twice=1)
    >>> read(np.array([2.0, 1.0, 1.0, 2.0]), 1.5)
    Trained(useful=6, lost=0, twice=0)
    """
    whole = np.rint(counts)
    if np.abs(counts - whole).max() > _ROUNDING:
        worst = int(np.abs(counts - whole).argmax())
        raise ValueError(f"sample {worst} was trained {counts[worst]:.3f} times, which is not a whole number")
    least, most = np.floor(epochs + 1e-6), np.ceil(epochs - 1e-6)
    useful = np.minimum(whole, most).sum()
    return Trained(int(useful), int(np.maximum(least - whole, 0).sum()), int(np.maximum(whole - most, 0).sum()))
