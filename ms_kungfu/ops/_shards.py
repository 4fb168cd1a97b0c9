"""The sum over the shards of a step. `ms_kungfu.elastic.ShardedStep` inserts it between gradients and update."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Collective

_BOOL = mstype.TensorType(mstype.bool_)


class SumShards(Collective):
    """Add the gradients of a shard, a tuple of float tensors, to the sum of the step.

    Returns a tuple: the same number of tensors, and a 0-d bool tensor. If the bool is true, the step is over, and the
    tensors are the sum over all its shards, divided by the number of shards. The result has the same bits at every
    rank, and it doesn't depend on which rank computed which shard. If the bool is false, this rank has more shards to
    compute, and the tensors have no value. See ops_src/shards/step.h.

    This primitive runs before all later writes to Parameters in the program.
    """

    def __init__(self, name: str) -> None:
        super().__init__("KungFuSumShards", name)
        # Chain it before the writes to Parameters: an optimizer may begin with a write that doesn't use a gradient.
        self.add_prim_attr("side_effect_mem", True)
        self.dtypes: list[str] = []
        """The number of contributions; known after the first compilation or call in PyNative mode."""

    def __call__(self, *brought: Any) -> Any:
        """Run in PyNative mode. MindSpore may skip inference there if an equal primitive has run before."""
        self.dtypes = [str(tensor.dtype) for tensor in brought[0]]
        return super().__call__(*brought)

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        brought = super().__infer__(*inputs)
        self.dtypes = [str(dtype.element_type()) for dtype in brought["dtype"]]
        return {"shape": (*brought["shape"], []), "dtype": (*brought["dtype"], _BOOL), "value": None}
