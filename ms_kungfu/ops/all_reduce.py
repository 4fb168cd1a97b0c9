"""The all-reduce primitive."""

from __future__ import annotations

from collections.abc import Sequence

from ms_kungfu.ops._base import Collective
from ms_kungfu.ops.reduce_op import ReduceOp, check_reduce_op


class KungFuAllReduce(Collective):
    """Reduce over all ranks; every rank gets the result, with the same bits.

    Takes a tensor or a tuple of tensors, of any shapes, of float16, bfloat16, float32, float64 or (u)int8 to (u)int64,
    and returns as many of the same shapes and dtypes. A tuple is one operation, without a flat copy; one of several
    dtypes is one operation a dtype. 16-bit floats accumulate in float32. Sums and products of integers wrap in their
    own dtype, as arithmetic of NumPy's arrays does; a mean of integers doesn't overflow, and truncates towards zero.

    The number of ranks is that at the time of the call, not at the time of compilation.

    `name` matches the call with the other ranks'; calls without one are matched by their order. A mistake between the
    ranks is a RuntimeError at each of them, whose text begins with the error's name (`ms_kungfu.last_error()` gives the
    typed one).

    The gradient is MindSpore's: of a sum the sum of the gradients, of a mean their mean, of a min or max their sum
    where the input is the result, of a product by division through the input.
    """

    def __init__(self, op: str = ReduceOp.SUM, name: str | None = None) -> None:
        super().__init__("KungFuAllReduce", name, op=check_reduce_op(op))


class AllReduceGradients(Collective):
    """Reduce the gradients of a step, a tuple of tensors, in groups of the given names: `group_of` has the number of
    each tensor's group (where there is but one it may be empty).

    All of them or none: a rank that dies meanwhile has part in every result or in no result, and nothing is given out
    before that is settled. In a mean of floats each rank counts by the samples it brought, where these differ.
    """

    def __init__(self, op: str, names: Sequence[str], group_of: Sequence[int] = ()) -> None:
        names, group_of = tuple(names), tuple(group_of)
        # The first name stands for the call where one is asked for.
        super().__init__("KungFuAllReduceGradients", names[0], op=check_reduce_op(op), names=names, group_of=group_of)
        del self.init_attrs["name"]
