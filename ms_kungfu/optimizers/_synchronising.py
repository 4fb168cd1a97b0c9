"""What the optimizers that contain another one have in common, and those of them that synchronise the workers."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.ops import composite

from ms_kungfu.elastic.learning_rates import hold_last_rate
from ms_kungfu.ops._reparse import Mended
from ms_kungfu.optimizers._reducing import Reducing

move_toward = composite.MultitypeFuncGraph("move_toward")


# In this form, and not as (1 - share) * parameter + share * goal: where both are the same the parameter keeps its bits,
# so that a worker alone trains as with the plain optimizer.
@move_toward.register("Number", "Tensor", "Tensor")
def _move_toward(share, parameter, goal):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Move a parameter by this share of the way to its goal, in place."""
    return ops.assign(parameter, parameter - share * (parameter - goal))


class Delegating(nn.Optimizer):
    """An optimizer around `optimizer`. Whatever isn't found here is that one's: its learning rate, its ``get_lr``, its
    global step."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        if not isinstance(optimizer, nn.Optimizer):
            raise TypeError(
                f"{type(self).__name__} goes around an optimizer of MindSpore (mindspore.nn.Optimizer), not "
                f"{optimizer!r} ({type(optimizer).__name__})"
            )
        # Not the constructor of nn.Optimizer: it would make another learning rate and another global step.
        nn.Cell.__init__(self, auto_prefix=False)
        # First, as MindSpore refuses a parameter whose name is an attribute already, and from the next line on it is.
        self.parameters = optimizer.parameters
        self.optimizer = optimizer
        hold_last_rate(optimizer)
        self.add_flags(skip_auto_parallel_compile=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "optimizer":
                raise
            return getattr(self.optimizer, name)

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        raise NotImplementedError


class Synchronising(Mended, Delegating):
    """An optimizer of MindSpore with something done before or after its own update."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        if isinstance(optimizer, (Synchronising, Reducing)):
            raise TypeError(
                f"{type(optimizer).__name__} synchronises the workers itself; {type(self).__name__} goes around a "
                "plain optimizer, such as mindspore.nn.Momentum"
            )
        super().__init__(optimizer)
