"""The programs that `shards` runs under kungfu-run; see :mod:`.shards`.

``python -m benchmarks.shards_worker FOLDER PLAN`` carries out PLAN, which is JSON. Rank 0 writes FOLDER/result.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore._c_expression as native
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model

from benchmarks import networks
from benchmarks.pauses_worker import Recorder, digest
from ms_kungfu import _core, comm, runtime
from ms_kungfu.agreement import gather_json
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, ShardedStep
from ms_kungfu.optimizers import KungFuMomentum

_DIFFERENT = 64  # number of distinct samples, which repeat
_AHEAD = 20  # steps: slightly more than the number of batches that MindSpore's pipelines buffer
_POLL_S = 0.005
# The names of the class that compiles, in several versions of MindSpore.
_EXECUTORS = ("GraphExecutor_", "JitExecutor_", "GraphExecutorPy", "JitExecutorPy")


class _Samples(networks.Samples):
    def __init__(self, network: str, total: int) -> None:
        super().__init__(network, _DIFFERENT)
        self._total = total

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return super().__getitem__(number % _DIFFERENT)


class Training:
    """Steps of a network, with `shards`; None: each worker computes its part of the batch."""

    def __init__(self, model: str, shards: int | None, batch: int, steps: int) -> None:
        ms.set_seed(1)
        net = networks.NETWORKS[model]()
        net.set_train()
        optimizer = KungFuMomentum(net.trainable_params(), 0.01, 0.9)
        loss = networks.Loss()

        def forward(x: Any, labels: Any) -> Any:
            return loss(net(x), labels)

        source = ds.GeneratorDataset(_Samples(model, batch * steps), ["x", "label"], shuffle=False)
        self._data = ElasticDataset(source, global_batch_size=batch, shuffle=False, shards=shards)
        self.elastic = ElasticTraining(net, optimizer, dataset=self._data)
        # Without shards, each worker has its own moving statistics.
        self._same = net.trainable_params() if shards is None else self.elastic.parameters
        self.train: Any
        if shards is None:
            self.train = nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)
            self.train.set_train()
        else:
            gradients = ms.value_and_grad(forward, None, net.trainable_params())
            self.train = ShardedStep(gradients, optimizer, trained=net)
        self.steps = self._steps()

    def _steps(self) -> Iterator[None]:
        """Yield after each step of the loop. A step lasts from the request for data to the end of its agreement."""
        for _ in self.elastic.epochs(1):
            for x, labels in self._data:
                self.train(x, labels).asnumpy()
                self.elastic.step_end()
                yield

    def digest(self) -> str:
        """Return a digest of the parameters that are equal on all workers."""
        return digest([p.asnumpy() for p in self._same])


def _peak_mib() -> float:
    """Return the peak memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def _disagreement(rows: Sequence[dict[str, Any]]) -> str | None:
    digests = sorted({row["digest"] for row in rows})
    return None if len(digests) == 1 else f"the parameters differ between workers: {digests}"


def _turn(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "turn").read_text())
    return -1


