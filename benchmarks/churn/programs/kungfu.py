"""The program for ms_kungfu, as in docs/loops.md and docs/shards.md: a hand-written loop over an ElasticDataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np

import ms_kungfu as kf
from benchmarks.churn import samples
from benchmarks.churn.programs.mindspore_common import (
    Alone,
    ShardGradients,
    ShardUpdate,
    Step,
    network,
    scores,
    tally,
)  # fmt: skip
from benchmarks.churn.worker import Worker, accuracy, read_plan
from benchmarks.churn.workloads import BATCH
from ms_kungfu import env
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, ShardedStep, consistency
from ms_kungfu.optimizers import KungFuGradReducer

_NO_EPOCHS = 1_000_000  # more than any run has


class _Numbered:
    """Samples with their indices."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> tuple[Any, Any, Any]:
        return self._x[number], self._y[number], np.int32(number)


def _fixed_epoch(source: _Numbered, epoch: int) -> Iterator[Any]:
    """Yield this worker's share of an epoch. Used if elasticity is switched off."""
    rank, size = kf.current_rank(), kf.current_cluster_size()
    order = np.random.default_rng(epoch).permutation(len(source))[rank::size]
    pipeline = ds.GeneratorDataset(source, ["x", "y", "number"], sampler=order.tolist()).batch(BATCH // size)
    yield from pipeline.create_tuple_iterator(num_epochs=1)


class _Shares:
    """Trains on the worker's share of each step's batch."""

    def __init__(self, net: Any, given: Any, worker: Worker, reducer: Any) -> None:
        self._given, self._worker = given, worker
        self._total = worker.workload.total
        self._step = Step(net, self._total, reducer)
        self._step.set_train()
        self.tally, self.trained = self._step.tally, [net, self._step.optimizer, self._step]

    def train(self, x: Any, y: Any, numbers: Any) -> None:
        marks = samples.marks(self._total, numbers.asnumpy(), kf.current_rank(), self._worker.stop_asked())
        self._step(x, y, ms.Tensor(marks))

    def compile(self, data: ElasticDataset) -> None:
        """Compile for this worker's current share and for its share after one failure (docs/loops.md)."""
        for share in data.batch_sizes():
            marks = samples.marks(self._total, np.arange(share), 0, False)
            self._step.compile(ms.Tensor(self._given["x"][:share]), ms.Tensor(self._given["y"][:share]),
                               ms.Tensor(marks))  # fmt: skip


class _Shards:
    """Trains on the worker's shards of each step's batch (docs/shards.md)."""

    def __init__(self, net: Any, total: int) -> None:
        net.set_train()
        self.tally = tally(total)
        gradients, update = ShardGradients(net, self.tally), ShardUpdate(net, self.tally)
        self.trained = [gradients, update, update.optimizer]
        self.train = ShardedStep(gradients, update, trained=self.trained)
        self.compile = self.train.compile


def main(path: str) -> None:
    plan = read_plan(path)
    worker = Worker(plan, spare=bool(os.environ.get(env.STANDBY.name)))
    ms.set_context(mode=ms.GRAPH_MODE)
    given = worker.samples()
    total = worker.workload.total
    source = _Numbered(given["x"], given["y"])
    net = network(worker.workload)
    off = set(plan.switches)
    step: Any = (
        _Shards(net, total) if plan.shards
        else _Shares(net, given, worker, Alone if "reduction" in off else KungFuGradReducer)
    )  # fmt: skip
    worker.phase("network")
    if "consistency" in off:
        consistency.PERIOD = 100_000  # more steps than any run has; the check keeps a list for each

    def finish(epochs: float) -> None:
        right = accuracy(scores(net, given["test_x"]), given["test_y"])
        weights = [each.asnumpy() for each in net.trainable_params()]
        worker.end(step.tally.asnumpy(), weights, epochs, right)

    if "elasticity" in off:
        epoch = 0
        while step.tally.asnumpy()[-1] == 0:
            for batch in _fixed_epoch(source, epoch):
                step.train(*batch)
                worker.committed(step.tally.asnumpy())
            epoch += 1
        finish(epoch)
        return

    def prepare() -> None:
        step.compile(data)
        worker.phase("compilation")

    data = ElasticDataset(
        ds.GeneratorDataset(source, ["x", "y", "number"], shuffle=False),
        global_batch_size=BATCH,
        seed=1,
        shards=plan.shards,
        ledger=Path(plan.folder) / "ledger" if "ledger" not in off else None,
    )
    elastic = ElasticTraining(
        *step.trained, dataset=data, prepare=prepare, resume=True,
        checkpoint_dir=Path(plan.folder) / "checkpoints", checkpoint_every=plan.checkpoint_every,
    )  # fmt: skip
    if not plan.shards:
        prepare()  # without shards, ElasticTraining calls `prepare` only in a joining worker
    for _ in elastic.epochs(_NO_EPOCHS):
        worker.phase("join and state")
        for batch in data:
            step.train(*batch)
            if not elastic.step_end().detached:
                worker.committed(step.tally.asnumpy())
        if worker.stop_asked():
            elastic.request_stop()
        elastic.agree_on_stop()
    if not kf.detached():
        # The dataset counts without the tally. If a worker joined just as an epoch ended, the others have executed one
        # step of the next epoch.
        finish(data.epoch + data.position / total)


if __name__ == "__main__":
    main(sys.argv[1])
