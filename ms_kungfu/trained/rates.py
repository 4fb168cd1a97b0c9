"""Keep the last entry of a list of learning rates after the list's end."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.nn.optim.optimizer import _IteratorLearningRate


class LastingRates(_IteratorLearningRate):
    """A list with one learning rate per step, whose last entry applies to all later steps.

    Such a list (e.g. of ``nn.cosine_decay_lr``) is exactly as long as the training. A step that is repeated after a
    failure lies beyond its end. This class limits the index rather than extending the list: the number of failures is
    unknown, and the Parameter, which checkpoints contain, keeps its shape.
    """

    def construct(self, global_step):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        last = self.learning_rate.shape[0] - 1
        return self.gather(self.learning_rate, ops.minimum(global_step, last), 0)


def hold_last_rate(optimizer: nn.Optimizer) -> None:
    """Let every list of rates of the optimizer, of groups too, continue with its last entry. Idempotent.

    It has no effect on what is compiled already.
    """
    rates: Any = getattr(optimizer, "learning_rate", None)
    for rate in rates if isinstance(rates, nn.CellList) else [rates]:
        if type(rate) is _IteratorLearningRate:
            # In place: the optimizer's groups hold the same cell several times, under names of their own.
            rate.__class__ = LastingRates
