"""Train a MindSpore network in steps that are partitioned into shards: see docs/shards.md."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ms_kungfu import membership, runtime
from ms_kungfu.comm import Array
from ms_kungfu.dataset.batches import ShardBatches
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import compiled
from ms_kungfu.elastic.shard_loop import ShardLoop
from ms_kungfu.errors import KungFuError
from ms_kungfu.ops import graph_store, wait_for_queue
from ms_kungfu.ops._plugin import compute_undivided, flush_denormals_of_queues
from ms_kungfu.ops._shards import SumShards
from ms_kungfu.trained import inventory

Gradients = tuple[Any, ...]


class ShardedStep:
    """Train one step of an `ElasticDataset` with shards, in your own training loop.

    ::

        data = ElasticDataset(samples, global_batch_size=32, shards=8)
        gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        step = ShardedStep(gradients, optimizer, trained=net)
        for image, label in data:
            loss = step(image, label)
            elastic.step_end()

    Each worker calls ``forward_backward`` once for each of its shards, and ``update`` once, with
    the gradients of the whole global batch. If the gradients of each shard are the mean over the
    shard's samples, `update` receives the mean over all samples. Put clipping, an overflow check
    and the optimizer into `update`.

    Pass the columns to a call exactly as the dataset's iterator has yielded them. The call returns the
    mean loss over the global batch, bitwise identical on every worker. For two steps on one batch
    (e.g. for the two networks of a GAN), use two ShardedSteps. All workers must call them one after the
    other, in the same order.

    Before each shard, the moving statistics of normalization layers are reset to their values at the
    start of the step. At the end of the step, each statistic is set to the mean of the values that it
    had after each shard.

    Args:
        forward_backward: a function or cell that is called with a shard's columns (tensors of
            shapes ``(samples, ...)``). It returns ``(loss, gradients)``: a scalar and a tuple of
            tensors, all with float dtypes.
        update: a function, cell or optimizer that is called with the gradients. An optimizer of
            ms_kungfu doesn't reduce these gradients again.
        trained: the cells and optimizers, or lists of them, that `forward_backward` and `update`
            use, if these are functions. The step keeps the moving statistics of these cells equal
            on all workers, and disables the optimizers' own reduction. If a network's moving
            statistics belong to no ShardedStep, training fails in its first step with an error that
            names these statistics.
        gradients_mean: whether `update` receives the mean over the shards, rather than the sum.

    Raises:
        ValueError: if an optimizer averages models instead of gradients, overlaps its reduction, or
            sums over the workers. Also if a column doesn't come from the iterator, or if the device
            isn't a CPU.
        KungFuError: if the object is called outside a step of an `ElasticDataset` with shards.
        DivergenceError: on all workers, in the first step with a new worker. One cause is that the
            workers have different versions, instruction sets or numbers of cores. Another cause is
            that two computations of the same shard yield different gradients, even on a single
            worker. The message names the Parameter. With ``shards_check="warn"``, the difference is
            only logged.
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
            raise ValueError("shards are supported on CPUs only; leave shards= out of the ElasticDataset")
        compute_undivided()  # do this before the program creates kernels, which depend on the number of threads
        cells = [part for part in (forward_backward, update) if isinstance(part, nn.Cell)]
        trained = cells if trained is None else [*cells, trained]
        for optimizer in inventory.collect_optimizers(trained):
            check_optimizer(optimizer)
        for cell in inventory.collect_cells(trained).values():
            if getattr(cell, "reduces_gradients", False):
                cell.leave_to_shards(gradients_mean)
        self._statistics = _Statistics(inventory.moving_statistics(trained))
        held = {id(p): p.nbytes for cell in inventory.collect_cells(trained).values() for p in cell.get_parameters()}
        self.cell = Shard(forward_backward, update, sum(held.values()))
        """An object that runs the network once per shard."""
        parameters = [p for o in inventory.collect_optimizers(trained) for p in o.parameters]
        self._loop = ShardLoop(parameters, gradients_mean, self.cell.dtypes, self.cell.shapes)
        self._is_first = True

    def __call__(self, *columns: Any) -> Any:
        """Run one training step. The class docstring describes the columns and the result."""
        batches = ShardBatches.current()
        if batches is None:
            raise KungFuError(
                "the ShardedStep was called outside a step; call it in a loop over an ElasticDataset with shards"
            )
        place = _places(columns, batches.batch(batches.first))

        def compute(shard: int) -> Any:
            batch = batches.batch(shard)
            values = list(batch.values()) if isinstance(batch, dict) else batch
            return self.cell(*(values[i] for i in place))

        if self._statistics:
            wait_for_queue()  # operations that PyNative mode has queued may write to the statistics
        if not self._is_first:
            return self._loop.step(batches, compute, self._statistics.arrays)
        before = self._statistics.of_others()
        loss = self._loop.step(batches, compute, self._statistics.arrays)
        self._statistics.check_others(before)
        self._is_first = False
        return loss

    def compile(self, dataset: ElasticDataset) -> None:
        """Compile the step for all shard shapes of an epoch, without running the step.

        The step must accept all columns of `dataset`, in the dataset's order. To compile before a worker
        joins, use ``ElasticTraining(..., prepare=lambda: step.compile(data))``. In PyNative mode the method
        does nothing.

        Args:
            dataset: the `ElasticDataset` on which the program will train.
        """
        if not compiled.graph_mode():
            return
        types = dataset.output_types()
        assert dataset.shards is not None
        several = membership.is_joining() or dataset.shards > runtime.current_cluster_size()
        for samples in dataset.shard_sizes():
            shapes = [[samples, *shape[1:]] for shape in dataset.output_shapes()]
            columns = (ms.Tensor(np.zeros(shape, dtype)) for shape, dtype in zip(shapes, types))
            self.cell.compile(*columns, several=several)


