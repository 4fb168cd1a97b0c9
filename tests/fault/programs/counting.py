"""FOLDER STEP_S: counts how often each sample is trained, in one weight a sample, until FOLDER/stop is there.

After E epochs every weight is E, whatever failed or joined meanwhile: that can be read from the weights alone. A step's
update is 1 for the samples that are in the mean of the gradients, whatever a rank believes of them. There are
two groups of gradients, by two protocols of the collectives, that have to contain the same samples.
A worker tells of each weight that isn't what it has to be by an event "wrong".
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from gradients import reduce_together
from training import Training

import ms_kungfu as kf
from ms_kungfu import comm, membership
from ms_kungfu.agreement import gather_json
from ms_kungfu.dataset import sharding

SAMPLES, BATCH = 60, 12
GROUPS = (1, 2000)  # weights a sample
CHECKPOINT_EVERY, CHECKPOINT_S, EVALUATION_S = 5, 0.002, 0.005


class Counting(Training):
    SAMPLES, BATCH = SAMPLES, BATCH

    def __init__(self, folder: Path, step_s: float) -> None:
        super().__init__(folder, step_s, [np.zeros(SAMPLES, np.int64)])

    def goes_on(self) -> bool:
        """Until the end of the epoch in which a stop was asked for."""
        is_between_epochs = not self.walk.left
        return super().goes_on() or not is_between_epochs

    def gradients(self, own):
        order = sharding.permutation(SAMPLES, 0, self.walk.epoch)
        gradients = [np.zeros((SAMPLES + 1, each), np.float32) for each in GROUPS]
        for gradient in gradients:
            gradient[order[sharding.positions(own)]] = 1 / sharding.count(own)
        return gradients

    def reduce(self, gradients):
        reduce_together(gradients)

    def update(self, gradients):
        trained = gradients[0][:SAMPLES, 0] > 0
        self.weights[0] += trained
        expected = np.append(trained / np.count_nonzero(trained), gradients[0][SAMPLES])
        if not all(np.allclose(gradient, expected[:, None]) for gradient in gradients):
            self.wrong("mean", values=[sorted(set(gradient.ravel().tolist())) for gradient in gradients])

    def train(self) -> None:
        super().train()
        if self.step % CHECKPOINT_EVERY == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        """As ElasticTraining writes them: every worker's own part is gathered, the lowest that lives writes."""
        parts = gather_json({"step": self.step, "rank": kf.current_rank()}, "checkpoint")
        if any(part != {"step": self.step, "rank": rank} for rank, part in parts.items()):
            self.wrong("checkpoint", parts=parts)
        if kf.current_rank() == min(parts):
            unfinished = self.folder / f"unfinished.{os.getpid()}"
            unfinished.write_text(json.dumps({"epoch": self.walk.epoch, "weights": self.weights[0].tolist()}))
            time.sleep(CHECKPOINT_S)
            unfinished.rename(self.folder / "checkpoint")

    def end_epoch(self) -> None:
        super().end_epoch()
        (weights,) = self.weights
        if (weights != self.walk.epoch).any():
            self.wrong("epoch", epoch=self.walk.epoch, weights=weights.tolist())
        # As an evaluation does: each worker's part, combined. A worker that dies in it leaves its part out.
        time.sleep(self._step_s + EVALUATION_S)
        part = comm.all_reduce(np.array([weights.sum(), 1], np.int64), "sum", "evaluation")
        if part[0] != part[1] * SAMPLES * self.walk.epoch:
            self.wrong("evaluation", epoch=self.walk.epoch, sums=part.tolist())

    def receive(self, weights, root, name):
        received = comm.broadcast(weights, root, name)
        if not membership.is_joining() and (received != weights).any():
            self.wrong("shared", own=weights.tolist(), received=received.tolist())
        weights[:] = received

    def ended(self):
        return {"epochs": self.walk.epoch, "weights": self.weights[0].tolist()}

    def wrong(self, what: str, **more: object) -> None:
        self.recorder.tell("wrong", self.step, what=what, **more)


Counting(Path(sys.argv[1]), float(sys.argv[2])).run()
