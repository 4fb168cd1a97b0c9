"""The resize primitive."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive, element


class KungFuResize(Primitive):
    """Change the size of the cluster to the size that every rank requests.

    The input is the size, a 0-d tensor of uint32. The output is two 0-d bool tensors: whether the
    membership has changed, and whether this process is no longer part of the cluster. If the
    requested size is the current size, the output is (False, False), and no config server is
    needed.

    Raises:
        RuntimeError: if the request is rejected (``ResizeError: ...``). Every rank raises it, and the
            cluster doesn't change.
    """

    def __init__(self) -> None:
        super().__init__("KungFuResize", ["n"], ["changed", "detached"])

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        (n,) = inputs
        if element(n["dtype"]) != mstype.uint32:
            raise TypeError(f"{self.name} requires the size as a tensor of uint32, not of {element(n['dtype'])}")
        if list(n["shape"]) not in ([], [1]):
            raise ValueError(f"{self.name} requires one size, not a tensor of shape {tuple(n['shape'])}")
        return ([], []), (mstype.bool_, mstype.bool_)
