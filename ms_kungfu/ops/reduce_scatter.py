"""The reduce-scatter primitive."""

from __future__ import annotations

from typing import Any

from ms_kungfu import runtime
from ms_kungfu.ops._base import SizedCollective
from ms_kungfu.ops.reduce_op import ReduceOp, check_reduce_op


class KungFuReduceScatter(SizedCollective):
    """Reduce tensors over all ranks, and return this rank's part of the result.

    On rank r, a tensor of shape (size * n, ...) becomes the r-th part, of shape (n, ...). The input
    is a tensor or a tuple of tensors. The shapes must be the same on all ranks. The gradient (an
    all-gather) is supported only if ``op`` is SUM, as in MindSpore.

    A tuple is split over operations as in :class:`KungFuAllGather`, with the ``comm_fusion`` limit for
    "reducescatter". As with :class:`KungFuAllGather`, a compiled graph is valid for only one cluster
    size.

    Args:
        op: one of :class:`ReduceOp`.
        name: the name that matches this rank's call with the other ranks' calls. Calls without a name
            are matched by their order.

    Raises:
        ValueError: if the first dimension can't be divided by the number of ranks.
    """

    def __init__(self, op: str = ReduceOp.SUM, name: str | None = None) -> None:
        super().__init__("KungFuReduceScatter", name, "reducescatter", op=check_reduce_op(op))

    def output_shape(self, shape: list[Any]) -> list[Any]:
        """Return the shape of the output for one input tensor.

        Args:
            shape: the input's shape.

        Returns:
            The output's shape, whose first dimension is divided by the number of ranks.

        Raises:
            ValueError: if the first dimension can't be divided by the number of ranks.
        """
        size = runtime.current_cluster_size()
        if not shape or shape[0] % size:
            raise ValueError(
                f"{self.name} can't scatter a tensor of shape {tuple(shape)} over {size} ranks; its first dimension "
                f"must be a multiple of {size}"
            )
        return [shape[0] // size, *shape[1:]]