def time_steps(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Time steps in turns. A turn begins when FOLDER/turn contains its number.

    FOLDER/times.jsonl gets the slowest rank's time of each step. The first turn warms up, and so do the first steps of
    each turn, because their data was prepared between the turns.
    """
    turns, samples = plan["turns"], plan["samples"]
    training = Training(plan["model"], plan["shards"], plan["batch"], (turns + 1) * (_AHEAD + samples))
    first = runtime.current_rank() == 0
    for turn in range(turns + 1):
        while first and _turn(folder) < turn:  # the other ranks wait for rank 0 in the barrier
            time.sleep(_POLL_S)
        seconds = []
        for _ in range(_AHEAD + samples):
            comm.barrier()
            begin = time.perf_counter()
            next(training.steps)
            seconds.append(time.perf_counter() - begin)
        slowest = comm.all_reduce(np.array(seconds[_AHEAD:]), "max", "bench/seconds")
        if first:
            with open(folder / "times.jsonl", "a") as file:
                file.write(json.dumps(slowest.tolist()) + "\n")
    rows = gather_json({"digest": training.digest(), "peak_mib": _peak_mib()}, "bench/rows").values()
    return {"wrong": _disagreement(list(rows)), "peak_mib": max(row["peak_mib"] for row in rows)}


def straggle(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Time LeNet's steps. Each rank sleeps for its `sleep_s` whenever it computes a shard.

    The first `adapt` steps don't count.
    """
    adapt, counted = plan["adapt"], plan["steps"]
    training = Training("lenet", plan["shards"], 2 * plan["shards"], adapt + counted)
    compute, sleep_s = training.train.cell, plan["sleep_s"][runtime.current_rank()]

    def slowed(*columns: Any) -> Any:
        time.sleep(sleep_s)
        return compute(*columns)

    training.train.cell = slowed
    begin, spent, computed, dealt = 0.0, 0.0, 0, 0
    for number in range(adapt + counted):
        if number == adapt:
            begin = time.perf_counter()
        next(training.steps)
        seconds, dealt = _core.shard_pace()  # of this step, without waits for others
        if number >= adapt:
            spent, computed = spent + seconds, computed + dealt
    took = time.perf_counter() - begin
    mine = {
        "step_s": took / counted, "shard_s": spent / computed if computed else None, "dealt": dealt,
        "digest": training.digest(),
    }  # fmt: skip
    rows = list(gather_json(mine, "bench/rows").values())
    return {"rows": rows, "wrong": _disagreement(rows)}


class Compilations:
    """Count the graphs that this process has compiled since the creation of this object.

    It counts the calls from MindSpore's Python code to its compiler, for cells and for functions.
    """

    def __init__(self) -> None:
        self.count = 0
        for name in _EXECUTORS:
            executor = getattr(native, name, None)
            if executor is not None and hasattr(executor, "compile"):
                executor.compile = self._counted(executor.compile)

    def _counted(self, compile_graph: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return compile_graph(*arguments, **options)

        return counted


class _Watch(Callback):
    """Runs after the elastic callback. A step begins at the end of the previous step."""

    def __init__(self, recorder: Recorder, compilations: Compilations) -> None:
        super().__init__()
        self._recorder, self._compilations = recorder, compilations
        self._last = 0.0
        self._size = 0

    def on_train_begin(self, run_context: Any) -> None:
        self._last = time.monotonic()
        self._tell(run_context)

    def on_train_step_end(self, run_context: Any) -> None:
        now = time.monotonic()
        number = run_context.original_args().cur_step_num
        if not runtime.detached():
            self._recorder.step(number, self._last, self._last, now)
            if self._size != runtime.current_cluster_size():
                self._tell(run_context)
        self._last = now

    def on_train_epoch_end(self, run_context: Any) -> None:
        if not runtime.detached():
            self._tell(run_context)

    def _tell(self, run_context: Any) -> None:
        self._size = runtime.current_cluster_size()
        self._recorder.tell("member", run_context.original_args().cur_step_num, compiled=self._compilations.count)


def model_train(folder: Path, plan: dict[str, Any]) -> None:
    """Train LeNet as in examples/lenet-elastic."""
    compilations = Compilations()
    ms.set_seed(1)
    net = networks.lenet()
    model = Model(net, networks.Loss(), KungFuMomentum(net.trainable_params(), 0.01, 0.9))
    source = ds.GeneratorDataset(networks.Samples("lenet", plan["total"]), ["x", "label"], shuffle=False)
    data = ElasticDataset(
        source, global_batch_size=plan["batch"], shards=plan["shards"], seed=1, ledger=folder / "ledger"
    )
    recorder = Recorder(folder)
    watch = _Watch(recorder, compilations)
    callbacks = [KungFuElasticCallback(plan["schedule"], wait=True), watch]
    model.train(plan["epochs"], data, callbacks=callbacks, dataset_sink_mode=False)
    if not runtime.detached():
        weights = [p.asnumpy() for p in net.trainable_params()]
        recorder.tell("end", -1, compiled=compilations.count, digest=digest(weights))


def main(folder: str, text: str) -> None:
    plan = json.loads(text)
    ms.set_context(mode=ms.GRAPH_MODE)
    if plan["do"] == "model_train":
        model_train(Path(folder), plan)
        return
    runtime.init()
    result = {"time_steps": time_steps, "straggle": straggle}[plan["do"]](Path(folder), plan)
    if runtime.current_rank() == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
