"""Scale the loss so that all workers skip the same steps on overflow."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ms_kungfu.ops import KungFuAllReduce, ReduceOp
from ms_kungfu.ops._reparse import Mended


class OverflowAgreement(nn.Cell):
    """Agree with all ranks on whether the step has overflowed at any rank.

    Use it in a custom training step, between the check for overflow and the code that depends on the
    result of the check. No rank then waits in a collective for a rank that skips the step::

        overflow = self.agree(self.is_infinite(gradients))
        if not overflow:
            self.optimizer(gradients)
        self.scaler.update(overflow)

    The agreement exchanges 4 bytes per step. It isn't needed if a `KungFuGradReducer` reduces the
    gradients before the check. An infinity or NaN on one rank is then in every rank's sum or mean.

    Args:
        name: the name of the all-reduce, which must be the same on all ranks.
    """

    def __init__(self, name: str = "overflow") -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = KungFuAllReduce(ReduceOp.MAX, name)

    def construct(self, overflow):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return whether the step has overflowed at any rank.

        Args:
            overflow: a tensor of bool, or of numbers. A number counts as an overflow if it isn't 0.

        Returns:
            A tensor of bool, the same on all ranks.
        """
        # Compare before the cast to an integer: 0.5 is an overflow, but the cast would turn it into 0.
        return ops.cast(self.all_reduce(ops.cast(ops.not_equal(overflow, 0), ms.int32)), ms.bool_)


class Agreeing(Mended):
    """Mix-in for MindSpore training cells that scale the loss: all ranks react to an overflow at any rank.

    List it before the training cell in the base classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agree = OverflowAgreement()

    def get_overflow_status(self, status, compute_output):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return whether the step has overflowed at any rank.

        Args:
            status: the argument of MindSpore's cell.
            compute_output: the argument of MindSpore's cell.

        Returns:
            A tensor of bool, the same on all ranks.
        """
        return self.agree(super(Agreeing, self).get_overflow_status(status, compute_output))  # type: ignore[misc]  # noqa: UP008


class KungFuTrainOneStepWithLossScaleCell(Agreeing, nn.TrainOneStepWithLossScaleCell):
    """``nn.TrainOneStepWithLossScaleCell`` whose ranks skip the same steps.

    All ranks skip a step if any rank has an overflow. With a dynamic loss scaler, ``Model.train``
    creates MindSpore's own cell. With that cell, a rank without an overflow would wait in the
    optimizer for the ranks that skip the step. So pass `KungFuTrainOneStepWithLossScaleCell` to
    ``Model`` as its network, without a loss function and an optimizer. MindSpore checks for overflow
    on GPU and Ascend only.

    Args:
        args: the positional arguments of MindSpore's cell.
        kwargs: the keyword arguments of MindSpore's cell.
    """
