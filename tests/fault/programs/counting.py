"""FOLDER STEP_S: counts how often each sample is trained, in one weight a sample, until FOLDER/stop is there.

After E epochs every weight is E, whoever died or came meanwhile: that can be read from the weights alone. A step's
update is 1 for the samples that are in the mean of the gradients, whatever anybody believes of who took part. There are
two groups of gradients, by two protocols of the collectives, that have to contain the same samples.
Each worker keeps FOLDER/now.PID up to date, and leaves member.PID once it has the state, then end.PID, left.PID or
failed.PID; wrong.PID.* for a weight that isn't what it has to be.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time
import traceback
import zlib
from pathlib import Path

import numpy as np
from gradients import reduce_together

import ms_kungfu as kf
from ms_kungfu import comm, membership
from ms_kungfu.agreement import broadcast_text, gather_json
from ms_kungfu.dataset import sharding
from ms_kungfu.dataset.ledger import Ledger
from ms_kungfu.elastic import handover

NOW = struct.Struct("=qqdd")
"""Steps done, the cluster version, and when the last step's change of membership began and ended (CLOCK_MONOTONIC)."""
SAMPLES, BATCH = 60, 12
GROUPS = (1, 2000)  # weights a sample
CHECKPOINT_EVERY, CHECKPOINT_S, EVALUATION_S = 5, 0.002, 0.005


def runtime() -> ctypes.CDLL:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in maps if "libkungfu_runtime" in line))


