"""The runtime through MindSpore's primitives, in a compiled graph as a training step has it."""

from __future__ import annotations

import time
from typing import Any, Callable

from ms_kungfu import _core
from ms_kungfu.bench.contenders.base import CollectiveContender, Loop, Unsupported, timed
from ms_kungfu.bench.contenders.kungfu import Joined
from ms_kungfu.bench.workload import Workload


class KungFuPrimitive(Joined, CollectiveContender):
    ways = ("64M",)  # the optimizers' default fusion
    needs = ("mindspore",)
    remedy = "pip install mindspore"

    def loop(self, work: Workload) -> Loop:
        return graph_loop(work, _cell(work), self.barrier, self._clock)

    @staticmethod
    def _clock() -> float:
        return time.perf_counter()


class KungFuKernel(KungFuPrimitive):
    """The same, but only the time inside the kernels counts, from when all ranks are there: not what MindSpore does to
    hand a Python tuple to a graph and back, which gradients inside a training step never go through."""

    last_to_come_counts = True

    @staticmethod
    def _clock() -> float:
        return float(_core.traffic()[2])  # seconds in collectives


def _cell(work: Workload) -> Any:
    from ms_kungfu.bench.contenders._graph import InGroups
    from ms_kungfu.ops import KungFuAllReduce, KungFuBroadcast
    from ms_kungfu.ops.all_reduce import AllReduceGradients

    task = work.task
    if task.kind == "broadcast":
        return InGroups(lambda group: KungFuBroadcast(task.root, f"bench/{group}"), task.groups)
    if len(task.counts) == 1:
        return InGroups(lambda group: KungFuAllReduce(task.op, f"bench/{group}"), task.groups)
    names = [f"bench/{group}" for group in range(len(task.groups))]
    group_of = [group for group, (begin, end) in enumerate(task.groups) for _ in range(begin, end)]
    return InGroups(lambda _: AllReduceGradients(task.op, names, group_of), [(0, len(task.counts))])


def graph_loop(
    work: Workload, net: Any, barrier: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> Loop:
    """Times a compiled cell that takes all inputs and returns all outputs."""
    import mindspore as ms

    if work.task.dtype == "bfloat16":
        raise Unsupported("bfloat16 can't be handed to MindSpore from NumPy; measure it natively")
    inputs = [tuple(ms.Tensor(x) for x in one) for one, _ in work.sets]
    results: dict[int, Any] = {}

    def call(turn: int) -> None:
        results[turn % len(inputs)] = net(*inputs[turn % len(inputs)])

    def finish() -> None:
        # By a result: ms.runtime.synchronize() spins, on the core that the kernel runs on.
        for outputs in results.values():
            outputs[-1].asnumpy()

    def loop(samples: int, batch: int) -> list[float]:
        seconds = timed(barrier, call, finish=finish, clock=clock)(samples, batch)
        for i, outputs in results.items():
            work.sets[i] = (work.sets[i][0], [x.asnumpy() for x in outputs])
        return seconds

    return loop
