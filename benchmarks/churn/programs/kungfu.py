"""The program for ms_kungfu, as in docs/loops.md: a loop of its own over an ElasticDataset."""

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
from benchmarks.churn.programs.mindspore_common import Alone, Step, network, scores
from benchmarks.churn.worker import Worker, accuracy, read_plan
from benchmarks.churn.workloads import BATCH
from ms_kungfu import env
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, consistency
from ms_kungfu.optimizers import KungFuGradReducer

_NO_EPOCHS = 1_000_000  # more than any run has


class _Numbered:
    """Samples with their numbers."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> tuple[Any, Any, Any]:
        return self._x[number], self._y[number], np.int32(number)


def _fixed_epoch(source: _Numbered, epoch: int) -> Iterator[Any]:
    """Yield this worker's share of an epoch, if elasticity is switched off."""
    rank, size = kf.current_rank(), kf.current_cluster_size()
    order = np.random.default_rng(epoch).permutation(len(source))[rank::size]
    pipeline = ds.GeneratorDataset(source, ["x", "y", "number"], sampler=order.tolist()).batch(BATCH // size)
    yield from pipeline.create_tuple_iterator(num_epochs=1)


def main(path: str) -> None:
    plan = read_plan(path)
    worker = Worker(plan, spare=bool(os.environ.get(env.STANDBY.name)))
    ms.set_context(mode=ms.GRAPH_MODE)
    given = worker.samples()
    total = worker.workload.total
    source = _Numbered(given["x"], given["y"])
    net = network(worker.workload)
    off = set(plan.switches)
    step = Step(net, total, Alone if "reduction" in off else KungFuGradReducer)
    step.set_train()
    worker.phase("network")
    if "consistency" in off:
        consistency.PERIOD = 1 << 40

    def train(x: Any, y: Any, numbers: Any) -> None:
        marks = samples.marks(total, numbers.asnumpy(), kf.current_rank(), worker.stop_asked())
        step(x, y, ms.Tensor(marks))

    def finish(epochs: float) -> None:
        right = accuracy(scores(net, given["test_x"]), given["test_y"])
        weights = [each.asnumpy() for each in net.trainable_params()]
        worker.end(step.tally.asnumpy(), weights, epochs, right)

    if "elasticity" in off:
        epoch = 0
        while step.tally.asnumpy()[-1] == 0:
            for batch in _fixed_epoch(source, epoch):
                train(*batch)
                worker.committed(step.tally.asnumpy())
            epoch += 1
        finish(epoch)
        return

    def prepare() -> None:
        # Compile for this worker's share now and after one failure (docs/loops.md).
        for share in data.batch_sizes():
            marks = samples.marks(total, np.arange(share), 0, False)
            step.compile(ms.Tensor(given["x"][:share]), ms.Tensor(given["y"][:share]), ms.Tensor(marks))
        worker.phase("compilation")

    data = ElasticDataset(
        ds.GeneratorDataset(source, ["x", "y", "number"], shuffle=False),
        global_batch_size=BATCH,
        seed=1,
        ledger=Path(plan.folder) / "ledger" if "ledger" not in off else None,
    )
    elastic = ElasticTraining(
        net, step.optimizer, step, dataset=data, prepare=prepare, resume=True,
        checkpoint_dir=Path(plan.folder) / "checkpoints", checkpoint_every=plan.checkpoint_every,
    )  # fmt: skip
    prepare()  # ElasticTraining calls it only in a joining worker
    for _ in elastic.epochs(_NO_EPOCHS):
        worker.phase("join and state")
        for batch in data:
            train(*batch)
            if not elastic.step_end().detached:
                worker.committed(step.tally.asnumpy())
        if step.tally.asnumpy()[-1] > 0:
            elastic.request_stop()
        elastic.agree_on_stop()
    if not kf.detached():
        # A worker may have joined just as an epoch ended, so the others have trained one step of the next one.
        finish(step.tally.asnumpy()[:total].sum() / total)


if __name__ == "__main__":
    main(sys.argv[1])
