"""An all-reduce in two halves, so that other operations run between them. How and when: docs/overlap.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Collective, Primitive, element, is_undetermined, placeholders
from ms_kungfu.ops.reduce_op import check_reduce_op


class AllReduceStart(Collective):
    """Begin to reduce a tuple of tensors of one dtype over all ranks, and return at once.

    Returns as many tensors, which have no value before the wait, and the ticket for it, in one tuple. The operations
    run in the order of their starts, which the side effect forces. The inputs are copied. Each start needs its
    :class:`AllReduceWait` in the same graph: a name is good for one operation at a time.
    """

    _takes_sparse = True

    def __init__(self, op: str, name: str) -> None:
        super().__init__("KungFuAllReduceStart", name, op=check_reduce_op(op))

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shapes, dtypes = super()._outputs(*inputs)
        different = {str(element(dtype)) for dtype in dtypes}
        if len(different) != 1:
            raise TypeError(f"{self.name} takes tensors of one dtype at a time, not of {', '.join(sorted(different))}")
        return (*shapes, [1]), (*dtypes, mstype.TensorType(mstype.uint64))


class AllReduceWait(Primitive):
    """Wait for everything that was started, and only then return any of it.

    It takes the results of all starts, then all of their inputs, then the tickets, in one tuple, and returns it, with
    the results' values in place. `num_tensors` says how many tensors each start had. The first failure, in the order
    given, is raised when all have ended: a step that fails in one group updates nothing.
    """

    def __init__(self, num_tensors: Sequence[int]) -> None:
        # Its side effect puts it into the chain of all collectives: otherwise one that blocks could come before the
        # wait at one rank and after it at another.
        super().__init__("KungFuAllReduceWait", ["x"], ["y"], num_tensors=tuple(num_tensors))

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shapes, dtypes = inputs[0]["shape"], inputs[0]["dtype"]
        return placeholders(len(dtypes)) if any(map(is_undetermined, dtypes)) else (shapes, dtypes)
