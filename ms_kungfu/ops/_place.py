"""The cluster as it is when a step runs, which a graph can't know when it is compiled."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

# Of a 0-d output without the word MindSpore makes a number.
_INT64 = mstype.TensorType(mstype.int64)


class KungFuPlace(Primitive):
    """This worker's rank and the number of workers, two 0-d tensors of int64, as they are when it runs: in a compiled
    graph, too, after a resize. Sends nothing. A worker that has died counts until the next cluster version."""

    def __init__(self) -> None:
        super().__init__("KungFuPlace", [], ["rank", "size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return ([], []), (_INT64, _INT64)


class KungFuBarrier(Primitive):
    """Waits until every worker that lives is here; returns their number, a 0-d tensor of int64. A collective: in a
    graph it runs in the order of the program among the others."""

    def __init__(self) -> None:
        super().__init__("KungFuBarrier", [], ["size"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        return [], _INT64


# Made where they are called: by the parser once for each call in a graph, and not before the process may join.
def rank():  # type: ignore[no-untyped-def]  # these are read by MindSpore's parser
    """This worker's rank, a 0-d tensor of int64, as it is when the step runs: right in a compiled graph after a resize,
    too. Sends nothing."""
    return KungFuPlace()()[0]


def cluster_size():  # type: ignore[no-untyped-def]
    """The number of workers, likewise. One that has died counts until the next cluster version."""
    return KungFuPlace()()[1]


def barrier():  # type: ignore[no-untyped-def]
    """Waits until every worker that lives is here; returns their number. In a graph it is one of the collectives, which
    run in the order of the program."""
    return KungFuBarrier()()