class _Statistics:
    """The moving statistics that one ShardedStep keeps equal on all workers."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        inventory.statistics_of_shards.update((id(parameter), parameter) for parameter in parameters)
        self._addresses: list[int] = []
        self._arrays: list[Array] = []

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def arrays(self) -> list[Array]:
        """Return arrays that share the statistics' memory. The arrays are cached, because `asnumpy` is slow."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._arrays = [parameter.asnumpy() for parameter in self._parameters]
            self._addresses = addresses
        return self._arrays

    def of_others(self) -> list[tuple[Any, Array]]:
        """Return the moving statistics of all other ShardedSteps, with copies of their current values."""
        own = {id(parameter) for parameter in self._parameters}
        others = [parameter for key, parameter in inventory.statistics_of_shards.items() if key not in own]
        if others:
            wait_for_queue()
        return [(parameter, parameter.asnumpy().copy()) for parameter in others]

    @staticmethod
    def check_others(before: Sequence[tuple[Any, Array]]) -> None:
        """Raise ValueError if this ShardedStep has changed a moving statistic of another ShardedStep."""
        if before:
            wait_for_queue()
        for parameter, value in before:
            if not np.array_equal(parameter.asnumpy(), value, equal_nan=True):
                raise ValueError(
                    f"a ShardedStep changes {parameter.name!r}, which belongs to a network that wasn't "
                    "passed to it; pass all networks that the step calls in training mode, as in "
                    "ShardedStep(..., trained=[net, other_net])"
                )


# At this total size in bytes, copying and updating a network's Parameters takes about as long as running a branch in
# the graph.
_DEAR_BYTES = 8 << 20
# These primitives may run again after an update was undone: a second run of KungFuSumShards contributes nothing, and
# the random numbers of KungFuDropout depend only on the shard and on the position in the tensor.
_UNDOABLE = {"KungFuSumShards", "KungFuDropout"}


