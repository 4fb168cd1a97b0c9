"""The reduce-scatter primitive."""

from __future__ import annotations

from typing import Any

from ms_kungfu import runtime
from ms_kungfu.ops._base import SizedCollective
from ms_kungfu.ops.reduce_op import ReduceOp, check_reduce_op


class KungFuReduceScatter(SizedCollective):
    """Reduce over all ranks; rank r gets the r-th part of the result along the first dimension.

    A tensor of shape (size * n, ...) comes out as (n, ...); ValueError where the first dimension can't be divided by
    the number of ranks. Takes a tensor or a tuple of tensors; the shapes must be the same at all ranks. The gradient is
    an all-gather, of a sum only, as in MindSpore.

    A tuple is divided into operations as with :class:`KungFuAllGather`, by ``comm_fusion``'s "reducescatter".
    As with :class:`KungFuAllGather` a compiled graph holds for one size of the cluster.
    """

    def __init__(self, op: str = ReduceOp.SUM, name: str | None = None) -> None:
        super().__init__("KungFuReduceScatter", name, "reducescatter", op=check_reduce_op(op))

    def output_shape(self, shape: list[Any]) -> list[Any]:
        size = runtime.current_cluster_size()
        if not shape or shape[0] % size:
            raise ValueError(
                f"{self.name} can't scatter a tensor of shape {tuple(shape)} over {size} ranks; its first dimension "
                f"must be a multiple of {size}"
            )
        return [shape[0] // size, *shape[1:]]
