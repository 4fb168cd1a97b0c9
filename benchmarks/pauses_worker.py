"""The program of `resize --pauses`: synthetic steps, or LeNet's, until a file requests the end.

Each worker writes a row of numbers after each step and a line after each change. So a killed worker loses at most its
last record.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_kungfu import comm, membership, runtime
from ms_kungfu.agreement import broadcast_json
from ms_kungfu.dataset import sharding
from ms_kungfu.dataset.ledger import Ledger
from ms_kungfu.elastic import state_transfer
from ms_kungfu.trained import claims

ROW = struct.Struct("=qddd")
"""A step's number, its begin, the end of its gradients' reduction, and its end, in seconds of CLOCK_MONOTONIC."""


class Recorder:
    """The records of this worker in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = open(folder / f"{os.getpid()}.steps", "ab", buffering=0)  # noqa: SIM115

    def step(self, number: int, begin: float, reduced: float, end: float) -> None:
        self._steps.write(ROW.pack(number, begin, reduced, end))

    def tell(self, event: str, step: int, **more: Any) -> None:
        """Append a line to events.jsonl: "member" at the start and after each change, and how the worker ended."""
        line = {
            "event": event,
            "pid": os.getpid(),
            "time": time.monotonic(),
            "version": runtime.cluster_version(),
            "rank": runtime.current_rank(),
            "size": runtime.current_cluster_size(),
            "step": step,
            **more,
        }
        with open(self._folder / "events.jsonl", "ab", buffering=0) as file:
            file.write(b"\n%s\n" % json.dumps(line).encode())  # a kill may have cut off the last line

    def stop_asked(self) -> bool:
        return (self._folder / "stop").exists()


