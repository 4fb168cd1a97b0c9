"""The present cluster, in a compiled graph that was compiled before it."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

# Of a 0-d output without the word MindSpore makes a number.
_INT64 = mstype.TensorType(mstype.int64)


class Cluster(Primitive):
    """The participants in the last all-reduce: two 0-d tensors of int64. Sends nothing.

    One is a number that changes if the participants do (the cluster's version, and in its highest bits the failures
    since). The other is how many they were.
    """

    def __init__(self) -> None:
        super().__init__("KungFuCluster", [], ["version", "size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return ([], []), (_INT64, _INT64)
