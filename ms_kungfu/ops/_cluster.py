"""The present cluster, for a graph that was compiled earlier."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

# Without this attribute MindSpore converts a 0-d output to a number.
_INT64 = mstype.TensorType(mstype.int64)


class Cluster(Primitive):
    """Return the participants in the last all-reduce, as two 0-d tensors of int64. Sends nothing.

    The first tensor is a number that changes if the participants change: the cluster version, with the number of
    failures in that version in the highest bits. The second is the number of participants.
    """

    def __init__(self) -> None:
        super().__init__("KungFuCluster", [], ["version", "size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return ([], []), (_INT64, _INT64)
