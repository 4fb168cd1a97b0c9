"""Training steps for `step`: with the runtime's optimizer, and with MindSpore's data parallelism."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.contenders.base import Contender
from benchmarks.contenders.kungfu import Joined
from benchmarks.contenders.mindspore_builtin import Scheduled

_BATCHES = 8


class _Trains(Contender):
    """A task has: network (in `benchmarks.networks`), optimizer (nn.Momentum or KungFuMomentum), mode (graph or
    pynative), batch, samples (number of steps)."""

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        super().__init__(rank, size, *extra)
        self._steps: dict[tuple[str, str], Any] = {}

    def measure(self, task: dict[str, Any]) -> dict[str, Any]:
        import mindspore as ms

        from benchmarks.contenders import _training
        from benchmarks.networks import Samples

        ms.set_context(mode=ms.GRAPH_MODE if task["mode"] == "graph" else ms.PYNATIVE_MODE)
        which = (task["optimizer"], task["network"])
        if which not in self._steps:
            ms.set_seed(1)
            self._steps[which] = _training.training_step(*which)
        step = self._steps[which]
        samples = Samples(task["network"], _BATCHES * task["batch"])
        order = np.random.default_rng(self.rank).permutation(len(samples)).reshape(_BATCHES, -1)
        data = [(ms.Tensor(samples.x[rows]), ms.Tensor(samples.labels[rows])) for rows in order]
        seconds = []
        for i in range(2 + int(task["samples"])):
            self.barrier()
            begin = time.perf_counter()
            step(*data[i % _BATCHES]).asnumpy()
            ms.runtime.synchronize()
            seconds.append(time.perf_counter() - begin)
        checksum = sum(float(np.abs(p.asnumpy()).sum()) for p in step.network.trainable_params())
        wrong = None if np.isfinite(checksum) else f"rank {self.rank}: the weights are no numbers any more"
        return {"samples": seconds[2:], "wrong": wrong, "checksum": checksum}


class KungFuTraining(_Trains, Joined):
    """The runtime reduces the gradients if the optimizer is KungFuMomentum."""


class MindSporeTraining(_Trains, Scheduled):
    def __init__(self, rank: int, size: int, *extra: str) -> None:
        super().__init__(rank, size, *extra)
        import mindspore as ms

        ms.set_auto_parallel_context(
            parallel_mode="data_parallel", gradients_mean=True, device_num=self.size, parameter_broadcast=False
        )
