"""The jobs of the benchmark `optimizers`: workers of a kungfu-run job train a network with each optimizer in turn."""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, ClassVar

import numpy as np

from benchmarks.contenders.base import Contender, Process
from ms_kungfu import _core, runtime

#: Their names in results; None: the workers aren't synchronised.
OPTIMIZERS = {
    "nn.Momentum": None,
    "S-SGD": "SynchronousSGDOptimizer",
    "SMA": "SynchronousAveragingOptimizer",
    "pair averaging": "PairAveragingOptimizer",
}
_WARM_UP = 2


class Averaging(Contender):
    """A task has: optimizer (in `OPTIMIZERS`), network (in `benchmarks.networks`), batch, samples (number of steps)."""

    transport: ClassVar[str] = "shm"
    needs = ("mindspore",)
    remedy = "pip install mindspore"

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        # Workers get other workers' models through the launcher, which also sets a process's rank.
        words = ["-q", "-np", str(size), *cls.worker(folder, -1, size)]
        return [Process([sys.executable, "-m", "ms_kungfu.launcher", *words], {"XDG_RUNTIME_DIR": folder})]

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        del rank, extra
        runtime.init()
        super().__init__(runtime.current_rank(), size)
        self._steps: dict[str, tuple[Callable[..., Any], Any]] = {}

    def barrier(self) -> None:
        _core.barrier("bench/barrier")

    def _step(self, task: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
        """Return the step and its optimizer. The first call creates them."""
        import mindspore as ms
        from mindspore import nn

        from benchmarks.networks import NETWORKS, Loss
        from ms_kungfu import optimizers

        kind = OPTIMIZERS[task["optimizer"]]
        if task["optimizer"] not in self._steps:
            ms.set_context(mode=ms.GRAPH_MODE)
            ms.set_seed(1)  # equal models on all workers
            net = NETWORKS[task["network"]]()
            plain = nn.Momentum(net.trainable_params(), 0.01, 0.9)
            optimizer = plain if kind is None else getattr(optimizers, kind)(plain)
            step = nn.TrainOneStepCell(nn.WithLossCell(net, Loss()), optimizer).set_train()
            self._steps[task["optimizer"]] = (step, optimizer)
        return self._steps[task["optimizer"]]

    def measure(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return the step times of this worker, which waits for other workers only if its optimizer does."""
        import mindspore as ms

        from benchmarks.networks import Samples

        step, optimizer = self._step(task)
        batch, steps = int(task["batch"]), int(task["samples"])
        samples = Samples(task["network"], 8 * batch)
        order = np.random.default_rng(self.rank).permutation(len(samples)).reshape(8, batch)
        data = [(ms.Tensor(samples.x[rows]), ms.Tensor(samples.labels[rows])) for rows in order]
        for i in range(_WARM_UP):
            step(*data[i]).asnumpy()
        self.barrier()
        before, begin = _core.traffic()[0], time.perf_counter()
        for i in range(steps):
            loss = step(*data[i % len(data)]).asnumpy()
        seconds = (time.perf_counter() - begin) / steps
        operations = _core.traffic()[0] - before
        self.barrier()
        return {"samples": [seconds], "wrong": self._wrong(task, optimizer, loss, operations, steps)}

    def _wrong(self, task: dict[str, Any], optimizer: Any, loss: Any, operations: int, steps: int) -> str | None:
        """Return an error unless the worker has trained, and has synchronised as its optimizer should."""
        name = task["optimizer"]
        if not np.isfinite(loss):
            return f"rank {self.rank}: the loss of {name} is no number"
        alone = self.size == 1 or name in ("nn.Momentum", "pair averaging")
        if (operations > 0) if alone else (operations < steps):
            return f"rank {self.rank}: {name} has reduced {operations} times in {steps} steps"
        if name == "pair averaging" and self.size > 1 and optimizer.last_exchange()[0] in (-1, self.rank):
            return f"rank {self.rank}: {name} has taken nobody's model"
        return None