class Shard:
    """Compute the gradients of one shard and contribute them; after the last shard of a step, update the Parameters.

    In GRAPH mode, a branch around the update would be expensive: MindSpore's runtime hands the
    branch from one thread to another, which takes longer than the update of a small network.
    Therefore this class normally uses a straight graph, which updates the Parameters after each
    shard. If the step isn't complete after a shard, the changed Parameters are restored
    (ops_src/shards/step.h). With one shard per worker, this happens in only two cases: after a
    worker has failed, and in the determinism probe.

    A graph with a branch is used in two cases. In the first case, the update can't be undone, because it
    prints, communicates or draws random numbers. In the second case, the network is large, and workers
    have several shards per step when training begins.
    """

    def __init__(
        self, forward_backward: Callable[..., Any], update: Callable[[Gradients], Any], held_bytes: int
    ) -> None:
        self._branching = _Branching(forward_backward, update)
        self._straight = _Straight(forward_backward, update)
        self._held_bytes = held_bytes  # total size of the Parameters in bytes
        self._goes_straight: bool | None = None  # whether the straight graph is used; None if not known yet
        self._shapes: set[Any] = set()  # the column shapes for which the straight graph has been compiled
        self._written = _Written()  # the Parameters that the straight graph writes
        self._computed: set[Any] = set()  # the column shapes of the computed shards
        self._queues_flush = False  # whether the threads of PyNative mode's queues flush denormals to zero

    def __call__(self, *columns: Any) -> tuple[Any, bool]:
        """Compute a shard. Return the loss, a scalar tensor, and whether the step is complete."""
        core = membership.current().core
        # Flush denormals to zero, as the threads of MindSpore's pool do. A graph's first run uses the pool's threads,
        # and later runs use the calling thread. If the calling thread didn't flush, a joining worker would flush values
        # that other workers keep, e.g. a moment that decays without gradients. In PyNative mode, the thread of a queue
        # plays the role of the calling thread.
        if not self._queues_flush and not compiled.graph_mode():
            wait_for_queue()  # raises an error if a queued operation has failed
            flush_denormals_of_queues()
            self._queues_flush = True
        flushed = core.flush_denormals(True)
        try:
            return self._run(core, columns)
        finally:
            core.flush_denormals(flushed)

    def _run(self, core: Any, columns: Sequence[Any]) -> tuple[Any, bool]:
        self._computed.add(tuple(column.shape for column in columns))
        several = len(core.missing_shards()) > 1
        if not compiled.graph_mode() or not self._is_straight(columns, several):
            loss, over = self._branching(*columns)
            return loss, bool(over.asnumpy())
        look = self._written.look  # the variable keeps the callback alive while the core may call it
        core.update_follows(look)
        stands = False
        try:
            loss = self._straight(*columns)
            # The graph must not return this value, because reading a graph's output would take most of a step's time.
            stands = core.sharded_step_over()
            return loss, stands
        finally:
            if not stands:
                self._written.check()
                core.undo_update()

    def compile(self, *columns: Any, several: bool = False) -> None:
        """Compile for GRAPH mode. `several`: whether workers have several shards per step when training begins."""
        if not self._is_straight(columns, several):
            self._branching.compile(*columns)

    def _is_straight(self, columns: Sequence[Any], several: bool) -> bool:
        """Return whether to use the straight graph. To find out, this method may have to compile the graph."""
        if self._goes_straight is None:
            self._goes_straight = not (several and self._held_bytes > _DEAR_BYTES)
        shapes = tuple(column.shape for column in columns)
        if self._goes_straight and shapes not in self._shapes:
            self._shapes.add(shapes)
            is_undoable = functools.cache(self._is_undoable)  # both uses below need the same slow export of the graph
            is_read = graph_store.compile_or_read(
                self._straight, columns, lambda: is_undoable() and self._has_one_dtype()
            )
            self._written.hold(compiled.parameters(self._straight))
            self._goes_straight = (is_read or is_undoable()) and self._written.is_plain()
        return self._goes_straight

    def _is_undoable(self) -> bool:
        return compiled.effects(self._straight) <= _UNDOABLE

    def _has_one_dtype(self) -> bool:
        """Return whether all gradients have one dtype. A worker that reads a stored graph doesn't know the dtypes."""
        return len(set(self._straight.sum_shards.dtypes)) == 1

    def dtypes(self) -> list[str]:
        """Return the dtypes of the gradients, followed by the loss's dtype.

        The list is empty before a shard has been computed, and if a stored graph was read; in the second case, all
        dtypes are equal.
        """
        return self._straight.sum_shards.dtypes or self._branching.sum_shards.dtypes

    def shapes(self) -> int:
        """Return how many different column shapes the computed shards had."""
        return len(self._computed)

    @property
    def graphs(self) -> int:
        """Return the number of graphs that have been compiled."""
        return len(self._straight.compile_cache) + len(self._branching.compile_cache)

    def set_train(self) -> None:
        """Set the graphs to training mode."""
        self._branching.set_train()
        self._straight.set_train()


