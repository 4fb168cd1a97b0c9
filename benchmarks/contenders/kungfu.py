"""The runtime, natively and through :mod:`ms_kungfu.comm`; for comparison, memcpy by all ranks at once."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np

from benchmarks.contenders.base import CollectiveContender, Contender, Loop, Process, Unsupported, timed
from benchmarks.workload import Task, Workload
from ms_kungfu import _core, comm
from ms_kungfu.launcher.affinity import allowed_cores, divide

_TIMEOUT_S = 300.0


class Joined(Contender):
    """A rank of the baseline's own cluster, on the cores that kungfu-run would assign to it."""

    transport: ClassVar[str] = "shm"

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        super().__init__(rank, size)
        os.sched_setaffinity(0, divide(allowed_cores(), size)[rank])  # before it starts threads
        descriptor = int(extra[0])
        _core.join(descriptor, rank, f"rank {rank}", False, _TIMEOUT_S, _TIMEOUT_S)
        os.close(descriptor)

    def barrier(self) -> None:
        _core.barrier("bench/barrier")

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        # The ranks inherit the descriptor. After their start, the caller closes its copy.
        descriptor = _core.create_segment(size, 1, len(os.sched_getaffinity(0)))
        return [
            Process(cls.worker(folder, rank, size, str(descriptor)), descriptors=(descriptor,)) for rank in range(size)
        ]


class KungFu(Joined, CollectiveContender):
    ways = ("flat",)  # one operation over many tensors, which are never copied into one buffer

    def loop(self, work: Workload) -> Loop:
        task = work.task
        groups, op, number = list(task.groups), comm.OPS[task.op], work.dtype.number
        return lambda samples, batch: _core._time_collective(
            task.kind, "bench", list(work.sets), groups, number, op, task.root, samples, batch
        )


class KungFuPython(Joined, CollectiveContender):
    def loop(self, work: Workload) -> Loop:
        task, sets = work.task, work.sets
        if task.dtype == "bfloat16":
            raise Unsupported("bfloat16 in NumPy needs ml_dtypes; measure it natively")
        if task.kind == "broadcast":

            def call(turn: int) -> None:
                for array in sets[turn % len(sets)][0]:
                    comm.broadcast(array, task.root, "bench", array)
        else:

            def call(turn: int) -> None:
                inputs, outputs = sets[turn % len(sets)]
                for array, out in zip(inputs, outputs):
                    comm.all_reduce(array, task.op, "bench", out)

        return timed(self.barrier, call)


class Memcpy(Joined, CollectiveContender):
    transport = "none"

    def loop(self, work: Workload) -> Loop:
        copies = list(work.sets)
        if work.task.kind == "broadcast":  # in place, but a copy needs a destination
            copies = [(inputs, [np.empty_like(x) for x in inputs]) for inputs, _ in copies]
        return lambda samples, batch: _core._time_memcpy(copies, samples, batch)

    def measure(self, task: Task) -> dict[str, Any]:
        # Nothing to verify: memcpy copies this rank's own values, which aren't a collective's result.
        return {**super().measure(task), "wrong": None}
