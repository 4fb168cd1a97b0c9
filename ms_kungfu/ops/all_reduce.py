"""The all-reduce primitive."""

from __future__ import annotations

from collections.abc import Sequence

from ms_kungfu.ops._base import Collective
from ms_kungfu.ops.reduce_op import ReduceOp, check_reduce_op


class KungFuAllReduce(Collective):
    """Reduce tensors over all ranks; every rank gets the result, with the same bits.

    A call takes a tensor or a tuple of tensors, of any shapes, and returns as many of the same shapes
    and dtypes. The dtypes are float16, bfloat16, float32, float64 and (u)int8 to (u)int64. A tuple is
    one operation, without a flat copy; a tuple of several dtypes is one operation a dtype.

    16-bit floats accumulate in float32. Sums and products of integers wrap in their own dtype, as
    arithmetic of NumPy's arrays does. A mean of integers doesn't overflow, and truncates towards zero.
    The number of ranks is that at the time of the call, not at the time of compilation.

    The gradient is MindSpore's:

    - of a sum, the sum of the gradients;
    - of a mean, their mean;
    - of a min or max, their sum at the inputs that are the result;
    - of a product, by division through the input.

    Args:
        op: one of :class:`ReduceOp`.
        name: matches the call with those of the other ranks; calls without one are matched by their
            order.

    Raises:
        RuntimeError: at every rank, for a mistake between the ranks. Its text begins with the error's
            name; `ms_kungfu.last_error()` returns the typed error.
    """

    def __init__(self, op: str = ReduceOp.SUM, name: str | None = None) -> None:
        super().__init__("KungFuAllReduce", name, op=check_reduce_op(op))


class AllReduceGradients(Collective):
    """Reduce the gradients of a step, a tuple of tensors, in groups of the given names.

    `group_of` has the number of each tensor's group; it may be empty if there is one group.

    All of them or none: a failed rank contributes to every result or to none, and no result is returned before that is
    settled. In a mean of floats each rank counts by its samples, if these differ.
    """

    _takes_sparse = True

    def __init__(self, op: str, names: Sequence[str], group_of: Sequence[int] = ()) -> None:
        names, group_of = tuple(names), tuple(group_of)
        # The first name stands for the call if one is needed.
        super().__init__("KungFuAllReduceGradients", names[0], op=check_reduce_op(op), names=names, group_of=group_of)
        del self.init_attrs["name"]
