"""MindSpore's own collectives on CPU, in a cluster that is started as by ``msrun``: TCP on loopback."""

from __future__ import annotations

import socket
import sys
from typing import Any, ClassVar

from benchmarks.contenders.base import CollectiveContender, Contender, Loop, Process, Unsupported, own_name
from benchmarks.workload import Workload

_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}
_SCHEDULER = "import mindspore as ms; from mindspore.communication import init; ms.set_device('CPU'); init()"


class Scheduled(Contender):
    """A rank of a cluster that MindSpore itself has formed."""

    transport: ClassVar[str] = "tcp"
    needs = ("mindspore",)
    remedy = "pip install mindspore"

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"MS_WORKER_NUM": str(size), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
        ranks = [
            Process(cls.worker(folder, r, size), {**common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(r)})
            for r in range(size)
        ]
        return [Process([sys.executable, "-c", _SCHEDULER], {**common, "MS_ROLE": "MS_SCHED"}), *ranks]

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        import mindspore as ms
        from mindspore import ops
        from mindspore.communication import get_rank, init

        del rank, extra
        ms.set_device("CPU")
        init()
        super().__init__(get_rank(), size)
        self._meet: Any = ops.AllReduce()
        self._one: Any = ms.Tensor([1.0], ms.float32)

    def barrier(self) -> None:
        self._meet(self._one).asnumpy()


class MindSpore(Scheduled, CollectiveContender):
    def loop(self, work: Workload) -> Loop:
        from mindspore import ops

        from benchmarks.contenders._graph import InGroups, graph_loop

        task = work.task
        if task.kind == "broadcast":
            raise Unsupported("MindSpore's Broadcast needs a tuple and overwrites it: it isn't measured")
        op = getattr(ops.ReduceOp, own_name(_OPS, task.op, "MindSpore"))
        return graph_loop(work, InGroups(lambda _: ops.AllReduce(op), task.groups), self.barrier)
