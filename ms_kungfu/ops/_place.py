"""Primitives that read the present cluster when a graph runs, because the compiler can't know the later cluster."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

# Without this attribute MindSpore converts a 0-d output to a number.
_INT64 = mstype.TensorType(mstype.int64)


class KungFuPlace(Primitive):
    """Return this worker's rank and the number of workers when the step runs.

    Returns two 0-d tensors of int64. They are right even in a graph that was compiled before a resize.
    The primitive sends nothing. A failed worker counts until the next cluster version.
    """

    def __init__(self) -> None:
        super().__init__("KungFuPlace", [], ["rank", "size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return ([], []), (_INT64, _INT64)


class KungFuBarrier(Primitive):
    """Wait until every living worker has called this primitive.

    Returns the number of these workers, a 0-d tensor of int64. It is a collective: in a graph it runs
    among the other collectives, in program order.
    """

    def __init__(self) -> None:
        super().__init__("KungFuBarrier", [], ["size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return [], _INT64


# Create the primitives at the call. In a graph, the parser creates one per call, and only when the process may join.
def rank():  # type: ignore[no-untyped-def]  # these are read by MindSpore's parser
    """Return this worker's rank when the step runs.

    It sends nothing.

    Returns:
        A 0-d tensor of int64, which is right even in a graph that was compiled before a resize.
    """
    return KungFuPlace()()[0]


def cluster_size():  # type: ignore[no-untyped-def]
    """Return the number of workers when the step runs.

    It sends nothing. A failed worker counts until the next cluster version.

    Returns:
        A 0-d tensor of int64, which is right even in a graph that was compiled before a resize.
    """
    return KungFuPlace()()[1]


def barrier():  # type: ignore[no-untyped-def]
    """Wait until every living worker has called this function.

    It is a collective: in a graph it runs among the other collectives, in program order.

    Returns:
        The number of these workers, a 0-d tensor of int64.
    """
    return KungFuBarrier()()
