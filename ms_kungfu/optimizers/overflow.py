"""Loss scaling on several workers: all workers skip a step, or none does."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ms_kungfu.ops import KungFuAllReduce, ReduceOp
from ms_kungfu.ops._reparse import Mended


class OverflowAgreement(nn.Cell):
    """Agree on whether the step has overflowed at any rank.

    Use it in a custom training step, between the check for overflow and the code that depends on the
    result. Then no rank waits in a collective for a rank that skips the step::

        overflow = self.agree(self.is_infinite(gradients))
        if not overflow:
            self.optimizer(gradients)
        self.scaler.update(overflow)

    The agreement exchanges 4 bytes per step. It isn't needed if a `KungFuGradReducer` reduces the
    gradients before the check. In that case an infinity or NaN of one rank is in every rank's sum or
    mean.

    Args:
        name: the name of the exchange among the workers.
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
        # Don't cast the number itself: 0.5 is an overflow too.
        return ops.cast(self.all_reduce(ops.cast(ops.not_equal(overflow, 0), ms.int32)), ms.bool_)


class Agreeing(Mended):
    """Mix-in before a MindSpore training cell that scales the loss: the ranks agree on an overflow at any rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agree = OverflowAgreement()

    def get_overflow_status(self, status, compute_output):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return whether the step has overflowed at any rank.

        Args:
            status: the argument of MindSpore's cell.
            compute_output: the argument of MindSpore's cell.

        Returns:
            A tensor of bool, the same at all ranks.
        """
        return self.agree(super(Agreeing, self).get_overflow_status(status, compute_output))  # type: ignore[misc]  # noqa: UP008


class KungFuTrainOneStepWithLossScaleCell(Agreeing, nn.TrainOneStepWithLossScaleCell):
    """``nn.TrainOneStepWithLossScaleCell`` in which all ranks agree on an overflow.

    With a dynamic loss scaler, ``Model.train`` creates MindSpore's own cell. In that cell, ranks
    without an overflow would wait in the optimizer for a rank with an overflow. Instead, pass this cell
    to ``Model`` as its network, without loss and optimizer. MindSpore checks for overflow on GPU and
    Ascend only.

    Args:
        args: the positional arguments of MindSpore's cell.
        kwargs: the keyword arguments of MindSpore's cell.
    """
