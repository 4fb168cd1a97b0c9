"""Compile a cell, or read its graph, and print what happened and a result. Usage: FACTOR ROWS MAY_SHARE [HOLDER].

The cell's Parameter belongs to the cell. With HOLDER=function it belongs to a function that the cell calls. With
HOLDER=unknown no Parameter of a graph is found to be the cell's.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from ms_kungfu import membership
from ms_kungfu.ops import graph_store


class Scaled(nn.Cell):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = ms.Parameter(ms.Tensor(np.full(3, 10, np.float32)), name="weight")

    def construct(self, x):  # type: ignore[no-untyped-def]
        return (x * self.weight).sum() * self.factor + x.shape[0]


class Calling(nn.Cell):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def construct(self, x):  # type: ignore[no-untyped-def]
        return self.function(x)


def calls(cell: nn.Cell) -> Any:
    def function(x):  # type: ignore[no-untyped-def]
        return cell(x)

    return function


logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
graph_store.membership.is_joining = lambda: True
factor, rows, may_share = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "yes"
scaled, x = Scaled(factor), ms.Tensor(np.ones((rows, 3), np.float32))
holder = sys.argv[4] if len(sys.argv) > 4 else "cell"
cell = Calling(calls(scaled)) if holder == "function" else scaled
if holder == "unknown":
    graph_store._is_bound = lambda cell, phases: False
read = graph_store.compile_or_read(cell, [x], lambda: may_share)
scaled.weight.set_data(ms.Tensor(np.full(3, 20, np.float32)))
print("read" if read else "compiled", float(cell(x).asnumpy()), membership.is_joining())
