"""What a worker runs where a step is a deal of shards: the real `ElasticDataset`, its iterators and `ShardLoop`."""

from __future__ import annotations

import numpy as np

from ms_kungfu import comm
from ms_kungfu.dataset.batches import ShardBatches
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import SchedulePolicy
from ms_kungfu.elastic.shard_loop import ShardLoop
from tests.fault.simulator.setting import Violation
from tests.fault.simulator.shards import gradient, updated
from tests.fault.simulator.training import Program


class ShardedProgram(Program):
    """The same loop, over shards."""

    def __init__(self, world, process):
        super().__init__(world, process)
        if self.setup.uneven:
            process.slow *= world.current.random.choice((1, 1, 1.5, 3))

    def _samples(self):
        setup = self.setup
        data = ElasticDataset(
            lambda numbers: Pipeline(self, numbers), global_batch_size=setup.global_batch, total=setup.samples,
            seed=setup.seed, drop_remainder=setup.drop_remainder, shards=setup.shards,
        )  # fmt: skip
        data._recording.ledger = self._ledger()
        return data

    def _policy(self):
        resharded = self.setup.resharded
        batches, shards = ({step: pair[i] for step, *pair in resharded} for i in (0, 1))
        return SchedulePolicy(global_batch_size=batches, shards=shards) if resharded else None

    def _call(self):
        self.loops = [ShardLoop((), mean=True) for _ in range(self.setup.sums)]
        super()._call()

    def _epoch(self):
        for columns in self.data.create_tuple_iterator(num_epochs=1):
            self._train(columns)

    def _train(self, columns):
        world, batches = self.world, ShardBatches.current()
        if columns is not batches.batch(batches.first):
            raise Violation(f"{self.process.name} is yielded another batch than its step's first")
        self.losses = []
        for loop in self.loops:
            self.losses.append(loop.step(batches, lambda shard: self._shard(batches.batch(shard))).asnumpy())
            world.place("after the sum")
        stop = np.array([world.loop.now > world.quiet_from], np.int32)
        self.stopping |= bool(comm.all_reduce(stop, "max", "program/stop")[0])
        change = self.training.step_end()
        if change.undone:
            raise Violation(f"{self.process.name}: a step of shards is undone")
        if self.training.should_stop:
            return
        if change.changed:
            self._arrive()
        if (begins := self._samples()).members != self.data.members:
            raise Violation(
                f"{self.process.name}: a dataset that begins now deals to {begins.members}, this one to "
                f"{self.data.members}"
            )

    def _shard(self, columns):
        """What the network does with a shard: gradients, the sum, and behind the last one the update."""
        step = self.core.sharded
        self._compute(1 / self.data.shards)
        self.world.place("in a leaf")
        seed, key = step.key
        samples = columns[0].tolist()
        roots = step.bring([gradient(self.weights, seed, key, k, samples) for k in range(len(self.setup.groups))])
        if roots is None:
            return Scalar(0), False
        self.weights = updated(self.weights, roots)
        return Scalar(roots[0]), True


class Scalar:
    """A tensor."""

    def __init__(self, value):
        self._value = value

    def asnumpy(self):
        return self._value


class Pipeline:
    """MindSpore's, of one column, which has the samples' numbers."""

    children = ()

    def __deepcopy__(self, memory):
        return Pipeline(self._program, self._numbers)

    def __init__(self, program, numbers):
        self._program, self._numbers = program, numbers
        self._size = None
        self._at = self._given = 0  # numbers and batches

    def batch(self, size):
        self._size = size
        return self

    def get_batch_num(self):
        return self._given

    def get_col_names(self):
        return ["number"]

    def create_tuple_iterator(self, **options):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        if self._at >= len(self._numbers):
            raise StopIteration
        if self._size is None:  # a sample that the workers compare
            self._at += 1
            return [np.array(self._numbers[self._at - 1])]
        self._program.world.place("reads a batch")
        size = self._size(self) if callable(self._size) else self._size
        batch = self._numbers[self._at : self._at + size]
        self._at, self._given = self._at + size, self._given + 1
        return [np.array(batch)]

    def stop(self):
        pass
