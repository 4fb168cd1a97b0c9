"""Keep the last entry of a list of learning rates after the list's end."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.nn.optim.optimizer import _IteratorLearningRate


class LastingRates(_IteratorLearningRate):
    """A list with one learning rate per step, whose last entry applies to all later steps.

    Such a list (e.g. of ``nn.cosine_decay_lr``) is exactly as long as the training. Steps that are repeated after a
    failure lie beyond the end of the list. This class limits the index instead of extending the list: the number of
    failures is unknown, and checkpoints contain the Parameter, which must keep its shape.
    """

    def construct(self, global_step):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        last = self.learning_rate.shape[0] - 1
        return self.gather(self.learning_rate, ops.minimum(global_step, last), 0)


def hold_last_rate(optimizer: nn.Optimizer) -> None:
    """Let every list of rates of the optimizer and its groups continue with its last entry.

    Idempotent. It has no effect on graphs that are compiled already.
    """
    rates: Any = getattr(optimizer, "learning_rate", None)
    for rate in rates if isinstance(rates, nn.CellList) else [rates]:
        if type(rate) is _IteratorLearningRate:
            # Change the cell in place: the optimizer's groups contain the same cell several times, under different
            # names.
            rate.__class__ = LastingRates
