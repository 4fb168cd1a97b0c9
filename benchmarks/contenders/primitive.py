"""The runtime through MindSpore's primitives, in a compiled graph as in a training step."""

from __future__ import annotations

import time

from benchmarks.contenders.base import CollectiveContender, Loop
from benchmarks.contenders.kungfu import Joined
from benchmarks.workload import Workload
from ms_kungfu import _core


class KungFuPrimitive(Joined, CollectiveContender):
    ways = ("64M",)  # the optimizers' default fusion
    needs = ("mindspore",)
    remedy = "pip install mindspore"
    clock = staticmethod(time.perf_counter)

    def loop(self, work: Workload) -> Loop:
        from benchmarks.contenders._graph import InGroups, graph_loop
        from ms_kungfu.ops import KungFuAllReduce, KungFuBroadcast
        from ms_kungfu.ops.all_reduce import AllReduceGradients

        task = work.task
        names = [f"bench/{group}" for group in range(len(task.groups))]
        if task.kind == "broadcast":
            net = InGroups(lambda group: KungFuBroadcast(task.root, names[group]), task.groups)
        elif len(task.counts) == 1:
            net = InGroups(lambda group: KungFuAllReduce(task.op, names[group]), task.groups)
        else:
            group_of = [group for group, (begin, end) in enumerate(task.groups) for _ in range(begin, end)]
            net = InGroups(lambda _: AllReduceGradients(task.op, names, group_of), [(0, len(task.counts))])
        return graph_loop(work, net, self.barrier, self.clock)


class KungFuKernel(KungFuPrimitive):
    """The same, but count only the time inside the kernels, from the arrival of the last rank.

    MindSpore's conversion of a Python tuple for a graph and back doesn't count, because gradients inside a training
    step need no conversion.
    """

    last_to_come_counts = True

    @staticmethod
    def clock() -> float:
        return float(_core.traffic()[2])  # seconds in collectives
