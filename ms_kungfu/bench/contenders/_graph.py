"""A compiled cell around collectives. A file of its own, since importing it loads MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
from mindspore import nn


class InGroups(nn.Cell):
    """Hands the tensors [begin, end) of each group to a primitive of its own and returns all results in order."""

    def __init__(self, primitive: Callable[[int], Any], groups: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.parts = tuple((begin, end, primitive(g)) for g, (begin, end) in enumerate(groups))

    @ms.jit(backend="ms_backend")
    def construct(self, *tensors):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        outputs: tuple[Any, ...] = ()
        for begin, end, primitive in self.parts:
            if end - begin == 1:
                outputs += (primitive(tensors[begin]),)
            else:
                outputs += primitive(tensors[begin:end])
        return outputs
