"""The runtime through MindSpore's primitives, in a compiled graph as a training step has it."""

from __future__ import annotations

from typing import Any

from ms_kungfu.bench.contenders.base import CollectiveContender, Loop, Unsupported, timed
from ms_kungfu.bench.contenders.kungfu import Joined
from ms_kungfu.bench.workload import Workload


class KungFuPrimitive(Joined, CollectiveContender):
    ways = ("flat",)  # a tuple is one operation
    needs = ("mindspore",)
    remedy = "pip install mindspore"

    def loop(self, work: Workload) -> Loop:
        import mindspore as ms

        from ms_kungfu import _core
        from ms_kungfu.bench.contenders._graph import InGroups
        from ms_kungfu.ops import KungFuAllReduce, KungFuBroadcast

        task = work.task

        def primitive(group: int) -> Any:
            if task.kind == "broadcast":
                return KungFuBroadcast(task.root, f"bench/{group}")
            return KungFuAllReduce(task.op, f"bench/{group}")

        net = InGroups(primitive, task.groups)
        return graph_loop(work, net, lambda: _core.barrier("bench/barrier"), ms)


def graph_loop(work: Workload, net: Any, barrier: Any, ms: Any) -> Loop:
    """Times a compiled cell that takes all inputs and returns all outputs."""
    if work.task.dtype == "bfloat16":
        raise Unsupported("bfloat16 can't be handed to MindSpore from NumPy; measure it natively")
    inputs = [tuple(ms.Tensor(x) for x in one) for one, _ in work.sets]
    results: dict[int, Any] = {}

    def call(turn: int) -> None:
        results[turn % len(inputs)] = net(*inputs[turn % len(inputs)])

    def loop(samples: int, batch: int) -> list[float]:
        seconds = timed(barrier, ms.runtime.synchronize, call)(samples, batch)
        ms.runtime.synchronize()
        for i, outputs in results.items():
            work.sets[i] = (work.sets[i][0], [x.asnumpy() for x in outputs])
        return seconds

    return loop
