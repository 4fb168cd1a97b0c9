"""A training step that is partitioned into shards, over MindSpore's networks. For users: docs/shards.md."""

from __future__ import annotations

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
from ms_kungfu.ops import wait_for_queue
from ms_kungfu.ops._plugin import compute_undivided, flush_denormals_of_queues
from ms_kungfu.ops._shards import SumShards
from ms_kungfu.trained import inventory

Gradients = tuple[Any, ...]


class ShardedStep:
    """Train one step of an `ElasticDataset` with shards, in loops of your own.

    ::

        data = ElasticDataset(samples, global_batch_size=32, shards=8)
        gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        step = ShardedStep(gradients, optimizer, trained=net)
        for image, label in data:
            loss = step(image, label)
            elastic.step_end()

    Each worker calls ``forward_backward`` once for each shard that it is assigned. It calls ``update``
    once, with the gradients of the whole global batch. They are the mean over its samples, if a shard's
    are the mean over the shard's. Clipping, a check for overflow and the optimizer belong in `update`.

    A call takes the columns as the dataset's iterator has yielded them. It returns the loss, the mean
    over the global batch, with the same bits at every worker. Two steps on one batch (the two networks
    of a GAN) are two ShardedSteps, called one after the other at all workers.

    Moving statistics of normalization begin each shard with their values at the start of the step. They
    end the step with the mean of their values after each shard.

    Args:
        forward_backward: a function or cell of a shard's columns (tensors of shapes ``(samples,
            ...)``). It returns ``(loss, gradients)``: a scalar and a tuple of tensors, of float dtypes.
        update: a function, cell or optimizer of these gradients. An optimizer of ms_kungfu doesn't
            reduce them again.
        trained: cells and optimizers, in lists too, that the two arguments use if these are functions.
            The step keeps the moving statistics of the cells alike, and has the optimizers not reduce.
            Statistics that no step knows end training in its first step, with their name.
        gradients_mean: False: `update` gets the sum over the shards instead of the mean.

    Raises:
        ValueError: if optimizers don't fit (they average models instead of gradients, overlap their
            reduction, or sum over the workers), or columns aren't the iterator's. Also on another
            device than a CPU.
        KungFuError: without a step of an `ElasticDataset` with shards.
        DivergenceError: at all workers, in the first step with a new worker. One cause is workers of
            other versions, instruction sets or cores. The other is a shard with other gradients when it
            is computed twice, or at two workers; the message names the parameter. A dataset with
            ``shards_check="warn"`` only logs it.
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
        self._statistics = _Statistics(inventory.moving_statistics(trained))
        held = {id(p): p.nbytes for cell in inventory.collect_cells(trained).values() for p in cell.get_parameters()}
        self.cell = Shard(forward_backward, update, sum(held.values()))
        """The cell that runs once a shard."""
        parameters = [p for o in inventory.collect_optimizers(trained) for p in o.parameters]
        self._loop = ShardLoop(parameters, gradients_mean, self.cell.dtypes, self.cell.shapes)
        self._is_first = True

    def __call__(self, *columns: Any) -> Any:
        """Train a step; the class describes columns and result."""
        batches = ShardBatches.current()
        if batches is None:
            raise KungFuError(
                "a ShardedStep takes what an ElasticDataset with shards has yielded; call it in a loop over one"
            )
        place = _places(columns, batches.batch(batches.first))

        def compute(shard: int) -> Any:
            batch = batches.batch(shard)
            values = list(batch.values()) if isinstance(batch, dict) else batch
            return self.cell(*(values[i] for i in place))

        if self._statistics:
            wait_for_queue()  # operations that PyNative mode has queued may write to them
        if not self._is_first:
            return self._loop.step(batches, compute, self._statistics.arrays)
        before = self._statistics.of_others()
        loss = self._loop.step(batches, compute, self._statistics.arrays)
        self._statistics.check_others(before)
        self._is_first = False
        return loss

    def compile(self, dataset: ElasticDataset) -> None:
        """Compile the step for the shapes of all shards of an epoch without running it.

        The step has to take all columns of `dataset` in their order. ``ElasticTraining(..., prepare=lambda:
        step.compile(data))`` has a worker do so before it joins. It does nothing in PyNative mode.

        Args:
            dataset: the `ElasticDataset` that will be trained.
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
    """Moving statistics."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        inventory.statistics_of_shards.update((id(parameter), parameter) for parameter in parameters)
        self._addresses: list[int] = []
        self._arrays: list[Array] = []

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def arrays(self) -> list[Array]:
        """Return their present memory: `asnumpy` shares it, and takes longer than to see whether it is the same."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._arrays = [parameter.asnumpy() for parameter in self._parameters]
            self._addresses = addresses
        return self._arrays

    def of_others(self) -> list[tuple[Any, Array]]:
        """Return what other steps keep alike, and its present value."""
        own = {id(parameter) for parameter in self._parameters}
        others = [parameter for key, parameter in inventory.statistics_of_shards.items() if key not in own]
        if others:
            wait_for_queue()
        return [(parameter, parameter.asnumpy().copy()) for parameter in others]

    @staticmethod
    def check_others(before: Sequence[tuple[Any, Array]]) -> None:
        """Raise ValueError if a step has changed one, since it would have to keep that one alike, too."""
        if before:
            wait_for_queue()
        for parameter, value in before:
            if not np.array_equal(parameter.asnumpy(), value, equal_nan=True):
                raise ValueError(
                    f"a ShardedStep changes {parameter.name!r}, whose network it doesn't know: give each step all "
                    "networks that it calls in training mode, ShardedStep(..., trained=[net, other_net])"
                )


