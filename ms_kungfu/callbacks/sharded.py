"""Support ``Model.train`` on a dataset with shards, so that each call of the training network runs a whole step."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ms_kungfu import env
from ms_kungfu.dataset import shard_choice
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import compiled
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.schedule import entries
from ms_kungfu.elastic.sharded_step import ShardedStep, check_optimizer
from ms_kungfu.optimizers.overflow import KungFuTrainOneStepWithLossScaleCell
from ms_kungfu.trained import inventory

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class _ForwardBackward(nn.Cell):
    """The part of a ``TrainOneStepCell`` that computes the loss and the gradients."""

    def __init__(self, train_cell: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network = train_cell.network
        self.weights = train_cell.weights
        self.sens = train_cell.sens
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss = self.network(*columns)
        gradients = self.grad(self.network, self.weights)(*columns, ops.fill(loss.dtype, loss.shape, self.sens))
        return loss, gradients


_unscale = ops.MultitypeFuncGraph("unscale")
_overflows = ops.MultitypeFuncGraph("overflows")


@_unscale.register("Tensor", "Tensor")
def _over_scale(scale, gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return gradient * ops.cast(ops.reciprocal(scale), gradient.dtype)


@_overflows.register("Tensor")
def _has_overflown(gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Return 1 if an element of the gradient is infinite or NaN, and 0 if not."""
    return ops.cast(ops.logical_not(ops.isfinite(gradient).all()), ms.float32)


