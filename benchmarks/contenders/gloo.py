"""Gloo, as in torch.distributed: in place, from Python, which takes a few of a call's hundreds of microseconds."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from benchmarks.contenders.base import CollectiveContender, Loop, Process, Unsupported, own_name, timed
from benchmarks.workload import Workload

_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class Gloo(CollectiveContender):
    transport: ClassVar[str] = "tcp"
    ways = ("each", "25M", "flat")  # 25 MB is the bucket size of DistributedDataParallel
    needs = ("torch",)

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        # torch would choose an interface by the host's name, which might not be reachable.
        environ = {"GLOO_SOCKET_IFNAME": "lo"}
        return [Process(cls.worker(folder, rank, size, folder), environ) for rank in range(size)]

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(rank, size)
        self._torch: Any = torch
        self._dist: Any = dist
        dist.init_process_group("gloo", init_method=f"file://{extra[0]}/gloo", rank=rank, world_size=size)

    def _tensor(self, array: Any, dtype: str) -> Any:
        torch = self._torch
        if dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def loop(self, work: Workload) -> Loop:
        task, torch, dist = work.task, self._torch, self._dist
        if task.dtype not in _DTYPES:
            raise Unsupported(f"Gloo has no {task.dtype}")
        op = getattr(dist.ReduceOp, own_name(_OPS, task.op, "Gloo"))
        sets = [tuple([self._tensor(x, task.dtype) for x in part] for part in one) for one in work.sets]
        flats = [
            torch.empty(sum(task.counts[begin:end]), dtype=sets[0][0][0].dtype) if end - begin > 1 else None
            for begin, end in task.groups
        ]

        def start(tensor: Any) -> Any:
            if task.kind == "broadcast":
                return dist.broadcast(tensor, task.root, async_op=True)
            return dist.all_reduce(tensor, op, async_op=True)

        def call(turn: int) -> None:
            inputs, outputs = sets[turn % len(sets)]
            under_way = []
            for (begin, end), flat in zip(task.groups, flats):
                if flat is not None:
                    torch.cat([x.view(-1) for x in inputs[begin:end]], out=flat)
                under_way.append(start(outputs[begin] if flat is None else flat))
            for work_, (begin, end), flat in zip(under_way, task.groups, flats):
                work_.wait()
                if flat is not None:
                    parts = flat.split(list(task.counts[begin:end]))
                    torch._foreach_copy_([x.view(-1) for x in outputs[begin:end]], list(parts))

        def reset() -> None:
            # The operation is in place, so restore the inputs for each batch: sums of sums would grow. Only the calls
            # within a batch use each other's results.
            if task.kind == "all_reduce":
                for inputs, outputs in sets:
                    for x, y in zip(inputs, outputs):
                        y.copy_(x)

        def loop(samples: int, batch: int) -> list[float]:
            seconds = timed(dist.barrier, call, before=reset)(samples, batch)
            reset()
            for turn in range(min(samples * batch, len(sets))):
                call(turn)
            return seconds

        return loop