# Parameters of this size cost about as much to copy and to update as a branch does.
_DEAR_BYTES = 8 << 20
# A run of these can be undone: one contributes nothing, the other draws by shard and position.
_UNDOABLE = {"KungFuSumShards", "KungFuDropout"}


class Shard:
    """The cell that runs once a shard: its gradients, their contribution to the sum, and after the last one the update.

    In GRAPH mode a branch around the update is expensive. MindSpore's runtime passes it from thread to thread, which
    takes longer than the update of a small network. So there the graph is straight. The update runs after each shard,
    and if the step isn't over, what it has written is restored (ops_src/shards/step.h). With as many shards as workers
    that happens only if a worker has failed, and in the first step, of which a shard is computed for comparison.

    The branch is used if the update can't be undone (it prints, communicates, draws random numbers), or if a large
    network begins with several shards a worker.
    """

    def __init__(
        self, forward_backward: Callable[..., Any], update: Callable[[Gradients], Any], held_bytes: int
    ) -> None:
        self._branching = _Branching(forward_backward, update)
        self._straight = _Straight(forward_backward, update)
        self._held_bytes = held_bytes  # by Parameters
        self._goes_straight: bool | None = None  # None: not known yet
        self._shapes: set[Any] = set()  # of the columns that the straight graph is compiled for
        self._written = _Written()  # by it
        self._computed: set[Any] = set()  # shapes of columns
        self._queues_flush = False  # whether a queue's thread treats denormals so, permanently

    def __call__(self, *columns: Any) -> tuple[Any, bool]:
        """Compute a shard. Return the loss, a scalar tensor, and whether the step is over."""
        core = membership.current().core
        # As the threads of MindSpore's pool do. It runs a graph on these the first time, and later on the caller's. So
        # a joining worker would make zeros of what the others keep: moments without a gradient come to that. In
        # PyNative mode a queue's thread is such a caller, too.
        if not self._queues_flush and not compiled.graph_mode():
            wait_for_queue()  # which raises the error in it
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
        look = self._written.look  # held while it may be called
        core.update_follows(look)
        stands = False
        try:
            loss = self._straight(*columns)
            # a request for it as an output takes longer than all else around the graph
            stands = core.sharded_step_over()
            return loss, stands
        finally:
            if not stands:
                self._written.check()
                core.undo_update()

    def compile(self, *columns: Any, several: bool = False) -> None:
        """Compile for GRAPH mode. `several`: workers begin with more than one shard a step."""
        if not self._is_straight(columns, several):
            self._branching.compile(*columns)

    def _is_straight(self, columns: Sequence[Any], several: bool) -> bool:
        """Return whether the straight graph is to run. Compiles it to know."""
        if self._goes_straight is None:
            self._goes_straight = not (several and self._held_bytes > _DEAR_BYTES)
        shapes = tuple(column.shape for column in columns)
        if self._goes_straight and shapes not in self._shapes:
            self._shapes.add(shapes)
            self._straight.compile(*columns)
            self._written.hold(compiled.parameters(self._straight))
            self._goes_straight = compiled.effects(self._straight) <= _UNDOABLE and self._written.is_plain()
        return self._goes_straight

    def dtypes(self) -> list[str]:
        """Return the dtypes of the gradients, and of the loss after them; [] before a shard has been computed."""
        return self._straight.sum_shards.dtypes or self._branching.sum_shards.dtypes

    def shapes(self) -> int:
        """Return how many shapes of shards have been computed."""
        return len(self._computed)

    @property
    def graphs(self) -> int:
        """Return how many graphs have been compiled."""
        return len(self._straight.compile_cache) + len(self._branching.compile_cache)

    def set_train(self) -> None:
        """Set the graphs to training."""
        self._branching.set_train()
        self._straight.set_train()


