"""The all-reduce primitive."""

from __future__ import annotations

from collections.abc import Sequence

from ms_kungfu.ops._base import Collective
from ms_kungfu.ops.reduce_op import ReduceOp, check_reduce_op


class KungFuAllReduce(Collective):
    """Reduce tensors over all ranks, with bitwise identical results.

    The input is a tensor or a tuple of tensors of any shapes. The output has the same shapes and
    dtypes. Supported dtypes are float16, bfloat16, float32, float64 and (u)int8 to (u)int64. A
    tuple is reduced in one operation per dtype, without a copy into a flat buffer.

    16-bit floats are summed in float32. Sums and products of integers wrap around in their own
    dtype, like arithmetic on NumPy arrays. A mean of integers doesn't overflow, and truncates
    towards zero. A mean divides by the number of ranks at the time of the call, not of the
    compilation.

    The gradient is the same as in MindSpore:

    - for a sum, the sum of the ranks' gradients;
    - for a mean, the mean of the ranks' gradients;
    - for min or max, the sum of the ranks' gradients, but 0 for inputs that don't equal the result;
    - for a product, a sum over the ranks that is divided by the input.

    Args:
        op: one of :class:`ReduceOp`.
        name: the name that matches this rank's call with the other ranks' calls. Calls without a name
            are matched by their order.

    Raises:
        RuntimeError: if the ranks' calls don't match. Every rank raises it. Its text begins with the
            name of the original error, which `ms_kungfu.last_error()` returns.
    """

    def __init__(self, op: str = ReduceOp.SUM, name: str | None = None) -> None:
        super().__init__("KungFuAllReduce", name, op=check_reduce_op(op))


class AllReduceGradients(Collective):
    """Reduce a step's gradients (a tuple of tensors) in groups with the given names.

    `group_of` contains the group number of each tensor. It may be empty if there is only one group.

    The reduction is atomic: a failed rank contributes either to all results or to none, and no
    result is returned before this is decided. If the ranks have different numbers of samples, a
    mean of floats weights each rank by its number of samples.
    """

    _takes_sparse = True

    def __init__(self, op: str, names: Sequence[str], group_of: Sequence[int] = ()) -> None:
        names, group_of = tuple(names), tuple(group_of)
        # The first group's name also identifies the whole call.
        super().__init__("KungFuAllReduceGradients", names[0], op=check_reduce_op(op), names=names, group_of=group_of)
        del self.init_attrs["name"]
