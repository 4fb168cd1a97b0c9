"""FOLDER: trains the histories of FOLDER/plan.json (tests.campaigns.histories) one after the other, each an epoch from
the same first weights, while this worker's part of what they say happens to it.

Each worker leaves in FOLDER ``at.V.R`` as rank R of cluster version V, ``doomed.PID`` before it dies, and
``fired.H.N`` when it begins with stroke N of history H; an event "history" tells what it has at the end of one.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from trained import KINDS, SEED, SHARDS, STEPS, Training, digest

import ms_kungfu as kf
from benchmarks.pauses_worker import Recorder
from ms_kungfu import optimizers
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, ShardedStep
from ms_kungfu.trained.inventory import assign

folder = Path(sys.argv[1])
pid = os.getpid()
recorder = Recorder(folder)


def leave(name):
    """A file with this process's ID, whole or not at all."""
    own = folder / f"writing.{pid}"
    own.write_text(str(pid))
    own.rename(folder / name)


class Strokes:
    """What happens to this worker."""

    def __init__(self, histories):
        self.histories = histories
        self.now = []  # of this step
        self.shard = 0
        self.sleep_s = 0.0  # before each shard, until the history ends
        self.armed = False

    def history_begins(self):
        self.sleep_s = 0.0

    def step_begins(self, history, step):
        rank, self.members = kf.current_rank(), data.members  # the workers to which the step is assigned
        self.where = f"at.{kf.cluster_version()}"
        if not (folder / f"{self.where}.{rank}").exists():
            leave(f"{self.where}.{rank}")
        self.shard, self.history = 0, history
        self.now = [
            (number, stroke)
            for number, stroke in enumerate(self.histories[history]["strokes"])
            if stroke["step"] == step and self.members[stroke["place"] % len(self.members)] == rank
        ]

    def before_a_shard(self):
        for number, stroke in self.now:
            if stroke["shard"] == self.shard:
                self.strike(number, stroke)
        self.shard += 1
        time.sleep(self.sleep_s)

    def step_ends(self):
        """Before others could leave the cluster, and rely on this worker."""
        # A stroke at a shard that it wasn't dealt.
        for number, stroke in self.now:
            if stroke["shard"] >= self.shard:
                self.strike(number, stroke)
        while self.armed:
            time.sleep(1)

    def dooms(self):
        """Whether the training goes on without this worker, on which no other counts from here on. A member
        in this step can't leave the cluster before this worker has ended the step, or died."""
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for _ in range(50):  # the others may be a little behind
                pids = [path.read_text() for r in self.members if (path := folder / f"{self.where}.{r}").exists()]
                pids = {int(text) for text in pids} - {pid}
                if any(not (folder / f"doomed.{other}").exists() for other in pids):
                    (folder / f"doomed.{pid}").touch()
                    return True
                time.sleep(0.01)
        return False

    def strike(self, number, stroke):
        ends = stroke["kind"] == "kill" or (stroke["kind"] == "stop" and not stroke["seconds"])
        if self.armed or (ends and not self.dooms()):
            return
        leave(f"fired.{self.history}.{number}")
        if stroke["kind"] == "slow":
            self.sleep_s = stroke["seconds"]
            return
        self.armed = ends
        what = signal.SIGKILL if stroke["kind"] == "kill" else signal.SIGSTOP
        if stroke["after_ms"]:
            # Wherever it is then: in a kernel, in a sum over all workers, or waiting in `step_ends`.
            threading.Timer(stroke["after_ms"] / 1e3, os.kill, (pid, what)).start()
        else:
            os.kill(pid, what)


def compile_shapes():
    """For the shards of an epoch, before the others wait for this worker."""
    if ms.get_context("mode") == ms.GRAPH_MODE:
        for count in data.shard_sizes():
            x, labels = training.samples.x[:count], training.samples.labels[:count]
            compute.compile(ms.Tensor(x), ms.Tensor(labels))


def counted(*columns):
    strokes.before_a_shard()
    return compute(*columns)


plan = json.loads((folder / "plan.json").read_text())
ms.set_context(mode=ms.GRAPH_MODE if plan["mode"] == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)
training = Training(KINDS[plan["kind"]], optimizers, "KungFu", kf.nn.Dropout)
first = [(p, p.asnumpy().copy()) for p in training.parameters]
strokes = Strokes(plan["histories"])
step = ShardedStep(training.compute, training.update, trained=[training.net, training.optimizer])
compute, step.cell = step.cell, counted
source = ds.GeneratorDataset(training.samples, ["x", "label"], shuffle=False)
data = ElasticDataset(
    source, global_batch_size=SHARDS * training.kind.unit, shards=SHARDS, seed=SEED, ledger=folder / "ledger"
)
schedule = {int(when): size for when, size in plan["sizes"].items()}
elastic = ElasticTraining(
    training.net, training.optimizer, schedule=schedule.get, wait=True, dataset=data, prepare=compile_shapes
)
for history in range(len(plan["histories"])):
    sizes = {}
    strokes.history_begins()
    for _ in elastic.epochs(1):
        recorder.tell("member", elastic.step)
        for x, labels in data:
            number = elastic.step - history * STEPS + 1
            sizes[number] = len(data.members)
            strokes.step_begins(history, number)
            loss = step(x, labels)
            assert np.isfinite(loss.asnumpy())
            strokes.step_ends()
            elastic.step_end()
    if kf.detached():
        recorder.tell("left", elastic.step)
        break
    if not elastic.should_stop:  # it was there: a newcomer's program comes by what was before it
        sha256 = digest(training.parameters)
        recorder.tell("history", elastic.step, number=history, sha256=sha256, sizes=sizes)
        for parameter, values in first:
            assign(parameter, values)
else:
    if not elastic.should_stop:
        recorder.tell("end", elastic.step, digest=sha256)
