"""An all-reduce that is split into two primitives, so that other operations run in between. See docs/overlap.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Collective, Primitive, element, is_undetermined, placeholders
from ms_kungfu.ops.reduce_op import check_reduce_op


class AllReduceStart(Collective):
    """Start to reduce a tuple of tensors of one dtype over all ranks, and return immediately.

    The result is a tuple of as many tensors, followed by a ticket for the wait. The tensors' contents are undefined
    until the wait has ended. The operations run in the order in which they were started, which the primitive's side
    effect enforces. The inputs are copied. Each start needs an :class:`AllReduceWait` in the same graph, because only
    one operation of each name can run at a time.
    """

    _takes_sparse = True

    def __init__(self, op: str, name: str) -> None:
        super().__init__("KungFuAllReduceStart", name, op=check_reduce_op(op))

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shapes, dtypes = super()._outputs(*inputs)
        different = {str(element(dtype)) for dtype in dtypes}
        if len(different) != 1:
            raise TypeError(f"{self.name} requires tensors of one dtype, not of {', '.join(sorted(different))}")
        return (*shapes, [1]), (*dtypes, mstype.TensorType(mstype.uint64))


class AllReduceWait(Primitive):
    """Wait until all started operations have ended, before returning any result.

    The input is one tuple, which contains the results of all :class:`AllReduceStart` calls, then all of their inputs,
    then their tickets. The output is the same tuple, with the complete results. `num_tensors` contains the number of
    tensors of each start call. After all operations have ended, the primitive raises the error of the first failed
    operation, in the order of the input. So if one group fails, the step updates nothing.
    """

    def __init__(self, num_tensors: Sequence[int]) -> None:
        # The side effect puts this primitive into the chain of all collectives. Without it, a blocking collective could
        # come before the wait on one rank and after the wait on another.
        super().__init__("KungFuAllReduceWait", ["x"], ["y"], num_tensors=tuple(num_tensors))

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shapes, dtypes = inputs[0]["shape"], inputs[0]["dtype"]
        return placeholders(len(dtypes)) if any(map(is_undetermined, dtypes)) else (shapes, dtypes)
