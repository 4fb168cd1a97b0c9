"""The all-reduce primitive."""

from __future__ import annotations

from collections.abc import Sequence

from ms_kungfu.ops._base import Collective
from ms_kungfu.ops.reduce_op import ReduceOp, check_reduce_op


class KungFuAllReduce(Collective):
    """Reduce tensors over all ranks; every rank gets the result, with the same bits.

    The input is a tensor or a tuple of tensors of any shapes. The output has the same shapes and
    dtypes. Supported dtypes are float16, bfloat16, float32, float64 and (u)int8 to (u)int64. A tuple is
    reduced in one operation per dtype. It isn't copied into a flat buffer.

    16-bit floats accumulate in float32. Sums and products of integers wrap in their own dtype, like
    arithmetic on NumPy arrays. A mean of integers doesn't overflow, and truncates towards zero. The
    number of ranks is taken at the time of the call, not of compilation.

    The gradient is the same as in MindSpore:

    - for a sum: the sum of the gradients;
    - for a mean: the mean of the gradients;
    - for min or max: the sum of the gradients, but only for the inputs that equal the result;
    - for a product: computed by division through the input.

    Args:
        op: one of :class:`ReduceOp`.
        name: matches the call with those of the other ranks. Calls without a name are matched by their
            order.

    Raises:
        RuntimeError: at every rank, if the ranks' calls don't match. Its text begins with the error's
            name; `ms_kungfu.last_error()` returns the typed error.
    """

    def __init__(self, op: str = ReduceOp.SUM, name: str | None = None) -> None:
        super().__init__("KungFuAllReduce", name, op=check_reduce_op(op))


class AllReduceGradients(Collective):
    """Reduce the gradients of a step, a tuple of tensors, in groups with the given names.

    `group_of` has the group number of each tensor. It may be empty if there is one group.

    The reduction is atomic: a failed rank contributes to every result or to none, and no result is
    returned before that is decided. If the ranks' sample counts differ, a mean of floats weights each
    rank by its samples.
    """

    _takes_sparse = True

    def __init__(self, op: str, names: Sequence[str], group_of: Sequence[int] = ()) -> None:
        names, group_of = tuple(names), tuple(group_of)
        # The first name identifies the call if a name is needed.
        super().__init__("KungFuAllReduceGradients", names[0], op=check_reduce_op(op), names=names, group_of=group_of)
        del self.init_attrs["name"]
