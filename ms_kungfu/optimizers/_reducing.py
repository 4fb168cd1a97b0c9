"""What makes one of MindSpore's optimizers data-parallel."""

from __future__ import annotations

from typing import Any

import mindspore as ms

from ms_kungfu.elastic.learning_rates import hold_last_rate
from ms_kungfu.fusion import Plan
from ms_kungfu.ops._reparse import Mended
from ms_kungfu.optimizers.grad_reducer import KungFuGradReducer


class Reducing(Mended):
    """Mix-in before an optimizer of MindSpore: reduce the gradients over all ranks, then let the optimizer update.

    The reduction comes first, so that a failure in it leaves parameters and moments as they were.
    """

    parameters: Any  # of MindSpore's optimizer

    def __init__(
        self, *args: Any, gradients_mean: bool = True, fusion: Any = None, overlap: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        hold_last_rate(self)
        self.grad_reducer = KungFuGradReducer(self.parameters, gradients_mean, fusion=fusion, overlap=overlap)

    def fusion_plan(self) -> Plan:
        """Which gradients are reduced together, how large they are and in what order; ``print`` it. docs/fusion.md"""
        return self.grad_reducer.fusion_plan()

    # Jitted, because in PyNative mode a plain override of a jitted method runs twice: see ms_kungfu/ops/_reparse.py.
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        # To the parser a bare super() is that of the object's class, which leads here again.
        return super(Reducing, self).construct(self.grad_reducer(gradients))  # type: ignore[misc]  # noqa: UP008
