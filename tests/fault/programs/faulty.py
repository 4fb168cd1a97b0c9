"""FOLDER STEPS RUNTIME SIZE together|background: trains numbers for so many steps while KUNGFU_FAULTS happen to it,
and then until there are SIZE workers (or as many as the script leaves), but not much longer.

A step has three groups of gradients, by three protocols of the collectives. What the weights have to be follows from
the ledger. Each worker leaves in FOLDER ``member.PID``, then ``end.PID`` or ``left.PID``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from faults import Faults, load_runtime, mark_changes
from gradients import MANNERS

folder, steps, runtime_path, wanted, manner = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
library = load_runtime(runtime_path)
sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks

import numpy as np  # noqa: E402

import ms_kungfu as kf  # noqa: E402
from benchmarks.pauses_worker import digest  # noqa: E402
from ms_kungfu import comm, membership  # noqa: E402
from ms_kungfu.agreement import broadcast_text  # noqa: E402
from ms_kungfu.dataset import sharding  # noqa: E402
from ms_kungfu.dataset.ledger import Ledger  # noqa: E402
from ms_kungfu.elastic import handover  # noqa: E402

SAMPLES, BATCH, STEP_S = 480, 24, 0.003
PATIENCE_S = 20.0
GROUPS = (3, 20000, 300000)


class Training:
    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.walk = sharding.EpochCursor(SAMPLES)
        self.ledger = Ledger(folder / "ledger", 0)
        self.weights = [np.zeros(size, np.float32) for size in GROUPS]
        self.dealt_for, self.members = -1, ()
        self.step = 0
        self.overtime_from = 0.0

    def run(self) -> None:
        if membership.is_deferred():
            self.faults.at("parked")
            membership.join()
        if membership.is_detached():
            return
        if membership.is_joiner():
            self.share()
        self.tell("member")
        held = None
        while self.goes_on():
            size = self.faults.begin(kf.current_rank(), kf.current_cluster_size(), self.step)
            self.faults.at("begin")
            self.train()
            change = membership.step(size)
            if change.detached:
                self.tell("left")
                return
            if change.changed:
                self.share()
            self.faults.at("end")
            held = held or holds()
        self.tell("end", digest=digest(self.weights), head=float(self.weights[2][0]), first=held, last=holds())

    def goes_on(self) -> bool:
        if self.step < steps:
            return True
        self.overtime_from = self.overtime_from or time.monotonic()
        missing = kf.current_cluster_size() < self.faults.awaited(int(wanted), self.step)
        in_time = time.monotonic() < self.overtime_from + PATIENCE_S
        return bool(comm.all_reduce(np.array([missing and in_time], np.int32), "min", "goes on")[0])

    def train(self) -> None:
        walk, version = self.walk, kf.cluster_version()
        if version != self.dealt_for:
            self.dealt_for, self.members = version, tuple(range(kf.current_cluster_size()))
        taken = walk.take(BATCH, self.members)
        if taken is None:
            self.ledger.end(walk, kf.current_rank(), self.common())
            walk.end_epoch()
            taken = walk.take(BATCH, self.members)
        own = taken.share(kf.current_rank())
        membership.set_weight(sharding.count(own))
        if not own:  # fewer samples than workers
            last = sharding.count(taken.batch) - 1
            own = sharding.part(taken.batch, last, last + 1)
        time.sleep(STEP_S)
        mean = np.sin(sharding.positions(own)).mean()
        gradients = [np.resize(np.arange(1, 6, dtype=np.float32) * np.float32(mean), size) for size in GROUPS]
        self.faults.at("computed")
        MANNERS[manner](library, gradients)
        self.faults.at("reduced")
        participants = membership.take_participants()
        for weights, gradient in zip(self.weights, gradients):
            weights += gradient
        epoch = walk.epoch
        common = {**self.common(), "participants": [r for r in self.members if r in participants]}
        for step in walk.commit(participants):
            self.ledger.step(epoch, step, kf.current_rank(), own, common)
        self.members = tuple(common["participants"])
        self.step += 1
        self.faults.at("recorded")

    def common(self) -> dict:
        return {
            "version": kf.cluster_version(), "size": kf.current_cluster_size(), "global_batch": BATCH,
            "drop_remainder": False, "total": SAMPLES, "seed": 0, "shuffle": True,
        }  # fmt: skip

    def share(self) -> None:
        joiner = membership.is_joiner()

        def receive(root: int) -> dict:
            progress = json.dumps({"step": self.step, "walk": self.walk.state()})
            received = json.loads(broadcast_text(progress if kf.current_rank() == root else "", root))
            for weights in self.weights:
                comm.broadcast(weights, root, f"weights/{weights.size}", weights)
            return received

        self.faults.at("sharing")
        received = handover.from_lowest_rank(receive, able=not joiner)
        if joiner:
            self.step = received["step"]
            self.walk.restore(received["walk"])
            membership.state_received()
        self.faults.at("shared")

    def tell(self, what: str, **more: object) -> None:
        line = {"pid": os.getpid(), "rank": kf.current_rank(), "step": self.step, **more}
        own = folder / f"writing.{os.getpid()}"
        own.write_text(json.dumps(line))
        own.rename(folder / f"{what}.{os.getpid()}")


def holds() -> list[int]:
    """Descriptors, and mappings of the runtime's shared memory."""
    return [len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:kungfu")]


faults = Faults(os.environ["KUNGFU_FAULTS"], folder, library)
if os.environ.get("KUNGFU_PARKED"):
    faults.newcomer()
mark_changes(faults.at)
faults.at("imported")
kf.init()
loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libkungfu_runtime" in line}
assert loaded == {os.path.realpath(runtime_path)}, loaded  # two copies would be two peers
Training(faults).run()
