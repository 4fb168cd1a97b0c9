"""Optimizers whose workers' models differ: what that means for a change of membership, and how they become one."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops import composite

from ms_kungfu import runtime
from ms_kungfu.elastic import state
from ms_kungfu.ops import KungFuAllReduce, ReduceOp, wait_for_queue
from ms_kungfu.optimizers._around import float_parameters

_replace = composite.MultitypeFuncGraph("replace")


@_replace.register("Tensor", "Tensor")
def _assign(parameter, value):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return ops.assign(parameter, value)


class Merge(nn.Cell):
    """Overwrite parameters with their means over all workers; MindSpore's graphs that use them see the new values."""

    def __init__(self, parameters: Any, name: str) -> None:
        super().__init__(auto_prefix=False)
        self.merged = ms.ParameterTuple(parameters)
        self.all_reduce = KungFuAllReduce(ReduceOp.MEAN, name)
        self.map = composite.HyperMap()

    @ms.jit(backend="ms_backend")
    def construct(self):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.map(_replace, self.merged, self.all_reduce(self.merged))


class Replicas:
    """Mix-in before `Around`: each worker has a model of its own, and keeps it when others join."""

    parameters: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        state.let_differ(self)

    @property
    def replicas_differ(self) -> bool:
        """Whether the workers' models differ by now."""
        return True

    def merge(self) -> None:
        """Collective, between steps: the mean of all workers' models, and of the optimizer's moments, into every one.

        Works in GRAPH and in PyNative mode; compiled graphs stay valid and see the new values.
        """
        runtime.init()
        wait_for_queue()
        self._merge()
        wait_for_queue()

    @cached_property
    def _merge(self) -> Merge:
        return Merge(float_parameters(self.get_parameters()), "merge")  # type: ignore[attr-defined]