class Counting:
    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder, self.step_s = folder, step_s
        self.walk = sharding.EpochCursor(SAMPLES)
        self.ledger = Ledger(folder / "ledger", 0)
        self.weights = np.zeros(SAMPLES, np.int64)
        self.dealt_for, self.members = -1, ()
        self.step, self.stop = 0, False
        self.now = os.open(folder / f"now.{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)

    def run(self) -> None:
        membership.join()
        if membership.is_detached():
            return self.tell("left")
        if membership.is_joiner():
            self.share()
        self.tell("member")
        while True:
            if not self.train():
                return self.tell("end", epochs=self.walk.epoch, weights=self.weights.tolist())
            if self.step % CHECKPOINT_EVERY == 0:
                self.checkpoint()
            asked = time.monotonic()
            os.pwrite(self.now, NOW.pack(self.step, kf.cluster_version(), asked, 0.0), 0)
            change = membership.step()
            if change.detached:
                return self.tell("left", asked=asked)
            if change.changed:
                self.share()
            os.pwrite(self.now, NOW.pack(self.step, kf.cluster_version(), asked, time.monotonic()), 0)

    def train(self) -> bool:
        """A step; False where training is over instead."""
        walk, rank = self.walk, kf.current_rank()
        if kf.cluster_version() != self.dealt_for:
            self.dealt_for, self.members = kf.cluster_version(), tuple(range(kf.current_cluster_size()))
        taken = walk.take(BATCH, self.members)
        if taken is None:
            self.end_epoch()
            if self.stop:
                return False
            taken = walk.take(BATCH, self.members)
        share, length = taken.share(rank), sharding.count(taken.batch)
        own = share or sharding.part(taken.batch, length - 1, length)
        time.sleep(self.step_s)
        order = sharding.permutation(SAMPLES, 0, walk.epoch)
        gradients = [np.zeros((SAMPLES + 1, each), np.float32) for each in GROUPS]
        stop = (self.folder / "stop").exists()  # looked at once: both groups have to say the same
        for gradient in gradients:
            gradient[order[sharding.positions(own)]] = 1 / sharding.count(own)
            gradient[SAMPLES] = stop
        membership.set_weight(sharding.count(share))
        reduce_together(runtime(), gradients)
        participants = membership.take_participants()
        self.stop |= bool(gradients[0][SAMPLES] > 0)
        trained = gradients[0][:SAMPLES, 0] > 0
        self.weights += trained
        expected = np.append(trained / np.count_nonzero(trained), gradients[0][SAMPLES])
        if not all(np.allclose(gradient, expected[:, None]) for gradient in gradients):
            self.wrong("mean", values=[sorted(set(gradient.ravel().tolist())) for gradient in gradients])
        epoch, living = walk.epoch, tuple(r for r in self.members if r in participants)
        common = {**self.common(), "participants": living}
        for step in walk.commit(participants):
            self.ledger.step(epoch, step, rank, own, common)
        self.members = living
        self.step += 1
        return True

    def end_epoch(self) -> None:
        self.ledger.end(self.walk, kf.current_rank(), self.common())
        self.walk.end_epoch()
        if (self.weights != self.walk.epoch).any():
            self.wrong("epoch", epoch=self.walk.epoch, weights=self.weights.tolist())
        # As an evaluation does: each worker's part, combined. A worker that dies in it leaves its part out.
        time.sleep(self.step_s + EVALUATION_S)
        part = comm.all_reduce(np.array([self.weights.sum(), 1], np.int64), "sum", "evaluation")
        if part[0] != part[1] * SAMPLES * self.walk.epoch:
            self.wrong("evaluation", epoch=self.walk.epoch, sums=part.tolist())

    def checkpoint(self) -> None:
        """As ElasticTraining writes them: every worker's own part is gathered, the lowest that lives writes."""
        parts = gather_json({"step": self.step, "rank": kf.current_rank()}, "checkpoint")
        if any(part != {"step": self.step, "rank": rank} for rank, part in parts.items()):
            self.wrong("checkpoint", step=self.step, parts=parts)
        if kf.current_rank() == min(parts):
            unfinished = self.folder / f"unfinished.{os.getpid()}"
            unfinished.write_text(json.dumps({"epoch": self.walk.epoch, "weights": self.weights.tolist()}))
            time.sleep(CHECKPOINT_S)
            unfinished.rename(self.folder / "checkpoint")

    def common(self) -> dict:
        return {
            "version": kf.cluster_version(), "size": kf.current_cluster_size(), "global_batch": BATCH,
            "drop_remainder": False, "total": SAMPLES, "seed": 0, "shuffle": True,
        }  # fmt: skip

    def share(self) -> None:
        joiner = membership.is_joiner()

        def receive(root: int) -> dict:
            told = json.dumps({"step": self.step, "stop": self.stop, "walk": self.walk.state()})
            received = json.loads(broadcast_text(told if kf.current_rank() == root else "", root))
            with handover.from_the_nearest(root, None if joiner else lambda: zlib.crc32(self.weights.tobytes())):
                weights = comm.broadcast(self.weights, root, "weights")
            if not joiner and (weights != self.weights).any():
                self.wrong("shared", own=self.weights.tolist(), received=weights.tolist())
            return {**received, "weights": weights}

        received = handover.from_lowest_rank(receive, able=not joiner)
        if joiner:
            self.step, self.stop, self.weights = received["step"], received["stop"], np.array(received["weights"])
            self.walk.restore(received["walk"])
            membership.state_received()

    def wrong(self, what: str, **more: object) -> None:
        self.tell(f"wrong.{what}.{self.step}", **more)

    def tell(self, what: str, **more: object) -> None:
        line = {"pid": os.getpid(), "time": time.monotonic(), "step": self.step, **more}
        with_rank = {**line, "rank": kf.current_rank(), "version": kf.cluster_version()}
        own = self.folder / f"writing.{os.getpid()}"
        own.write_text(json.dumps(with_rank))
        kind, _, detail = what.partition(".")
        own.rename(self.folder / f"{kind}.{os.getpid()}{detail and '.' + detail}")


counting = Counting(Path(sys.argv[1]), float(sys.argv[2]))
try:
    kf.init()
    counting.run()
except Exception:
    counting.tell("failed", error=traceback.format_exc())
    raise
