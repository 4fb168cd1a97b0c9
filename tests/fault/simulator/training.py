"""What a worker runs: a loop of its own around the real `ElasticTraining`, over shares of numbered samples.

The step, the agreement, the hand-over of the state, checkpoints and the commit of the data are the package's. A step's
gradients are what each worker brings to `Core.commit`, and the weights a number that has the whole history in it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn  # which ElasticTraining loads when it is needed: not in a greenlet

from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.elastic.checkpoint import CheckpointFolder
from ms_kungfu.elastic.policy import Decision, Policy
from ms_kungfu.elastic.program import is_behind
from ms_kungfu.elastic.state import Component
from tests.fault.simulator.setting import Violation
from tests.fault.simulator.shards import updated


class Grows(Policy):
    """Wants other sizes, once each, and each worker to keep its batch."""

    def __init__(self, sizes):
        self._sizes = sizes

    def after_step(self, q):
        if q.step not in self._sizes:
            return None
        return Decision("it is time", size=self._sizes[q.step], keeps_local_batch=True)


class Program:
    """A training program."""

    def __init__(self, world, process):
        self.world, self.process, self.core = world, process, process.core
        self.setup = setup = world.setup
        self._weights, self.stopping = Weights(), False
        self.brought = []  # to the results of the last step's reductions: rank -> what
        self.losses = []  # of the last step, where it is a deal of shards
        self.arrived_in = None  # the cluster version
        process.program = self
        self.data = self._samples()
        self.disk = Disk(world, process)
        self.training = Training(
            self._weights,
            *self._trained(),
            schedule=dict(setup.schedule) or None,
            wait=setup.wait,
            dataset=self.data,
            components=[Component("loss_scale", self._capture, self._restore)],  # which undoing a step takes back
            checkpoint_dir=None if setup.checkpoint_every is None else self.disk,
            checkpoint_every=setup.checkpoint_every,
            resume=setup.resume,
            prepare=lambda: world.sleep(world.current.random.random() * setup.prepare_s),
            policy=self._policy(),
        )

    def _samples(self):
        setup = self.setup
        return Samples(setup.samples, global_batch_size=setup.global_batch, shuffle=False, ledger=self._ledger())

    def _policy(self):
        return Grows(dict(self.setup.grown)) if self.setup.grown else None

    def _trained(self):
        """As many networks as a step has reductions."""
        return [Reducer() for _ in range(self.setup.reductions)] if self.setup.reductions > 1 else []

    def _ledger(self):
        return Record(self)

    @property
    def weights(self):
        return int(self._weights.values[0])

    @weights.setter
    def weights(self, value):
        self._weights.values[0] = value

    def _capture(self):
        return self.stopping

    def _restore(self, received):
        self.stopping = received

    def state(self):
        """All that has to be the same on all workers."""
        program = [self.weights, self.stopping]
        return {"step": self.training.step, "program": program, "data": self.data.state()}

    def main(self):
        self._call()
        # A joiner runs through the calls that the others have behind them.
        while is_behind() or (self.setup.epochs_a_call and not self.stopping and not self.process.member.detached):
            self._call()
        self.disk.wait()
        self.world.say("left", f"{self.process.name} is done after {self.training.step} steps")

    def _call(self):
        """A training call."""
        training, before = self.training, self.arrived_in
        self.world.place("in begin")
        training.begin()
        if not training.should_stop and self.core.cluster_version() != before:
            self._arrive()
        while not training.should_stop:
            self._epoch()
            training.epoch_end()
            if self.stopping or training.epoch == self.setup.epochs_a_call:
                break
        training.end()

    def _arrive(self):
        self.arrived_in = self.core.cluster_version()
        self.world.arrived(self)

    def _epoch(self):
        while (step := self.data.next_step(self.core.rank())) is not None:
            self._train(step)

    def _compute(self, part=1.0):
        world = self.world
        seconds = self.setup.step_s * part * self.process.slow
        world.sleep(seconds * (0.5 + world.current.random.random()) * world.calm())

    def _train(self, step):
        before, self.brought = self.weights, []
        for _ in range(self.setup.reductions):
            self._reduce(step)
        change = self.training.step_end()
        if change.undone and self.weights != before:
            raise Violation(f"{self.process.name}: a step is undone, and its weights aren't what they were")
        if change.changed and not self.training.should_stop:
            self._arrive()

    def _reduce(self, step):
        """One of the step's reductions, and its update."""
        world, core = self.world, self.core
        self._compute(1 / self.setup.reductions)
        world.place("before the reduction")
        groups = core.commit(self.setup.groups, (step.share(core.rank()), world.loop.now > world.quiet_from))
        brought = groups[0]
        if any(other != brought for other in groups):
            raise Violation(f"{self.process.name}: a step's groups have different participants: {groups}")
        world.place("after the reduction")
        if core.rank() not in brought:
            raise Violation(f"{self.process.name} lives and took no part")
        self.weights = updated(self.weights, brought.items())
        self.brought.append(brought)
        self.stopping |= any(stop for _, stop in brought.values())


