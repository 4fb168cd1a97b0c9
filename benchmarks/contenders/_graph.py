"""Time a compiled cell around collectives. This is a separate file, since its import loads MindSpore."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from benchmarks.contenders.base import Loop, Unsupported, timed
from benchmarks.workload import Workload


class InGroups(nn.Cell):
    """Passes the tensors [begin, end) of each group to a separate primitive, and returns all results in order."""

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


def graph_loop(
    work: Workload, net: Any, barrier: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> Loop:
    """Return a loop that times a compiled cell. The cell takes all inputs and returns all outputs."""
    if work.task.dtype == "bfloat16":
        raise Unsupported("bfloat16 can't be handed to MindSpore from NumPy; measure it natively")
    inputs = [tuple(ms.Tensor(x) for x in one) for one, _ in work.sets]
    results: dict[int, Any] = {}

    def call(turn: int) -> None:
        results[turn % len(inputs)] = net(*inputs[turn % len(inputs)])

    def finish() -> None:
        # Wait by reading a result: ms.runtime.synchronize() would spin on the kernel's core.
        for outputs in results.values():
            outputs[-1].asnumpy()

    def loop(samples: int, batch: int) -> list[float]:
        seconds = timed(barrier, call, finish=finish, clock=clock)(samples, batch)
        for i, outputs in results.items():
            work.sets[i] = (work.sets[i][0], [x.asnumpy() for x in outputs])
        return seconds

    return loop
