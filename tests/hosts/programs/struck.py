"""FOLDER STEP_S WEIGHTS RUNTIME together|background: trains so many weights as ``bench resize --pauses`` does, and dies
where it is told.

A weight is the sum over the steps of the mean over their samples, so that it follows from the ledger; a step has two
groups of gradients. Besides what a `Recorder` leaves, each worker leaves in FOLDER/weights.PID what its weights were
after each step, and at the end a line with the first of them.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path

from tests.fault.programs.faults import Strike, load_runtime, mark_changes
from tests.fault.programs.gradients import MANNERS

if __name__ == "__main__":
    library = load_runtime(sys.argv[4])

import numpy as np

import ms_kungfu as kf
from benchmarks.pauses_worker import _Synthetic
from ms_kungfu.dataset import sharding

AFTER = struct.Struct("=qL")
"""A step's number, and the CRC of the first weights after it."""
_FIRST, _CHECKED = 3, 1000


class Training(_Synthetic):
    def __init__(self, folder: Path, step_s: float, count: int, strike: Strike) -> None:
        super().__init__(folder, step_s)
        self._strike = strike
        self._after = open(folder / f"weights.{os.getpid()}", "ab", buffering=0)  # noqa: SIM115
        self.weights = np.zeros(count, np.float32)

    def run(self):
        super().run()
        if not kf.detached():
            self._recorder.member(self.step, head=float(self.weights[0]))

    def _gradient(self, own):
        return np.full(self.weights.size, np.sin(sharding.positions(own)).mean(), np.float32)

    def _reduce(self, gradient):
        MANNERS[sys.argv[5]](library, [gradient[:_FIRST], gradient[_FIRST:]])

    def _train(self):
        self._strike.at("begin")
        stop = super()._train()
        self._after.write(AFTER.pack(self.step, zlib.crc32(self.weights[:_CHECKED].tobytes())))
        self._strike.at("recorded")
        return stop

    def _share(self):
        self._strike.at("sharing")
        super()._share()
        self._strike.at("shared")


if __name__ == "__main__":
    strike = Strike(Path(sys.argv[1]), library)
    mark_changes(strike.at)
    kf.init()
    Training(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), strike).run()