def digest(arrays: list[Any]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


class Synthetic:
    """Steps that sleep, then reduce as many gradients as LeNet has. Tests derive programs with other numbers."""

    SAMPLES, BATCH = 4096, 32  # per epoch; per step of all workers together

    def __init__(self, folder: Path, step_s: float) -> None:
        self.recorder = Recorder(folder)
        self._step_s = step_s
        self.walk = sharding.EpochCursor(self.SAMPLES)
        self._ledger = Ledger(folder / "ledger", 0)
        self._dealt_for = -1
        self._members: tuple[int, ...] = ()
        self.step, self.stop = 0, False
        self.weights: list[NDArray[Any]] = [np.zeros(61706, np.float32)]

    def run(self) -> None:
        if membership.is_deferred():
            self.at("parked")
        membership.join()
        if membership.is_detached():
            return self.recorder.tell("left", self.step)
        if membership.is_joining():
            self._share()
        self.recorder.tell("member", self.step)
        while self.goes_on():
            size = self.begins()
            begin = time.monotonic()
            self.train()
            reduced = time.monotonic()
            change = membership.step(size)
            if change.detached:
                return self.recorder.tell("left", self.step, asked=reduced)
            if change.changed:
                self._share()
            self.recorder.step(self.step, begin, reduced, time.monotonic())
            if change.changed:
                self.recorder.tell("member", self.step)
            self.at("end")
        return self.recorder.tell("end", self.step, digest=digest(self.weights), **self.ended())

    def at(self, place: str) -> None:
        """Record that the worker has reached a place at which a test may act on it."""

    def goes_on(self) -> bool:
        if not self.walk.left:
            self.end_epoch()
        return not self.stop

    def begins(self) -> int | None:
        """Begin a step. Return the new cluster size, or None if it doesn't change."""
        self.at("begin")
        return None

    def train(self) -> None:
        walk, version = self.walk, runtime.cluster_version()
        if version != self._dealt_for:
            self._dealt_for, self._members = version, tuple(range(runtime.current_cluster_size()))
        taken = walk.take(self.BATCH, self._members)
        assert taken is not None
        rank = runtime.current_rank()
        share = taken.share(rank)
        samples, batch = sharding.count(share), sharding.count(taken.batch)
        own = share or sharding.part(taken.batch, batch - 1, batch)
        time.sleep(self._step_s)
        gradients, stop = self.gradients(own), self.recorder.stop_asked()
        for gradient in gradients:
            gradient[-1] = stop
        membership.set_weight(samples)
        self.at("computed")
        self.reduce(gradients)
        self.at("reduced")
        participants = membership.take_participants()
        self.stop |= bool(gradients[0][-1].any())
        self.update(gradients)
        epoch, common = walk.epoch, {**self._common(), "participants": [r for r in self._members if r in participants]}
        for step in walk.commit(participants):
            self._ledger.step(epoch, step, rank, own, common)
        self._members = tuple(common["participants"])
        self.step += 1
        self.at("recorded")

    def gradients(self, own: Iterable[sharding.Range]) -> list[NDArray[np.float32]]:
        """Return the gradients of the worker's samples in one or several groups. The last number is overwritten."""
        return [np.resize(np.sin(sharding.positions(own), dtype=np.float64).astype(np.float32), self.weights[0].size)]

    def reduce(self, gradients: list[NDArray[np.float32]]) -> None:
        """Replace the gradients by their mean over the workers, weighted by samples."""
        comm.all_reduce(gradients[0], "mean", "gradient", gradients[0])

    def update(self, gradients: list[NDArray[np.float32]]) -> None:
        for weights, gradient in zip(self.weights, gradients):
            weights += gradient

    def end_epoch(self) -> None:
        self._ledger.end(self.walk, runtime.current_rank(), self._common())
        self.walk.end_epoch()

    def ended(self) -> dict[str, Any]:
        """Return a worker's further records at its end."""
        return {}

    def _common(self) -> dict[str, Any]:
        return {
            "version": runtime.cluster_version(),
            "size": runtime.current_cluster_size(),
            "global_batch": self.BATCH,
            "drop_remainder": False,
            "total": self.SAMPLES,
            "seed": 0,
            "shuffle": True,
        }

    def _share(self) -> None:
        joiner = membership.is_joining()
        content = None if joiner else lambda: claims.content_of(b"".join(each.tobytes() for each in self.weights))

        def receive(root: int) -> Any:
            received = broadcast_json(lambda: {"step": self.step, "stop": self.stop, "walk": self.walk.state()}, root)
            with state_transfer.from_the_nearest(root, content):
                for number, weights in enumerate(self.weights):
                    self.receive(weights, root, f"weights/{number}")
            return received

        self.at("sharing")
        received = state_transfer.from_lowest_rank(receive, able=not joiner)
        if joiner:
            self.step, self.stop = received["step"], received["stop"]
            self.walk.restore(received["walk"])
            membership.state_received()
        self.at("shared")

    def receive(self, weights: NDArray[Any], root: int, name: str) -> None:
        """Give every worker the weights of `root`; collective."""
        comm.broadcast(weights, root, name, weights)


class _Samples:
    """Images and their classes: more than any job uses."""

    def __init__(self) -> None:
        self.images = np.random.default_rng(1).standard_normal((64, 1, 28, 28)).astype(np.float32)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return self.images[number % 64], np.int32(number % 10)


def _lenet(folder: Path) -> None:
    import mindspore as ms
    import mindspore.dataset as ds

    from benchmarks.contenders import _training
    from ms_kungfu.dataset import ElasticDataset
    from ms_kungfu.elastic import ElasticTraining

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    samples = _Samples()
    step = _training.training_step("KungFuMomentum")
    data = ElasticDataset(
        ds.GeneratorDataset(samples, ["image", "label"], shuffle=False),
        batch_size=8, shuffle=False, drop_remainder=True, ledger=folder / "ledger",
    )  # fmt: skip
    recorder = Recorder(folder)

    def prepare() -> None:
        step.compile(ms.Tensor(samples.images[:8]), ms.Tensor(np.zeros(8, np.int32)))

    elastic = ElasticTraining(step.network, step.optimizer, dataset=data, prepare=prepare)
    for _ in elastic.epochs(1):
        recorder.tell("member", elastic.step)
        for image, label in data:
            if recorder.stop_asked():
                elastic.request_stop()
            begin = time.monotonic()
            step(image, label).asnumpy()
            reduced = time.monotonic()
            change = elastic.step_end()
            if change.detached:
                return
            recorder.step(elastic.step, begin, reduced, time.monotonic())
            if change.changed:
                recorder.tell("member", elastic.step)
    if not runtime.detached():
        recorder.tell("end", elastic.step, digest=digest([p.asnumpy() for p in elastic.parameters]))


def read_steps(folder: Path) -> Iterator[tuple[int, list[tuple[int, float, float, float]]]]:
    """Return each process's rows. An incomplete last row is left out."""
    for path in folder.glob("*.steps"):
        content = path.read_bytes()
        whole = content[: len(content) // ROW.size * ROW.size]
        yield int(path.stem), list(ROW.iter_unpack(whole))


def main(program: str, folder: str, step_s: str) -> None:
    runtime.init()
    if program == "lenet":
        _lenet(Path(folder))
    else:
        Synthetic(Path(folder), float(step_s)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
