"""The common part of optimizers that contain another one.

Some of them synchronise the workers. With others the workers' models differ: this file has their consequences for a
change of membership, and the merge of the models.
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
"""Move a parameter by a share of the way to its goal, in place; for ``HyperMap``."""


# In this form, and not as (1 - share) * parameter + share * goal. If both are the same the parameter keeps its bits, so
# that a single worker trains as with the plain optimizer.
@move_toward.register("Number", "Tensor", "Tensor")
def _move_toward(share, parameter, goal):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Move a parameter by this share of the way to its goal, in place."""
    return ops.assign(parameter, parameter - share * (parameter - goal))


class Delegating(nn.Optimizer):
    """An optimizer around `optimizer`.

    Attributes that aren't found here are that one's: its learning rate, its ``get_lr``, its global step.
    """

    _takes_groups = False
    """Whether `optimizer` may be one with ``param_groups``, which is no ``nn.Optimizer``."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        grouped = isinstance(optimizer, nn.Cell) and is_grouped(optimizer)
        if not isinstance(optimizer, nn.Optimizer) and not (grouped and self._takes_groups):
            remedy = "; SynchronousSGDOptimizer takes it, and KungFuGradReducer before it does" if grouped else ""
            raise TypeError(
                f"{type(self).__name__} goes around an optimizer of MindSpore (mindspore.nn.Optimizer), not "
                f"{optimizer!r} ({type(optimizer).__name__}){remedy}"
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


class Synchronising(Mended, Delegating):
    """An optimizer of MindSpore with something done before or after its own update.

    Args:
        optimizer: a plain optimizer of MindSpore.

    Raises:
        TypeError: if `optimizer` is no optimizer of MindSpore, or synchronises the workers itself.
    """

    def __init__(self, optimizer: nn.Optimizer) -> None:
        if isinstance(optimizer, (Synchronising, Reducing)):
            raise TypeError(
                f"{type(optimizer).__name__} synchronises the workers itself; {type(self).__name__} goes around a "
                "plain optimizer, such as mindspore.nn.Momentum"
            )
        super().__init__(optimizer)


_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
_replace = composite.MultitypeFuncGraph("replace")


@_replace.register("Tensor", "Tensor")
def _assign(parameter, value):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return ops.assign(parameter, value)


class Merge(nn.Cell):
    """Make parameters equal at all workers, in place; MindSpore's graphs that contain them use the new values.

    Models and moments become their mean. Counters (the global step) and single numbers of the optimizer's own (its
    learning rate, powers of Adam's betas) become the greatest. They are the same at all workers with the same steps,
    and keep their bits then.
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
        """Assign the means and the greatest values."""
        return (
            self.map(_replace, self.averaged, self.mean(self.averaged)),
            self.map(_replace, self.agreed, self.greatest(self.agreed)),
        )


class Replicas:
    """Mix-in before `Synchronising`: each worker has a model of its own, and keeps it when others join.

    Args:
        args: of the next class.
        kwargs: of the next class.
    """

    optimizer: nn.Optimizer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        claims.let_differ(self)

    @property
    def replicas_differ(self) -> bool:
        """Whether the workers' models differ by now."""
        return True

    def merge(self) -> None:
        """Replace every worker's model, and the optimizer's moments, by the mean over all workers.

        Collective, between steps. Single numbers of the optimizer's, such as the global step, become the
        greatest of all workers'. It works in GRAPH and in PyNative mode. Compiled graphs stay valid and see
        the new values.
        """
        runtime.init()
        wait_for_queue()
        self._merge()
        wait_for_queue()

    @cached_property
    def _merge(self) -> Merge:
        return Merge(self.optimizer.get_parameters(), "merge")
