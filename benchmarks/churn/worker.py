"""The benchmark's part of each training program: it records a worker's start and its committed steps.

A worker writes its own files, each record with one call, so a killed worker loses at most its last record.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.churn.workloads import WORKLOADS

ROW = struct.Struct("=dq")
"""A committed step: its end in seconds of CLOCK_MONOTONIC, and the samples that the weights contain behind it."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training program. The program's argument is the name of a JSON file with them."""

    folder: str
    workload: str
    workers: int
    checkpoint_every: int
    """Number of steps between two checkpoints, for systems that use checkpoints."""
    python: str
    """The interpreter of the other systems."""
    hosts: tuple[str, ...] = ()
    """The addresses of the hosts; empty if the job uses only this machine."""
    switches: tuple[str, ...] = ()
    """The parts of ms_kungfu that are switched off: see `cost`."""
    elastic: bool = False
    """Whether the number of workers will change."""
    shards: int | None = None
    """ms_kungfu's shards per step, or None to train without shards."""

    def write(self) -> str:
        path = Path(self.folder) / "plan.json"
        path.write_text(json.dumps(asdict(self)))
        return str(path)


def read_plan(path: str) -> Plan:
    found = json.loads(Path(path).read_text())
    return Plan(**{**found, "hosts": tuple(found["hosts"]), "switches": tuple(found["switches"])})


class Worker:
    """The records of this process in the plan's folder."""

    def __init__(self, plan: Plan, spare: bool = False) -> None:
        """`spare`: whether this process counts as a worker only from its first step on."""
        self.plan, self.workload = plan, WORKLOADS[plan.workload]
        self._folder = Path(plan.folder)
        self._name = f"{os.getpid()}"
        self._steps = open(self._path("steps", ".rows"), "ab", buffering=0)  # noqa: SIM115
        self._phases: dict[str, float] = {}
        self._last = _process_began()
        self.phase("imports")
        if not spare:
            self._announce()

    def _path(self, kind: str, suffix: str) -> Path:
        (self._folder / kind).mkdir(exist_ok=True)
        return self._folder / kind / (self._name + suffix)

    def _announce(self) -> None:
        self._path("workers", "").touch()

    def samples(self) -> dict[str, NDArray[Any]]:
        with np.load(self._folder / "samples.npz") as file:
            return dict(file)

    def stop_asked(self) -> bool:
        return (self._folder / "stop").exists()

    def phase(self, name: str) -> None:
        """Record the end of a phase of the worker's start. The phase began when the previous phase ended."""
        now = time.monotonic()
        if name not in self._phases:
            self._phases[name], self._last = now - self._last, now

    def committed(self, tally: NDArray[Any]) -> None:
        """Record a committed step, from the tally after this step."""
        if "first step" not in self._phases:
            self.phase("first step")
            self._path("phases", ".json").write_text(json.dumps(self._phases))
        self._steps.write(ROW.pack(time.monotonic(), int(np.rint(tally[: self.workload.total].sum()))))

    def end(self, tally: NDArray[Any], weights: Iterable[NDArray[Any]], epochs: float, accuracy: float) -> None:
        """Record the final weights. `epochs`: the number of epochs that the program reports."""
        digest = hashlib.sha256()
        for each in [tally, *weights]:
            digest.update(np.ascontiguousarray(each).tobytes())
        np.save(self._path("tallies", ".npy"), tally[: self.workload.total])
        found = {"digest": digest.hexdigest()[:16], "epochs": epochs, "accuracy": accuracy}
        path = self._path("ends", ".new")
        path.write_text(json.dumps(found))
        path.rename(path.with_suffix(".json"))


def _process_began() -> float:
    """Return the start time of this process, in seconds of CLOCK_MONOTONIC."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def accuracy(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    return float((scores.argmax(1) == labels).mean())


def read_steps(folder: Path) -> Iterator[tuple[int, list[tuple[float, int]]]]:
    """Return each process's rows, without an incomplete last row."""
    for path in (folder / "steps").glob("*.rows"):
        content = path.read_bytes()
        yield int(path.stem), list(ROW.iter_unpack(content[: len(content) // ROW.size * ROW.size]))
