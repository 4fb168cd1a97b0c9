"""Lists of learning rates, which go on with their last entry."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.nn.optim.optimizer import _IteratorLearningRate


class LastingRates(_IteratorLearningRate):
    """A list by the step, whose last entry counts for all steps beyond it.

    Such lists are exactly as long as the training (``nn.cosine_decay_lr``), and a step that is done again after a death
    lies beyond. The index is held rather than the list made longer: nobody knows how many deaths there will be, and the
    Parameter, which checkpoints contain, keeps its shape.
    """

    def construct(self, global_step):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        last = self.learning_rate.shape[0] - 1
        return self.gather(self.learning_rate, ops.minimum(global_step, last), 0)


def hold_last_rate(optimizer: nn.Optimizer) -> None:
    """Let every list of rates of the optimizer, of groups too, go on with its last entry. Idempotent.

    Without effect on what is compiled already.
    """
    rates: Any = getattr(optimizer, "learning_rate", None)
    for rate in rates if isinstance(rates, nn.CellList) else [rates]:
        if type(rate) is _IteratorLearningRate:
            # In place: the optimizer's groups hold the same cell several times, under names of their own.
            rate.__class__ = LastingRates
