"""The resize primitive."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive, element


class KungFuResize(Primitive):
    """Request a cluster of another size; every rank asks for the same one.

    A call takes the size, a 0-d tensor of uint32. It returns two 0-d tensors of bool: whether the
    membership is another one now, and whether this process is no longer part of it. The present size
    gives (False, False) and needs no config server.

    Raises:
        RuntimeError: at every rank, if the request is rejected (``ResizeError: ...``). The cluster is
            as it was.
    """

    def __init__(self) -> None:
        super().__init__("KungFuResize", ["n"], ["changed", "detached"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        (n,) = inputs
        if element(n["dtype"]) != mstype.uint32:
            raise TypeError(f"{self.name} takes the size as a tensor of uint32, not of {element(n['dtype'])}")
        if list(n["shape"]) not in ([], [1]):
            raise ValueError(f"{self.name} takes one size, not a tensor of shape {tuple(n['shape'])}")
        return ([], []), (mstype.bool_, mstype.bool_)
