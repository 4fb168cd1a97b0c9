"""Lists of learning rates that continue with their last entry."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.nn.optim.optimizer import _IteratorLearningRate


class LastingRates(_IteratorLearningRate):
    """A list by the step, whose last entry counts for all later steps.

    Such lists are exactly as long as the training (``nn.cosine_decay_lr``), and a step that is repeated after a failure
    lies beyond. The index is held rather than the list made longer: the number of failures isn't known, and the
    Parameter, which checkpoints contain, keeps its shape.
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
