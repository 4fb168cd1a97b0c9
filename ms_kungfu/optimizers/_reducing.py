"""What makes one of MindSpore's optimizers data-parallel."""

from __future__ import annotations

from typing import Any

import mindspore as ms

from ms_kungfu.ops import _reparse
from ms_kungfu.optimizers.grad_reducer import KungFuGradReducer


class Reducing:
    """Mix-in before an optimizer of MindSpore: reduce the gradients over all ranks, then let the optimizer update.

    The reduction comes first, so that a failure in it leaves parameters and moments as they were.
    """

    def __init__(self, *args: Any, gradients_mean: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_reducer = KungFuGradReducer(mean=gradients_mean)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _reparse.mend(cls)

    # Jitted, because in PyNative mode a plain override of a jitted method runs twice: see ms_kungfu/ops/_reparse.py.
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        # To the parser a bare super() is that of the object's class, which leads here again.
        return super(Reducing, self).construct(self.grad_reducer(gradients))  # type: ignore[misc]  # noqa: UP008
