"""The program for ms_kungfu, as in docs/loops.md: a loop of its own over an ElasticDataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np

import ms_kungfu as kf
from benchmarks.churn import samples
from benchmarks.churn.programs.mindspore_common import Step, network, scores
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


class _Fixed:
    """What remains of a training if elasticity is switched off: a share of each batch, and no changes."""

    def __init__(self, source: _Numbered, reduced: bool) -> None:
        self._source, self._epoch = source, 0
        # Without a reduction each worker trains alone, on the share that it would have.
        self._rank, self._size = kf.current_rank(), kf.current_cluster_size()
        self.reduced = reduced

    def epochs(self, stop: Any) -> Iterator[Any]:
        while not stop():
            yield self._epoch
            self._epoch += 1

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        order = np.random.default_rng(self._epoch).permutation(len(self._source))[self._rank :: self._size]
        share = BATCH // self._size
        pipeline = ds.GeneratorDataset(self._source, ["x", "y", "number"], sampler=order.tolist()).batch(share)
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
    step = Step(net, total, None if "reduction" in off else partial(KungFuGradReducer))
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
        fixed = _Fixed(source, "reduction" not in off)
        for _ in fixed.epochs(lambda: step.tally.asnumpy()[-1] > 0):
            for batch in fixed:
                train(*batch)
                worker.committed(step.tally.asnumpy())
        finish(step.tally.asnumpy()[:total].sum() / total)
        return

    def prepare() -> None:
        share = max(1, BATCH // (kf.current_cluster_size() or 1))
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