class _Written:
    """The Parameters that a compiled cell writes, and their addresses in memory.

    A MindSpore CPU graph writes to the memory that a Parameter occupies when the graph begins to run.
    """

    def __init__(self) -> None:
        self._parameters: list[Any] = []
        self._addresses: list[int] | None = None

    def hold(self, parameters: Sequence[Any]) -> None:
        self._parameters = list(parameters)

    def is_plain(self) -> bool:
        """Return whether the memory of each Parameter is contiguous."""
        return all(p.data_ptr() != 0 and p.is_contiguous() for p in self._parameters if p.nbytes > 0)

    def look(self) -> list[tuple[int, int]]:
        """Return each Parameter's address and size in bytes. Called while the graph runs.

        Raise KungFuError if a Parameter isn't contiguous.
        """
        if not self.is_plain():
            raise KungFuError("a Parameter of a ShardedStep has become a view of another tensor's memory")
        self._addresses = self._read()
        return [(address, p.nbytes) for address, p in zip(self._addresses, self._parameters)]

    def check(self) -> None:
        """Raise KungFuError if a Parameter's address has changed since the last call of `look`."""
        addresses, self._addresses = self._addresses, None
        if addresses is not None and self._read() != addresses:
            raise KungFuError(
                "InternalError: Parameters have moved in memory during the run of a graph that may have to be undone"
            )

    def _read(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


class _Parts(nn.Cell):
    """The operations that both graphs of a `Shard` have in common."""

    def __init__(self, forward_backward: Callable[..., Any], update: Callable[[Gradients], Any]) -> None:
        super().__init__(auto_prefix=False)
        self.forward_backward = forward_backward
        self.update = update
        self.sum_shards = SumShards("kungfu/shards")


class _Straight(_Parts):
    """The straight graph: it computes one shard and always updates the Parameters."""

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss, gradients = self.forward_backward(*columns)
        summed = self.sum_shards(gradients + (loss,))
        return ops.depend(summed[-2], self.update(summed[:-2]))


class _Branching(_Parts):
    """The branching graph: it computes one shard, and updates the Parameters only after the last shard."""

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss, gradients = self.forward_backward(*columns)
        summed = self.sum_shards(gradients + (loss,))
        over = summed[-1]
        loss = summed[-2]
        if over:
            loss = ops.depend(loss, self.update(summed[:-2]))
        return loss, over


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that averages models rather than gradients."""
    if hasattr(optimizer, "replicas_differ"):
        raise ValueError(
            f"{type(optimizer).__name__} trains a separate model at each worker, but training with shards has one "
            "model; train with an optimizer such as KungFuMomentum, or without shards"
        )


def _places(columns: Any, batch: Any) -> list[int]:
    """Return the position in `batch` of each column in `columns`."""
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    ids = [id(value) for value in values]
    if any(id(column) not in ids for column in columns):
        raise ValueError(
            "a ShardedStep got a column that doesn't come from the iterator, so it can't get that column "
            "for other shards; compute new columns in forward_backward, or in the dataset's pipeline"
        )
    return [ids.index(id(column)) for column in columns]