class AsynchronousProgram(Program):
    """The same where each trains its shares at its own speed."""

    def __init__(self, world, process):
        super().__init__(world, process)
        self.training.asynchronous = True  # as with an optimizer that is

    def _ledger(self):
        return None  # which takes all workers at every step

    def _restore(self, received):
        pass

    def main(self):
        super().main()
        if not self.process.member.detached:
            self.world.met(self, self.core.cluster_version(), self.process.member.sync_points)

    def _epoch(self):
        super()._epoch()
        self.stopping = self.world.loop.now > self.world.quiet_from

    def state(self):
        return {"step": self.training.step, "data": self.data.state()}

    def _train(self, step):
        world, member = self.world, self.process.member
        self._compute()
        world.trained(self, self.data.epoch, step)
        world.place("before it looks")
        version, points = self.core.cluster_version(), member.sync_points
        change = self.training.step_end()
        if member.detached:
            return
        if change.changed or member.sync_points != points:
            world.met(self, version, points + 1)
        if change.changed:
            self._arrive()


class Weights:
    """A tensor, as far as the package needs one."""

    dtype, shape, size = ms.int64, (1,), 1

    def __init__(self):
        self.values = np.zeros(1, np.int64)

    def asnumpy(self):
        return self.values

    def copy_(self, tensor):
        self.values[:] = tensor.asnumpy()


class Training(ElasticTraining):
    """One whose weights are no Parameter of MindSpore's."""

    def __init__(self, weights, *trained, **options):
        self._weights = weights
        super().__init__(*trained, **options)

    @property
    def training_state(self):
        return replace(super().training_state, buffers={"weights": self._weights})


class Reducer(nn.Cell):
    """Stands for a network whose gradients are reduced, without Parameters."""

    reduces_gradients = True
    left_to_shards = False


class Samples(Shares):
    """A data set of numbered samples."""

    def next_step(self, rank):
        """As the iterator of an `ElasticDataset` hands it out, but for MindSpore's pipelines; None: the epoch ends."""
        step = None if self.suspended else self._take()
        if step is not None:
            self._recording.deliver(step.share(rank))
            self.driven.begins()
        elif not self.suspended:
            self._end_epoch()
        return step


class Record:
    """The ledger, in memory: the audit reads it in the end."""

    def __init__(self, program):
        self._program = program

    def step(self, epoch, step, rank, share, common):
        self._program.world.committed(self._program, epoch, step, share, common)

    def end(self, walk, rank, common):
        self._program.world.ended(self._program, walk, common)

    def sync(self):
        pass

    def wants_fingerprint(self, epoch, number, step):
        return False  # the weights are compared after every step


class Disk(CheckpointFolder):
    """The folder of the checkpoints, which all share. To write one takes a while, in which its writer may die."""

    def __init__(self, world, process):
        super().__init__("simulated")
        self._world, self._process, self._unwritten = world, process, 0

    def save(self, snapshot):
        self._unwritten += 1
        self._world.begun_checkpoints.add(snapshot.step)
        self._process.start("checkpoint", lambda: self._write(snapshot))

    def _write(self, snapshot):
        self._world.sleep(self._world.short(self._world.current.random) * 10)
        self._world.place("in a checkpoint")
        self._world.checkpoints[snapshot.step] = snapshot
        self._unwritten -= 1

    def wait(self):
        while self._unwritten:
            self._world.sleep(0.01)

    def has(self, step):
        return step in self._world.checkpoints

    def load(self):
        found = self._world.checkpoints
        if not found:
            return None
        step = max(found)
        arrays = {name: ms.Tensor(values, dtype) for name, (values, dtype) in found[step].arrays.items()}
        return Path(f"step-{step}"), arrays, json.loads(json.dumps(found[step].host))

    def _files(self):
        return {(1, step): Path(f"step-{step}") for step in self._world.checkpoints}

    def remove_unfinished(self):
        pass

    def take_job(self):
        return 1  # the simulated job is its folder's only one
