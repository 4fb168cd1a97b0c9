"""Provide the common base classes of optimizers that wrap another optimizer.

Some wrappers keep the workers' models equal; with others, the models differ. This module can merge
differing models, and handles workers that join or leave.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops import composite

from ms_kungfu import runtime
from ms_kungfu.ops import KungFuAllReduce, ReduceOp, wait_for_queue
from ms_kungfu.ops._reparse import Mended
from ms_kungfu.optimizers.grad_reducer import Reducing
from ms_kungfu.trained import claims
from ms_kungfu.trained.inventory import is_grouped
from ms_kungfu.trained.rates import hold_last_rate

move_toward = composite.MultitypeFuncGraph("move_toward")
"""For ``HyperMap``: move a parameter towards its goal by a fraction of the distance, in place."""


# The formula isn't (1 - share) * parameter + share * goal, because rounding could then change a parameter that already
# equals its goal. With the formula below, a single worker trains exactly as with the plain optimizer.
@move_toward.register("Number", "Tensor", "Tensor")
def _move_toward(share, parameter, goal):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Move a parameter towards its goal by the fraction `share` of the distance, in place."""
    return ops.assign(parameter, parameter - share * (parameter - goal))


class Delegating(nn.Optimizer):
    """An optimizer that wraps `optimizer`.

    Attributes that the wrapper doesn't have (for example the learning rate, ``get_lr`` or the
    global step) are those of `optimizer`.
    """

    _takes_groups = False
    """Whether `optimizer` may be an optimizer with ``param_groups`` that isn't an ``nn.Optimizer``."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        grouped = isinstance(optimizer, nn.Cell) and is_grouped(optimizer)
        if not isinstance(optimizer, nn.Optimizer) and not (grouped and self._takes_groups):
            remedy = "; use SynchronousSGDOptimizer, or a KungFuGradReducer before the optimizer" if grouped else ""
            raise TypeError(
                f"{type(self).__name__} must wrap a MindSpore optimizer (mindspore.nn.Optimizer), not "
                f"{optimizer!r} ({type(optimizer).__name__}){remedy}"
            )
        # The constructor of nn.Optimizer isn't called, because it would create a second learning rate and global step.
        nn.Cell.__init__(self, auto_prefix=False)
        # This line must come before the next one. After the next line, `__getattr__` would find an attribute
        # `parameters`, and MindSpore would reject a second attribute of that name.
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


class Synchronising(Mended, Delegating):
    """An optimizer that wraps a MindSpore optimizer and does additional work before or after its update.

    Args:
        optimizer: a plain MindSpore optimizer.

    Raises:
        TypeError: if `optimizer` isn't a MindSpore optimizer, or synchronises the workers itself.
    """

    def __init__(self, optimizer: nn.Optimizer) -> None:
        if isinstance(optimizer, (Synchronising, Reducing)):
            raise TypeError(
                f"{type(optimizer).__name__} synchronises the workers itself; {type(self).__name__} must wrap a "
                "plain optimizer, such as mindspore.nn.Momentum"
            )
        super().__init__(optimizer)


_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
_replace = composite.MultitypeFuncGraph("replace")


@_replace.register("Tensor", "Tensor")
def _assign(parameter, value):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return ops.assign(parameter, value)


class Merge(nn.Cell):
    """Make parameters equal on all workers, in place. Compiled graphs that contain these use the new values.

    Models and moments are averaged over the workers. Counters such as the global step, and the
    optimizer's scalars (learning rate, powers of Adam's betas), are replaced by their maximum over
    the workers. If the workers have run the same number of steps, counters and scalars are already
    equal.
    """

    def __init__(self, parameters: Any, name: str) -> None:
        super().__init__(auto_prefix=False)
        numbers = [p for p in parameters if p.dtype != ms.bool_]
        averaged = [p for p in numbers if p.dtype in _FLOATS and (p.requires_grad or p.size > 1)]
        self.averaged = ms.ParameterTuple(averaged)
        self.agreed = ms.ParameterTuple([p for p in numbers if not any(p is a for a in averaged)])
        self.mean = KungFuAllReduce(ReduceOp.MEAN, name)
        self.greatest = KungFuAllReduce(ReduceOp.MAX, f"{name}/numbers")
        self.map = composite.HyperMap()

    @ms.jit(backend="ms_backend")
    def construct(self):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Assign the means and the maxima."""
        return (
            self.map(_replace, self.averaged, self.mean(self.averaged)),
            self.map(_replace, self.agreed, self.greatest(self.agreed)),
        )


class Replicas:
    """Mix-in for optimizers with which each worker has its own model, even after workers join.

    List it before `Synchronising` in the base classes.

    Args:
        args: positional arguments of the next class.
        kwargs: keyword arguments of the next class.
    """

    optimizer: nn.Optimizer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        claims.let_differ(self)

    @property
    def replicas_differ(self) -> bool:
        """Whether the workers' models may differ at present."""
        return True

    def merge(self) -> None:
        """Replace models and optimizers' moments with their mean over all workers.

        All workers must call this at the same time, between steps. The optimizer's scalars, such as the
        global step, are replaced by their maximum over all workers. The method works in GRAPH and
        PyNative mode. Compiled graphs stay valid and use the new values.
        """
        runtime.init()
        wait_for_queue()
        self._merge()
        wait_for_queue()

    @cached_property
    def _merge(self) -> Merge:
        return Merge(self.optimizer.get_parameters(), "merge")
