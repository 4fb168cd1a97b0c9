"""Numbers that are trained while things happen to the workers: what the programs of this folder have in common.

Besides what a `Recorder` leaves, each worker leaves in FOLDER/weights.PID what its weights were after each step.
"""

from __future__ import annotations

import os
import struct
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np

import ms_kungfu as kf
from benchmarks.pauses_worker import Synthetic

AFTER = struct.Struct("=qL")
"""A step's number, and the CRC of each group's first weights after it."""
_CHECKED = 1000


class Training(Synthetic):
    """`weights`: groups of them. `hook` hears of each place that the worker comes to."""

    def __init__(
        self,
        folder: Path,
        step_s: float,
        weights: Sequence[np.ndarray],
        hook: Callable[[str], None] = lambda place: None,
    ) -> None:
        super().__init__(folder, step_s)
        self.folder, self.weights, self._hook = folder, list(weights), hook
        self._after = open(folder / f"weights.{os.getpid()}", "ab", buffering=0)  # noqa: SIM115

    def run(self) -> None:
        try:
            kf.init()
            super().run()
        except Exception:
            self.recorder.tell("failed", self.step, error=traceback.format_exc())
            raise

    def at(self, place: str) -> None:
        if place == "recorded":
            check = zlib.crc32(b"".join(each[:_CHECKED].tobytes() for each in self.weights))
            self._after.write(AFTER.pack(self.step, check))
        self._hook(place)
