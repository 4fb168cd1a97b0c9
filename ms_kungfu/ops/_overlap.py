"""An all-reduce in two halves, so that what lies between them goes on meanwhile. How and when: docs/overlap.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops import _reparse
from ms_kungfu.ops._base import Collective, Primitive, element
from ms_kungfu.ops.reduce_op import check_reduce_op


class AllReduceStart(Collective):
    """Begin to reduce a tuple of tensors of one dtype over all ranks, and return at once.

    Returns as many tensors, which have no value before the wait, and the ticket for it, in one tuple. The operations go
    on in the order of their starts, which the side effect forces. The inputs are copied. Each start
    needs its :class:`AllReduceWait` in the same graph: a name is good for one operation at a time.
    """

    def __init__(self, op: str, name: str) -> None:
        super().__init__("KungFuAllReduceStart", name, op=check_reduce_op(op))
        self.add_prim_attr("op", op)

    def __infer__(self, x: dict[str, Any]) -> dict[str, Any]:
        brought = super().__infer__(x)
        dtypes = {str(element(dtype)) for dtype in brought["dtype"]}
        if len(dtypes) != 1:
            raise TypeError(f"{self.name} takes tensors of one dtype at a time, not of {', '.join(sorted(dtypes))}")
        return {
            "shape": (*brought["shape"], [1]),
            "dtype": (*brought["dtype"], mstype.TensorType(mstype.uint64)),
            "value": None,
        }


class AllReduceWait(Primitive):
    """Wait for everything that was started, and only then give out any of it.

    Takes the results of all starts, then all that they were given, then the tickets, in one tuple, and returns it, with
    the results' values in place. `num_tensors` says how many tensors each start had. The first failure, in the order
    given, is raised when all have ended: a step that fails in one group updates nothing.
    """

    def __init__(self, num_tensors: Sequence[int]) -> None:
        super().__init__("KungFuAllReduceWait", ["x"], ["y"], num_tensors=tuple(num_tensors))
        self.add_prim_attr("num_tensors", tuple(num_tensors))
        # In the chain of all collectives: one that blocks could come before the wait at one rank and after it at another.
        self.add_prim_attr("side_effect_io", True)

    def __infer__(self, x: dict[str, Any]) -> dict[str, Any]:
        _reparse.refuse()
        return {"shape": x["shape"], "dtype": x["dtype"], "value": None}
