"""Sum the gradients of a step's shards. `ms_kungfu.elastic.ShardedStep` inserts the sum before the update."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Collective

_BOOL = mstype.TensorType(mstype.bool_)


class SumShards(Collective):
    """Add a shard's gradients, a tuple of float tensors, to the sum over the step's shards.

    The result is a tuple of as many tensors, followed by a 0-d bool tensor. If the bool is true, all shards of the step
    are summed, and the tensors are the sum divided by the number of shards. These tensors are bitwise identical on
    every rank and don't depend on which rank computed which shard. If the bool is false, this rank has more shards to
    compute, and the tensors' contents are undefined. See ops_src/shards/step.h.

    The program's later writes to Parameters all run after the primitive.
    """

    def __init__(self, name: str) -> None:
        super().__init__("KungFuSumShards", name)
        # Because of the side effect, later writes to Parameters wait, even an optimizer's writes that use no gradient.
        self.add_prim_attr("side_effect_mem", True)
        self.dtypes: list[str] = []
        """The dtypes of the gradients, known after the first compilation (in PyNative mode, the first call)."""

    def __call__(self, *brought: Any) -> Any:
        """Run in PyNative mode, where MindSpore may skip inference if an equal primitive has run before."""
        self.dtypes = [str(tensor.dtype) for tensor in brought[0]]
        return super().__call__(*brought)

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        brought = super().__infer__(*inputs)
        self.dtypes = [str(dtype.element_type()) for dtype in brought["dtype"]]
        return {"shape": (*brought["shape"], []), "dtype": (*brought["dtype"], _BOOL), "value": None}
