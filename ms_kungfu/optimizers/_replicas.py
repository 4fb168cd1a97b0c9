"""Optimizers whose workers' models differ: what that means for a change of membership, and how they become one."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops import composite

from ms_kungfu import runtime
from ms_kungfu.elastic import handover
from ms_kungfu.ops import KungFuAllReduce, ReduceOp, wait_for_queue

_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
_replace = composite.MultitypeFuncGraph("replace")


@_replace.register("Tensor", "Tensor")
def _assign(parameter, value):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return ops.assign(parameter, value)


class Merge(nn.Cell):
    """Make parameters equal at all workers, in place; MindSpore's graphs that use them see the new values.

    Models and moments become their mean. What counts (the global step) or is one number of the optimizer's own (its
    learning rate, powers of Adam's betas) becomes the greatest: it is the same everywhere where the workers have made
    the same steps, and keeps its bits then.
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
        return (
            self.map(_replace, self.averaged, self.mean(self.averaged)),
            self.map(_replace, self.agreed, self.greatest(self.agreed)),
        )


class Replicas:
    """Mix-in before `Synchronising`: each worker has a model of its own, and keeps it when others join."""

    optimizer: nn.Optimizer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        handover.let_differ(self)

    @property
    def replicas_differ(self) -> bool:
        """Whether the workers' models differ by now."""
        return True

    def merge(self) -> None:
        """Collective, between steps: the mean of all workers' models, and of the optimizer's moments, into every one.

        Single numbers of the optimizer's, such as the global step, become the greatest of all workers'. Works in GRAPH
        and in PyNative mode; compiled graphs stay valid and see the new values.
        """
        runtime.init()
        wait_for_queue()
        self._merge()
        wait_for_queue()

    @cached_property
    def _merge(self) -> Merge:
        return Merge(self.optimizer.get_parameters(), "merge")