class _Written:
    """The Parameters of a compiled cell, and their memory.

    MindSpore's CPU graphs write to the memory that a Parameter has when they begin to run.
    """

    def __init__(self) -> None:
        self._parameters: list[Any] = []
        self._addresses: list[int] | None = None

    def hold(self, parameters: Sequence[Any]) -> None:
        self._parameters = list(parameters)

    def is_plain(self) -> bool:
        """Return whether the memory of each is in one piece."""
        return all(p.data_ptr() != 0 and p.is_contiguous() for p in self._parameters if p.nbytes > 0)

    def look(self) -> list[tuple[int, int]]:
        """Return addresses and bytes, in a run of the cell. KungFuError if they aren't in one piece."""
        if not self.is_plain():
            raise KungFuError("a Parameter of a step of shards has come to be a view of another tensor's memory")
        self._addresses = self._read()
        return [(address, p.nbytes) for address, p in zip(self._addresses, self._parameters)]

    def check(self) -> None:
        """Raise KungFuError if they have moved since `look`, if that was called."""
        addresses, self._addresses = self._addresses, None
        if addresses is not None and self._read() != addresses:
            raise KungFuError("InternalError: Parameters have moved while a graph ran that may have to be undone")

    def _read(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


class _Parts(nn.Cell):
    """The operations in a shard's graph."""

    def __init__(self, forward_backward: Callable[..., Any], update: Callable[[Gradients], Any]) -> None:
        super().__init__(auto_prefix=False)
        self.forward_backward = forward_backward
        self.update = update
        self.sum_shards = SumShards("kungfu/shards")


class _Straight(_Parts):
    """One shard, and the update."""

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss, gradients = self.forward_backward(*columns)
        summed = self.sum_shards(gradients + (loss,))
        return ops.depend(summed[-2], self.update(summed[:-2]))


class _Branching(_Parts):
    """One shard, and after the last one the update."""

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss, gradients = self.forward_backward(*columns)
        summed = self.sum_shards(gradients + (loss,))
        over = summed[-1]
        loss = summed[-2]
        if over:
            loss = ops.depend(loss, self.update(summed[:-2]))
        return loss, over


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that doesn't follow the mean of the gradients."""
    if hasattr(optimizer, "replicas_differ"):
        raise ValueError(
            f"{type(optimizer).__name__} averages models, of which each worker has its own, while shards make one "
            "model that doesn't depend on the workers; train with KungFuMomentum or its like, or without shards"
        )


def _places(columns: Any, batch: Any) -> list[int]:
    """Return which columns of the batch these are."""
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    ids = [id(value) for value in values]
    if any(id(column) not in ids for column in columns):
        raise ValueError(
            "a ShardedStep takes the columns as the iterator has yielded them, since it needs the same ones of further "
            "shards; what is computed from them belongs in forward_backward, or in the dataset's pipeline"
        )
    return [ids.index(id(column)) for column in columns]
