"""Primitives that read the current cluster when a graph runs, because the cluster may change after compilation."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

# Without this type, MindSpore converts a 0-d output to a number.
_INT64 = mstype.TensorType(mstype.int64)


class KungFuPlace(Primitive):
    """Return this worker's rank and the number of workers when the step runs.

    The result is two 0-d tensors of int64. They are correct even in a graph that was compiled before a
    resize. The primitive doesn't communicate. The number of workers includes a failed worker until the
    next cluster version.
    """

    def __init__(self) -> None:
        super().__init__("KungFuPlace", [], ["rank", "size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return ([], []), (_INT64, _INT64)


class KungFuBarrier(Primitive):
    """Wait until every living worker has called this primitive.

    The result is the number of these workers, a 0-d tensor of int64. The primitive is a collective, so
    in a graph it runs in program order with the other collectives.
    """

    def __init__(self) -> None:
        super().__init__("KungFuBarrier", [], ["size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return [], _INT64


# These functions create their primitives only when called. In a graph, the parser then creates one primitive per call,
# and only when the process may join the cluster.
def rank():  # type: ignore[no-untyped-def]  # these are read by MindSpore's parser
    """Return this worker's rank when the step runs.

    The function doesn't communicate with other workers.

    Returns:
        A 0-d tensor of int64, which is correct even in a graph that was compiled before a resize.
    """
    return KungFuPlace()()[0]


def cluster_size():  # type: ignore[no-untyped-def]
    """Return the number of workers when the step runs.

    The function doesn't communicate with other workers. The number includes a failed worker until the
    next cluster version.

    Returns:
        A 0-d tensor of int64, which is correct even in a graph that was compiled before a resize.
    """
    return KungFuPlace()()[1]


def barrier():  # type: ignore[no-untyped-def]
    """Wait until every living worker has called this function.

    The function is a collective, so in a graph it runs in program order with the other collectives.

    Returns:
        The number of these workers, a 0-d tensor of int64.
    """
    return KungFuBarrier()()
