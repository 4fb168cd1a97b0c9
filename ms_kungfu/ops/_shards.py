"""The sum over the shards of a step: what `ms_kungfu.elastic.ShardedStep` puts between gradients and update."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Collective

_BOOL = mstype.TensorType(mstype.bool_)


class SumShards(Collective):
    """Bring the gradients of a shard, a tuple of tensors of float dtypes.

    Returns as many tensors and a 0-d one of bool, in one tuple. Where that is true the step is over, and the others are
    the sum over all its shards, divided by their number: the same bits at every rank, whoever computed which shard.
    Where it is false this rank has more shards to compute, and the others have no value. ops_src/shards/step.h
    """

    def __init__(self, name: str) -> None:
        super().__init__("KungFuSumShards", name)

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        brought = super().__infer__(*inputs)
        return {"shape": (*brought["shape"], []), "dtype": (*brought["dtype"], _BOOL), "value": None}
