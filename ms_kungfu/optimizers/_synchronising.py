"""What the optimizers that synchronise the workers around another one have in common."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.ops import composite

from ms_kungfu.ops import _reparse
from ms_kungfu.optimizers._delegating import Delegating
from ms_kungfu.optimizers._reducing import Reducing

move_toward = composite.MultitypeFuncGraph("move_toward")


# In this form, and not as (1 - share) * parameter + share * goal: where both are the same the parameter keeps its bits,
# so that a worker alone trains as with the plain optimizer.
@move_toward.register("Number", "Tensor", "Tensor")
def _move_toward(share, parameter, goal):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Move a parameter by this share of the way to its goal, in place."""
    return ops.assign(parameter, parameter - share * (parameter - goal))


class Synchronising(Delegating):
    """An optimizer of MindSpore with something done before or after its own update."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        if isinstance(optimizer, (Synchronising, Reducing)):
            raise TypeError(
                f"{type(optimizer).__name__} synchronises the workers itself; {type(self).__name__} goes around a "
                "plain optimizer, such as mindspore.nn.Momentum"
            )
        super().__init__(optimizer)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _reparse.mend(cls)
