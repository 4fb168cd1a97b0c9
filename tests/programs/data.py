"""scikit-learn's digits as the files of MNIST, and as those of CIFAR-10's binary version, which MindSpore reads in
whole files of 10,000 images only: they repeat there."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import numpy as np

TRAIN = 1280


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    return (pictures.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8), labels.astype(np.uint8)


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    pictures, labels = digits()
    large = np.pad(np.kron(pictures, np.ones((3, 3), np.uint8)), ((0, 0), (2, 2), (2, 2)))
    for name, part in (("train", slice(TRAIN)), ("t10k", slice(TRAIN, None))):
        images, numbers = large[part], labels[part]
        sizes = np.array([0x803, len(images), 28, 28], ">i4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(sizes + images.tobytes())
        sizes = np.array([0x801, len(numbers)], ">i4").tobytes()
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(sizes + numbers.tobytes())


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    pictures, labels = digits()
    large = np.kron(pictures, np.ones((4, 4), np.uint8)).reshape(-1, 1024)
    rows = np.concatenate([labels[:, None], large, large, large], axis=1)
    np.resize(rows[:TRAIN], (10_000, 3073)).tofile(folder / "data_batch_1.bin")
    np.resize(rows[TRAIN:], (10_000, 3073)).tofile(folder / "test_batch.bin")


def folder(base: Path) -> Path:
    """Which has both, as ``mnist`` and ``cifar``. Several processes may call this at the same time."""
    base.mkdir(parents=True, exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, so that a killed one blocks no other
        for name, write in (("mnist", write_mnist), ("cifar", write_cifar)):
            if not (base / name).exists():
                part = base / f"{name}.part"
                shutil.rmtree(part, ignore_errors=True)
                write(part)
                part.rename(base / name)
    return base
