"""A training step as a deal of shards, over MindSpore's networks. For users: docs/shards.md."""

from __future__ import annotations

from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ms_kungfu.dataset.elastic import ElasticDataset, ShardBatches
from ms_kungfu.elastic import inventory
from ms_kungfu.elastic.shard_loop import ShardLoop
from ms_kungfu.errors import KungFuError
from ms_kungfu.ops import wait_for_queue
from ms_kungfu.ops._plugin import compute_undivided
from ms_kungfu.ops._shards import SumShards

Gradients = tuple[Any, ...]


class ShardedStep:
    """Trains one step of an `ElasticDataset` that deals shards, in loops of one's own.

    ::

        data = ElasticDataset(samples, global_batch_size=32, shards=8)
        gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        step = ShardedStep(gradients, optimizer, trained=net)
        for image, label in data:
            loss = step(image, label)
            elastic.step_end()

    Each worker calls ``forward_backward`` once for each shard that it is dealt, and ``update`` once, with the gradients
    of the whole global batch: their mean over its samples, where a shard's are the mean over the shard's. Clipping,
    a check for overflow and the optimizer belong in `update`.

    Args:
        forward_backward: a function or cell of a shard's columns (tensors of shapes ``(samples, ...)``) that returns
            ``(loss, gradients)``: a scalar and a tuple of tensors, of float dtypes.
        update: a function, cell or optimizer of these gradients. An optimizer of ms_kungfu doesn't reduce them again.
        trained: cells and optimizers, in lists too, that the two arguments use where these are functions: of cells the
            step keeps the moving statistics alike, of optimizers it knows that they needn't reduce. Statistics of
            which no step is told end training in its first step, with their name.
        gradients_mean: False: `update` gets the sum over the shards instead of the mean.

    A call takes the columns as the dataset's iterator has yielded them, and returns the loss, the mean over the global
    batch, with the same bits at every worker. Two steps on one batch (the two networks of a GAN) are two ShardedSteps,
    called one after the other at all workers.

    Moving statistics of normalization begin each shard with their values as the step began, and end the step with the
    mean of their values after each shard.

    Raises:
        ValueError: where optimizers don't fit (they average models instead of gradients, overlap their reduction, or
            sum over the workers), or columns aren't the iterator's.
        KungFuError: without a step of an `ElasticDataset` with shards.
        DivergenceError: at all workers, in the first step with somebody new: where workers have other versions,
            instruction sets or cores; where a shard that is computed twice, or at two workers, has other gradients,
            with the parameter's name. A dataset with ``shards_check="warn"`` only
            has it logged.
    """

    def __init__(
        self,
        forward_backward: Callable[..., Any],
        update: Callable[[Gradients], Any],
        *,
        trained: Any = None,
        gradients_mean: bool = True,
    ) -> None:
        if ms.get_context("device_target") != "CPU":
            raise ValueError("shards are computed on CPUs only so far; leave shards= out of the ElasticDataset")
        compute_undivided()  # before kernels are made for the number of threads that there are
        cells = [part for part in (forward_backward, update) if isinstance(part, nn.Cell)]
        trained = cells if trained is None else [*cells, trained]
        for optimizer in inventory.collect_optimizers(trained):
            check_optimizer(optimizer)
        for cell in inventory.collect_cells(trained).values():
            if getattr(cell, "reduces_gradients", False):
                cell.leave_to_shards(gradients_mean)
        self._statistics = inventory.moving_statistics(trained)
        for statistic in self._statistics:
            statistic.kungfu_of_shards = True  # for `inventory.check_sharded`
        self.cell = _Shard(forward_backward, update)
        """What runs once a shard."""
        parameters = [p for o in inventory.collect_optimizers(trained) for p in o.parameters]
        self._loop = ShardLoop(parameters, gradients_mean)

    def __call__(self, *columns: Any) -> Any:
        batches = ShardBatches.current()
        if batches is None:
            raise KungFuError("a ShardedStep takes what an ElasticDataset with shards has yielded")
        place = _places(columns, batches.batch(batches.first))

        def compute(shard: int) -> Any:
            batch = batches.batch(shard)
            values = list(batch.values()) if isinstance(batch, dict) else batch
            return self.cell(*(values[i] for i in place))

        wait_for_queue()  # what PyNative mode has queued may write to the statistics
        return self._loop.step(batches, compute, lambda: [statistic.asnumpy() for statistic in self._statistics])

    def compile(self, dataset: ElasticDataset) -> None:
        """Compile it for the shapes of all shards of an epoch without running it, where it takes all columns of
        `dataset` in their order: what ``ElasticTraining(..., prepare=lambda: step.compile(data))`` has a worker do
        before it joins. Nothing in PyNative mode."""
        if ms.get_context("mode") != ms.GRAPH_MODE:
            return
        types = dataset.output_types()
        for samples in dataset.shard_sizes():
            shapes = [[samples, *shape[1:]] for shape in dataset.output_shapes()]
            self.cell.compile(*(ms.Tensor(np.zeros(shape, dtype)) for shape, dtype in zip(shapes, types)))


class _Shard(nn.Cell):
    """One shard, and behind the last one the update."""

    def __init__(self, forward_backward: Callable[..., Any], update: Callable[[Gradients], Any]) -> None:
        super().__init__(auto_prefix=False)
        self.forward_backward = forward_backward
        self.update = update
        self.sum_shards = SumShards("kungfu/shards")

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss, gradients = self.forward_backward(*columns)
        summed = self.sum_shards(gradients + (loss,))
        over = summed[-1]
        loss = summed[-2]
        if over:
            loss = ops.depend(loss, self.update(summed[:-2]))
        return loss, over


def check_optimizer(optimizer: Any) -> None:
    """ValueError for one that doesn't follow the mean of the gradients."""
    if hasattr(optimizer, "replicas_differ"):
        raise ValueError(
            f"{type(optimizer).__name__} averages models, of which each worker has its own, while shards make one "
            "model that doesn't depend on the workers; train with KungFuMomentum or its like, or without shards"
        )


def _places(columns: Any, batch: Any) -> list[int]:
    """Which columns of the batch these are."""
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    ids = [id(value) for value in values]
    if any(id(column) not in ids for column in columns):
        raise ValueError(
            "a ShardedStep takes the columns as the iterator has yielded them, since it needs the same ones of further "
            "shards; what is computed from them belongs in forward_backward, or in the dataset's pipeline"
        )
    return [ids.index(id(column)) for column in columns]