class _ScaledForwardBackward(nn.Cell):
    """The part of a ``TrainOneStepWithLossScaleCell`` that runs before the check for an overflow."""

    def __init__(self, train_cell: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network = train_cell.network
        self.weights = train_cell.weights
        self.scale = train_cell.scale_sense
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.map = ops.HyperMap()

    def construct(self, *columns):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        loss = self.network(*columns)
        sens = ops.ones_like(loss) * ops.cast(self.scale, loss.dtype)
        gradients = self.grad(self.network, self.weights)(*columns, sens)
        return loss, self.map(ops.partial(_unscale, self.scale), gradients)


class _UnlessOverflown(nn.Cell):
    """The part of a ``TrainOneStepWithLossScaleCell`` that checks for an overflow and updates the weights.

    The check applies to the sum over all shards, which isn't finite if the gradient of at least one shard isn't finite.
    MindSpore's own check supports only GPU and Ascend.
    """

    def __init__(self, train_cell: Any) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = train_cell.optimizer
        self.scale = train_cell.scale_sense
        self.manager = train_cell.loss_scaling_manager  # None if the program sets the scale
        self.overflow = ms.Parameter(ms.Tensor(False), name="overflow", requires_grad=False)
        self.map = ops.HyperMap()

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        overflow = ops.greater(ops.addn(self.map(_overflows, gradients)), 0)
        overflow = ops.depend(overflow, ops.assign(self.overflow, overflow))
        if self.manager is not None:
            overflow = self.manager(self.scale, overflow)
        if not overflow:
            overflow = ops.depend(overflow, self.optimizer(gradients))
        return overflow


def takes_shards(train_cell: Any) -> bool:
    """Return whether `ShardedTraining` supports `train_cell`.

    It supports objects of exactly these classes: ``TrainOneStepCell``, ``TrainOneStepWithLossScaleCell`` and
    `KungFuTrainOneStepWithLossScaleCell`.
    """
    kinds = (nn.TrainOneStepCell, nn.TrainOneStepWithLossScaleCell, KungFuTrainOneStepWithLossScaleCell)
    return type(train_cell) in kinds and not getattr(train_cell, "return_grad", False)


def obstacle(train_cell: Any) -> str:
    """Return the reason why `train_cell` can't train with shards or wouldn't become faster; empty if none."""
    cells = inventory.collect_cells([train_cell]).values()
    dropout = next((cell for cell in cells if isinstance(cell, _DROPOUT)), None)
    if ms.get_context("device_target") != "CPU":
        return "shards are supported on CPUs only"
    if not compiled.graph_mode():
        return "PyNative mode doesn't compile batch shapes"
    if not takes_shards(train_cell):
        return f"Model.train can't train a {type(train_cell).__name__} with shards"
    if dropout is not None:
        return f"{type(dropout).__name__} of MindSpore draws other numbers on each worker"
    try:
        for optimizer in inventory.collect_optimizers([train_cell]):
            check_optimizer(optimizer)
        for cell in cells:
            if getattr(cell, "reduces_gradients", False):
                cell._check_left_to_shards(getattr(train_cell.grad_reducer, "mean", True))
    except ValueError as error:
        return str(error).partition(";")[0]
    return ""


def choose_shards(train_cell: Any, data: ElasticDataset, options: Options) -> None:
    """Choose the number of shards if `data` has ``shards="auto"``.

    All workers of a job choose the same number, because they run the same program, and `env.START_SIZE` and
    `env.START_CORES` never change.
    """
    if not data.awaits_shards:
        data.begin_with_chosen_shards()
        return
    size, cores, each = env.START_SIZE.get(), env.START_CORES.get(), env.CORES_PER_WORKER.get()
    shards, reason = None, obstacle(train_cell)
    if reason:
        pass
    elif size is None or cores is None:
        reason = "the program doesn't run under kungfu-run on a single host"
    elif options.policy is not None or callable(options.schedule):
        reason = "the sizes of the cluster aren't known in advance"
    elif options.lr_rule != "none":
        reason = "lr_rule follows the number of workers"
    elif not data.holds_global_batch:
        reason = "batch_size grows with the cluster, but shards require global_batch_size"
    else:
        sizes = {size, *(workers for _, workers in entries(options.schedule))}
        # If shards have been chosen, the launcher has given each worker one core, as with -cores-per-worker 1.
        cores = cores if each is None else each * max(sizes)
        shards, reason = shard_choice.choose(data.global_batch_size, sizes, cores)
    data.choose_shards(shards, reason)


def _parts_of(train_cell: Any) -> list[Any]:
    """Return the attributes of `train_cell` that determine its training step."""
    names = ("network", "weights", "optimizer", "sens", "grad_reducer", "scale_sense", "loss_scaling_manager")
    return [getattr(train_cell, name, None) for name in names]


class ShardedTraining:
    """Between `begin` and `end`, make each call of `train_cell` run a whole sharded step.

    The cell's own reducer isn't used. The update receives the mean of the shards' gradients, or their sum if the
    reducer sums (``gradients_mean=False``).

    Raises:
        ValueError: `takes_shards` doesn't accept the cell. Such a cell may do other work between the gradients and the
            update, for example clipping. That work must follow the sum over all shards, but only the cell's author can
            separate that work from the rest of the cell.
    """

    def __init__(self, train_cell: Any) -> None:
        kind = type(train_cell)
        scales = kind is not nn.TrainOneStepCell
        returns = getattr(train_cell, "return_grad", False)
        if not takes_shards(train_cell):
            raise ValueError(
                f"Model.train can't train a {kind.__name__}{'(return_grad=True)' if returns else ''} with shards: its "
                "own work on the gradients would run once per shard, but must run once, after the sum over the shards; "
                "train without shards, or in a loop with ms_kungfu.elastic.ShardedStep(forward_backward, update), "
                "where update does work such as clipping"
            )
        self._cell, self._class, self._parts = train_cell, kind, _parts_of(train_cell)
        mean = getattr(train_cell.grad_reducer, "mean", True)
        for _, cell in train_cell.grad_reducer.cells_and_names():
            if getattr(cell, "reduces_gradients", False):
                cell.leave_to_shards(mean and cell.mean)
        if scales:
            update = _UnlessOverflown(train_cell)
            self.step = ShardedStep(_ScaledForwardBackward(train_cell), update, gradients_mean=mean)
        else:
            self.step = ShardedStep(_ForwardBackward(train_cell), train_cell.optimizer, gradients_mean=mean)

        class Sharded(kind):  # type: ignore[misc, valid-type]
            def __call__(_, *columns: Any) -> Any:
                if not scales:
                    return self.step(*columns)
                scale = ms.Tensor(train_cell.scale_sense.asnumpy().copy())  # this step may change the cell's scale
                loss = self.step(*columns)
                return loss, ms.Tensor(update.overflow.asnumpy().copy()), scale

        self._sharded = Sharded

    @classmethod
    def of(cls, train_cell: Any) -> ShardedTraining:
        """Return the object for this cell.

        If an earlier call has created an object, and the cell's attributes haven't changed since then, return that
        object, so that its graphs are used again.
        """
        kept = vars(train_cell).get("kungfu_sharded")
        if kept is None or any(theirs is not own for theirs, own in zip(kept._parts, _parts_of(train_cell))):
            kept = train_cell.kungfu_sharded = cls(train_cell)
        return kept

    def begin(self) -> None:
        self.step.cell.set_train()  # an evaluation since the last call may have changed the mode
        self._cell.__class__ = self._sharded

    def end(self) -> None:
        """Restore the cell's original class."""
        self._cell.__class__ = self._class
