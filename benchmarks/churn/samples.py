"""The tally: one weight per sample, which counts how often the sample was trained.

Each worker adds `marks` to its gradients. They are averaged over the workers as any gradient is, and `counted` turns
the mean into whole numbers. So the counts are part of the weights: a step that is undone, or rolled back to a
checkpoint, is undone in them, too. No system keeps books of its own for it.

A worker with b samples marks 1/b at each of its samples, and 1/b at its slot. The mean over workers, weighted by their
samples or not, has 1/S there, where S is the samples of all workers in the step. So S is known without asking how many
workers took part in it, and mean * S is 1 at each trained sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOTS = 16
"""How many workers a step may have. Each has a slot of its own, say its rank."""
EXTRA = SLOTS + 1
"""Numbers behind the samples: the slots, and whether a worker has been told to stop."""
_ROUNDING = 0.2


def marks(total: int, chosen: NDArray[Any], slot: int, stop: bool) -> NDArray[np.float32]:
    """Return what a worker brings to a step, float32 of shape (total + EXTRA,).

    Args:
        total: number of samples of an epoch.
        chosen: the numbers of the worker's samples in this step.
        slot: the worker's.
        stop: whether the worker has been told to stop.
    """
    found = np.zeros(total + EXTRA, np.float32)
    np.add.at(found, chosen, np.float32(1 / len(chosen)))
    found[total + slot] = 1 / len(chosen)
    found[-1] = stop
    return found


def counted(mean: Any) -> Any:
    """Return what a step adds to the tally, from the mean of the workers' marks. NumPy's or PyTorch's.

    The last number is positive if a worker has been told to stop. The slots are 0.
    """
    added = mean / mean[-EXTRA:-1].max()
    added[-EXTRA:-1] = 0
    return added


@dataclass(frozen=True)
class Trained:
    """How often the samples were trained, by the final weights."""

    useful: int
    """Samples in the weights, each once an epoch."""
    lost: int
    """Samples that a finished epoch has not trained, added up over the epochs."""
    twice: int
    """Times that a sample was trained beyond once an epoch."""


def read(counts: NDArray[Any], epochs: float) -> Trained:
    """Compare the counts with the number of epochs that the program says it has trained.

    In an epoch that isn't finished a sample may be trained or not. ValueError for counts that aren't whole numbers: the
    average wasn't that of the workers that took part.

    >>> read(np.array([2.0, 1.0, 3.0, 2.0]), 2)
    Trained(useful=7, lost=1, twice=1)
    >>> read(np.array([2.0, 1.0, 1.0, 2.0]), 1.5)
    Trained(useful=6, lost=0, twice=0)
    """
    whole = np.rint(counts)
    if np.abs(counts - whole).max() > _ROUNDING:
        worst = int(np.abs(counts - whole).argmax())
        raise ValueError(f"sample {worst} was trained {counts[worst]:.3f} times, which is no whole number")
    least, most = np.floor(epochs + 1e-6), np.ceil(epochs - 1e-6)
    useful = np.minimum(whole, most).sum()
    return Trained(int(useful), int(np.maximum(least - whole, 0).sum()), int(np.maximum(whole - most, 0).sum()))
