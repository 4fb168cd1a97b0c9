"""The present cluster, which a graph can't know when it is compiled."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

# Of a 0-d output without the word MindSpore makes a number.
_INT64 = mstype.TensorType(mstype.int64)


class KungFuPlace(Primitive):
    """This worker's rank and the number of workers when the step runs.

    Returns two 0-d tensors of int64, which are right in a compiled graph after a resize, too. It sends
    nothing. A failed worker counts until the next cluster version.
    """

    def __init__(self) -> None:
        super().__init__("KungFuPlace", [], ["rank", "size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return ([], []), (_INT64, _INT64)


class KungFuBarrier(Primitive):
    """Wait until every living worker is here.

    Returns their number, a 0-d tensor of int64. A collective: in a graph it runs among the others in
    the order of the program.
    """

    def __init__(self) -> None:
        super().__init__("KungFuBarrier", [], ["size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return [], _INT64


# Made at their call: by the parser once for each call in a graph, and not before the process may join.
def rank():  # type: ignore[no-untyped-def]  # these are read by MindSpore's parser
    """Return this worker's rank when the step runs.

    It sends nothing.

    Returns:
        A 0-d tensor of int64, which is right in a compiled graph after a resize, too.
    """
    return KungFuPlace()()[0]


def cluster_size():  # type: ignore[no-untyped-def]
    """Return the number of workers when the step runs.

    It sends nothing. A failed worker counts until the next cluster version.

    Returns:
        A 0-d tensor of int64, which is right in a compiled graph after a resize, too.
    """
    return KungFuPlace()()[1]


def barrier():  # type: ignore[no-untyped-def]
    """Wait until every living worker is here.

    In a graph it is one of the collectives, which run in the order of the program.

    Returns:
        The number of these workers, a 0-d tensor of int64.
    """
    return KungFuBarrier()()
