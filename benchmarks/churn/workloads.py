"""The models and their samples, which are the same for every system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH = 32
"""Samples of a step, of all workers together."""
CLASSES = 10
MLP_WIDTH = 2800  # 784 -> 2800 -> 2800 -> 10: 10.1 M weights
RATE, MOMENTUM = 0.02, 0.9


@dataclass(frozen=True)
class Workload:
    """A model and its samples. `network`: "lenet" or "mlp". `total`: samples per epoch, a multiple of BATCH."""

    network: str
    total: int
    real: bool = False


WORKLOADS = {
    "lenet": Workload("lenet", 64 * BATCH),
    "mlp": Workload("mlp", 16 * BATCH),
    # scikit-learn's 1,797 digits; those that aren't in an epoch are the test set.
    "digits": Workload("lenet", 46 * BATCH, real=True),
}


def write(name: str, folder: Path) -> None:
    """Write the samples to FOLDER/samples.npz: x and test_x of shape (n, 1, 28, 28) float32, y and test_y int32."""
    workload = WORKLOADS[name]
    if workload.real:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        images = np.kron(digits.images[order] / 16 - 0.5, np.ones((1, 3, 3)))
        x = np.pad(images, ((0, 0), (2, 2), (2, 2)), constant_values=-0.5)[:, None].astype(np.float32)
        y = digits.target[order].astype(np.int32)
    else:
        random = np.random.default_rng(1)
        x = random.standard_normal((workload.total + BATCH, 1, 28, 28)).astype(np.float32)
        y = random.integers(0, CLASSES, len(x)).astype(np.int32)
    cut = workload.total
    np.savez(folder / "samples.npz", x=x[:cut], y=y[:cut], test_x=x[cut:], test_y=y[cut:])
