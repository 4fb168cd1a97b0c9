"""``Model.train`` over a dataset that deals shards: one call of its training network is a whole step."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from ms_kungfu.elastic.sharded_step import ShardedStep


class _ForwardBackward(nn.Cell):
    """What a ``TrainOneStepCell`` does before its optimizer."""

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


class ShardedTraining:
    """For the length of a call of training, `train_cell` trains a whole step of shards when it is called.

    ValueError where it isn't a ``TrainOneStepCell`` as MindSpore makes it: what else such a cell does between gradients
    and update (clipping, loss scaling) belongs behind the sum over all shards, which only its author can cut out.
    """

    def __init__(self, train_cell: Any) -> None:
        if type(train_cell) is not nn.TrainOneStepCell:
            raise ValueError(
                f"Model.train's network is a {type(train_cell).__name__}, and with shards what it does with gradients "
                "comes once a step, behind their sum, not once a shard; train in a loop with ms_kungfu.elastic."
                "ShardedStep(forward_backward, update), with clipping and loss scaling in update, or without shards"
            )
        self._cell, self._class = train_cell, type(train_cell)
        self.step = ShardedStep(_ForwardBackward(train_cell), train_cell.optimizer)
        self.step.cell.set_train()

        class Sharded(nn.TrainOneStepCell):
            def __call__(_, *columns: Any) -> Any:
                return self.step(*columns)

        train_cell.__class__ = Sharded

    def end(self) -> None:
        """As it was before."""
        self._cell.__class__ = self._class
