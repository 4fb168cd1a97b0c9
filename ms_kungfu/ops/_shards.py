"""The sum over the shards of a step: `ms_kungfu.elastic.ShardedStep` puts it between gradients and update."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Collective

_BOOL = mstype.TensorType(mstype.bool_)


class SumShards(Collective):
    """Contribute the gradients of a shard, a tuple of tensors of float dtypes.

    Returns as many tensors and a 0-d one of bool, in one tuple. If that is true the step is over, and the others are
    the sum over all its shards, divided by their number. It has the same bits at every rank, whichever rank computed
    which shard. If it is false this rank has more shards to compute, and the others have no value.
    ops_src/shards/step.h

    It runs before all writes to Parameters that follow it in the program.
    """

    def __init__(self, name: str) -> None:
        super().__init__("KungFuSumShards", name)
        # Into the chain of the writes: an optimizer may begin with one that takes no gradient.
        self.add_prim_attr("side_effect_mem", True)
        self.dtypes: list[str] = []
        """Of the contributions; known once it has been compiled, or run in PyNative mode."""

    def __call__(self, *brought: Any) -> Any:
        """Run in PyNative mode, which infers nothing if it has done so for another one with the same arguments."""
        self.dtypes = [str(tensor.dtype) for tensor in brought[0]]
        return super().__call__(*brought)

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        brought = super().__infer__(*inputs)
        self.dtypes = [str(dtype.element_type()) for dtype in brought["dtype"]]
        return {"shape": (*brought["shape"], []), "dtype": (*brought["dtype"], _BOOL), "value": None}
