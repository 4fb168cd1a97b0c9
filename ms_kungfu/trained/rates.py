"""Continue a list of learning rates with its last entry."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.nn.optim.optimizer import _IteratorLearningRate


class LastingRates(_IteratorLearningRate):
    """A list with one learning rate per step, whose last entry applies to all later steps.

    A list of learning rates (for example from ``nn.cosine_decay_lr``) has exactly as many entries as training has
    steps. If steps are repeated after a failure, training has more steps than the list has entries. This class limits
    the index instead of extending the list, because the number of failures is unknown. The list is also a Parameter
    whose shape must stay the same, because checkpoints contain it.
    """

    def construct(self, global_step):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        last = self.learning_rate.shape[0] - 1
        return self.gather(self.learning_rate, ops.minimum(global_step, last), 0)


def hold_last_rate(optimizer: nn.Optimizer) -> None:
    """Continue each list of learning rates of the optimizer and its groups with the last entry of that list.

    Further calls do nothing. Graphs that are already compiled don't change.
    """
    rates: Any = getattr(optimizer, "learning_rate", None)
    for rate in rates if isinstance(rates, nn.CellList) else [rates]:
        if type(rate) is _IteratorLearningRate:
            # Change the cell in place, because the optimizer's groups contain the same cell under several names.
            rate.__class__ = LastingRates
