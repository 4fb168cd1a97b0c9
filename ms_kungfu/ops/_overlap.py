"""An all-reduce in two halves, so that what lies between them goes on meanwhile. How and when: docs/overlap.md."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops import _reparse
from ms_kungfu.ops._base import Collective, Primitive, element
from ms_kungfu.ops.reduce_op import check_reduce_op


class AllReduceStart(Collective):
    """Begin to reduce a tuple of tensors, as KungFuAllReduce does, and return at once.

    Returns as many tensors, which have no value before :class:`AllReduceWait`, and then a tensor of tickets, all in one
    tuple. Operations go on in the order of their starts, which the side effect forces. Every start needs its wait in the
    same graph: a name is good for one operation at a time.
    """

    def __init__(self, op: str, name: str) -> None:
        super().__init__("KungFuAllReduceStart", name, op=check_reduce_op(op))
        self.add_prim_attr("op", op)

    def __infer__(self, x: dict[str, Any]) -> dict[str, Any]:
        inferred = super().__infer__(x)
        # One operation for each dtype, hence a ticket.
        tickets = len({str(element(dtype)) for dtype in inferred["dtype"]})
        shape = (*(list(each) for each in inferred["shape"]), [tickets])
        return {"shape": shape, "dtype": (*inferred["dtype"], mstype.TensorType(mstype.uint64)), "value": None}


class AllReduceWait(Primitive):
    """Wait for everything that was started, and only then give out any of it.

    Takes one tuple, the tensors of all `starts` and then their tickets, and returns it in place, the tensors with their
    values. The first failure in the order of the starts is raised when all have ended: a step that fails in one group
    updates nothing.
    """

    def __init__(self, starts: int) -> None:
        super().__init__("KungFuAllReduceWait", ["x"], ["y"], starts=starts)
        self.add_prim_attr("starts", starts)
        # In the chain of all collectives: one that blocks could come before the wait at one rank and after it at another.
        self.add_prim_attr("side_effect_io", True)

    def __infer__(self, x: dict[str, Any]) -> dict[str, Any]:
        _reparse.refuse()
        return {"shape": x["shape"], "dtype": x["dtype"], "value": None}
