"""FOLDER STEP_S RUNTIME together|background SIZES: trains groups of so many weights until FOLDER/stop is there, and
meanwhile KUNGFU_FAULTS happen to it, or what FOLDER's files order.

A weight is the sum over the steps of the mean over their samples, so that it follows from the ledger. RUNTIME is a
build with marked places.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from faults import Faults, Strike, load_runtime, mark_changes

folder, step_s, runtime, manner = Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:5]
sizes = [int(size) for size in sys.argv[5].split(",")]
library = load_runtime(runtime)

import numpy as np  # noqa: E402
from gradients import MANNERS  # noqa: E402
from training import Training  # noqa: E402

import ms_kungfu as kf  # noqa: E402
from ms_kungfu.dataset import sharding  # noqa: E402

faults = Faults(os.environ["KUNGFU_FAULTS"], folder, library) if "KUNGFU_FAULTS" in os.environ else None
happens = faults.at if faults else Strike(folder, library).at


def holds() -> list[int]:
    """Descriptors, and mappings of the runtime's shared memory."""
    return [len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:kungfu")]


class Averaging(Training):
    SAMPLES, BATCH = 480, 24

    def __init__(self) -> None:
        super().__init__(folder, step_s, [np.zeros(size, np.float32) for size in sizes], happens)
        self.patterns = [np.resize(np.arange(1, 6, dtype=np.float32), size) for size in sizes]
        self.held: list[int] = []

    def begins(self):
        size = faults.begin(kf.current_rank(), kf.current_cluster_size(), self.step) if faults else None
        super().begins()
        return size

    def gradients(self, own):
        mean = np.float32(np.sin(sharding.positions(own)).mean())
        return [pattern * mean for pattern in self.patterns]

    def reduce(self, gradients):
        MANNERS[manner](gradients)

    def at(self, place):
        super().at(place)
        if place == "end":
            self.held = self.held or holds()

    def ended(self):
        return {"head": float(self.weights[0][0]), "first": self.held or holds(), "last": holds()}


if faults and os.environ.get("KUNGFU_PARKED"):
    faults.newcomer()
mark_changes(happens)
happens("imported")
Averaging().run()
