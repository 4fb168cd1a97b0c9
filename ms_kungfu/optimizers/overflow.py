"""Loss scaling in several workers: a step is skipped by all of them or by none."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ms_kungfu.ops import KungFuAllReduce, ReduceOp
from ms_kungfu.ops._reparse import Mended


class OverflowAgreement(nn.Cell):
    """Agree on whether the step has overflowed at any rank.

    Use it in a training step of your own, between the check for overflow and what depends on it. So no
    rank waits in a collective for one that skips the step::

        overflow = self.agree(self.is_infinite(gradients))
        if not overflow:
            self.optimizer(gradients)
        self.scaler.update(overflow)

    It costs an exchange of 4 bytes a step. It isn't needed if the gradients are reduced before the
    check (by a `KungFuGradReducer`). An infinity or NaN of one rank is in every rank's sum or mean.

    Args:
        name: of the exchange among the workers.
    """

    def __init__(self, name: str = "overflow") -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = KungFuAllReduce(ReduceOp.MAX, name)

    def construct(self, overflow):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return whether the step has overflowed at any rank.

        Args:
            overflow: a tensor of bool; a number counts as overflow if it isn't 0.

        Returns:
            A tensor of bool, the same at all ranks.
        """
        # Not a cast of the number itself: 0.5 is an overflow, too.
        return ops.cast(self.all_reduce(ops.cast(ops.not_equal(overflow, 0), ms.int32)), ms.bool_)


class Agreeing(Mended):
    """Mix-in before a training cell of MindSpore that scales the loss: it agrees on an overflow anywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agree = OverflowAgreement()

    def get_overflow_status(self, status, compute_output):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return whether the step has overflowed at any rank.

        Args:
            status: of MindSpore's cell.
            compute_output: of MindSpore's cell.

        Returns:
            A tensor of bool, the same at all ranks.
        """
        return self.agree(super(Agreeing, self).get_overflow_status(status, compute_output))  # type: ignore[misc]  # noqa: UP008


class KungFuTrainOneStepWithLossScaleCell(Agreeing, nn.TrainOneStepWithLossScaleCell):
    """``nn.TrainOneStepWithLossScaleCell``, whose overflow is agreed on by all ranks.

    ``Model.train`` with a dynamic loss scaler makes MindSpore's own cell. In that one, the ranks that
    saw no overflow would wait in the optimizer for one that did. Give ``Model`` this cell as its
    network instead, without loss and optimizer. MindSpore checks for overflow on GPU and Ascend only.

    Args:
        args: the arguments of MindSpore's cell, in its order.
        kwargs: the arguments of MindSpore's cell, by name.
    """
