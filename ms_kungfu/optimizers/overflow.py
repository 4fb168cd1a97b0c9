"""Loss scaling in several workers: a step is skipped by all of them or by none."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ms_kungfu.ops import KungFuAllReduce, ReduceOp
from ms_kungfu.ops._reparse import Mended


class OverflowAgreement(nn.Cell):
    """Whether the step has overflowed at any rank: the same answer at all of them.

    Takes and returns a tensor of bool; a number counts as overflow where it isn't 0. Use it in a training step of one's
    own between the check for overflow and what depends on it, so that no rank waits in a collective for one that skips
    the step::

        overflow = self.agree(self.is_infinite(gradients))
        if not overflow:
            self.optimizer(gradients)
        self.scaler.update(overflow)

    It costs an exchange of 4 bytes a step. Where gradients are reduced before the check (by a `KungFuGradReducer`) it
    isn't needed: an infinity or NaN of one rank is in everyone's sum or mean.
    """

    def __init__(self, name: str = "overflow") -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = KungFuAllReduce(ReduceOp.MAX, name)

    def construct(self, overflow):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        # Not a cast of the number itself: 0.5 is an overflow, too.
        return ops.cast(self.all_reduce(ops.cast(ops.not_equal(overflow, 0), ms.int32)), ms.bool_)


class Agreeing(Mended):
    """Mix-in before a training cell of MindSpore that scales the loss: it hears of an overflow anywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agree = OverflowAgreement()

    def get_overflow_status(self, status, compute_output):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.agree(super(Agreeing, self).get_overflow_status(status, compute_output))  # type: ignore[misc]  # noqa: UP008


class KungFuTrainOneStepWithLossScaleCell(Agreeing, nn.TrainOneStepWithLossScaleCell):
    """``nn.TrainOneStepWithLossScaleCell``, whose overflow is agreed on by all ranks.

    ``Model.train`` with a dynamic loss scaler makes MindSpore's own cell, in which the ranks that saw no overflow would
    wait in the optimizer for one that did. Give ``Model`` this cell as its network instead, without loss and optimizer.
    MindSpore checks for overflow on GPU and Ascend only.
    """
