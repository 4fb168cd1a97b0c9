"""`resize --pauses`: how long training pauses when a worker is killed, and when the cluster grows or shrinks.

A *pause* is how much longer the step that a change falls into takes than the run's median step, at the survivor where
it takes longest. The program is :mod:`.pauses_worker`, under kungfu-run with ``-recover replace``; when the launcher
knows of a death its log says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, TypeVar

import numpy as np

from ms_kungfu import env
from ms_kungfu._processes import end_launcher
from ms_kungfu.bench import report
from ms_kungfu.bench.group import GroupError
from ms_kungfu.bench.pauses_worker import read_steps
from ms_kungfu.cluster_store import open_store
from ms_kungfu.dataset import audit
from ms_kungfu.launcher.commands import write_size

KINDS = ("kill", "grow", "grow-standby", "shrink")
PROGRAMS = ("synthetic", "lenet")
_WARM_UP_STEPS = 20
_LIMIT_S = 60.0  # for anything that is waited for
# What is measured, and how it is called in the table.
_PARTS = {
    "whole": "pause",  # the longest of all steps from the moment until the first change that follows
    "redo": "the step of the moment",
    "adoption": "the step of the change",  # the first change of the cluster that follows
    "joining": "the step of the next change",  # the second, e.g. when the replacement joins
    "heard": "until the launcher tells of it",  # from the kill; the survivors can see it by then
    "woken": "until the gradients are there",  # from there until the step's gradients were reduced
}
Row = tuple[int, float, float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """What is done, how often, and to what."""

    kind: str
    program: str
    count: int
    seed: int
    step_ms: float
    timeout: float  # seconds, for all of it


@dataclass(frozen=True)
class Moment:
    """Something that was done to the job: when, and the processes that go on."""

    time: float
    survivors: tuple[int, ...]


@dataclass(frozen=True)
class Pauses:
    """What came of it, in seconds: of each part a number for each moment."""

    median_step: float
    parts: dict[str, list[float]]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Values that occurred: the smallest that half of them, or 99 per cent, don't exceed, and the greatest.

    >>> summary([1.0, 2.0, 3.0, 4.0])
    {'p50': 2.0, 'p99': 4.0, 'max': 4.0}
    """
    numbers = np.percentile(values, (50, 99, 100), method="inverted_cdf")
    return dict(zip(("p50", "p99", "max"), numbers.tolist()))


def analyse(
    moments: Sequence[Moment],
    steps: Mapping[int, Sequence[Row]],
    changes: Mapping[int, Sequence[float]],
    told: Sequence[float] = (),
) -> Pauses:
    """What the moments cost.

    Args:
        steps: by process, its rows: step, begin, end of the reduction, end; in seconds of the same clock.
        changes: by process, when it had adopted each of its cluster versions.
        told: when the launcher told of each death, in their order.
    """
    normal = statistics.median_high([end - begin for rows in steps.values() for _, begin, _, end in rows])
    result = Pauses(normal, {name: [] for name in _PARTS})
    for number, moment in enumerate(moments):
        costs: dict[str, list[float]] = {"whole": [], "redo": [], "adoption": [], "joining": []}
        reduced_at: list[float] = []
        for pid in moment.survivors:
            later = [t for t in changes.get(pid, ()) if t > moment.time][:2]
            if not later:
                continue
            spent = [(b, r, e, e - b - normal) for _, b, r, e in steps.get(pid, ()) if e >= moment.time]
            costs["whole"] += [cost for begin, _, _, cost in spent if begin <= later[0]]
            costs["redo"] += [cost for _, _, _, cost in spent[:1]]
            reduced_at += [r for b, r, e, _ in spent if r >= moment.time][:1]
            for name, when in zip(("adoption", "joining"), later):
                costs[name] += [cost for begin, _, end, cost in spent if begin <= when and end <= when + 1e-3][-1:]
        for name, values in costs.items():
            if values:
                result.parts[name].append(max(0.0, max(values)))
        if number < len(told) and reduced_at:
            result.parts["heard"].append(told[number] - moment.time)
            result.parts["woken"].append(max(reduced_at) - told[number])
    return result


class _Job:
    """A job of the worker program and what it has left so far."""

    def __init__(self, folder: Path, trial: Trial, size: int, standbys: int) -> None:
        self.folder = folder
        self._deadline = time.monotonic() + trial.timeout
        self._clock_began = time.time() - time.monotonic()
        flags = ["-q", "-logfile", str(folder / "log"), "-timeout", f"{trial.timeout:.0f}s", "-w", "-np", str(size)]
        flags += ["-recover", "replace", "-max-restarts", "1000000", "-standby", str(standbys)]
        worker = ["-m", "ms_kungfu.bench.pauses_worker", trial.program, str(folder), str(trial.step_ms / 1e3)]
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ms_kungfu.launcher", *flags, sys.executable, *worker],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        text = ""
        with contextlib.suppress(OSError):
            text = (self.folder / "members.jsonl").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half written

    def _await(self, look: Callable[[], T | None], what: str) -> T:
        """What `look` finds. GroupError, which says `what` it waits for in vain, where the job ends or takes long."""
        limit = min(self._deadline, time.monotonic() + _LIMIT_S)
        while time.monotonic() < limit and self.process.poll() is None:
            found = look()
            if found is not None:
                return found
            time.sleep(0.005)
        raise self.error(what)

    def whole(self, size: int, after: int = -1) -> tuple[int, list[int]]:
        """The newest version that has all of its `size` members, later than `after`, and their processes by rank."""

        def look() -> tuple[int, list[int]] | None:
            versions: dict[int, dict[int, int]] = {}
            for line in self.lines():
                if line["size"] == size and line["version"] > after:
                    versions.setdefault(line["version"], {})[line["rank"]] = line["pid"]
            newest = max(versions, default=after)
            by_rank = versions.get(newest, {})
            return (newest, [by_rank[rank] for rank in range(size)]) if len(by_rank) == size else None

        return self._await(look, f"no whole cluster of {size} workers")

    def await_steps(self, pids: Sequence[int], count: int) -> None:
        """Until each of these processes has done as many steps: its first ones compile, and touch memory anew."""

        def look() -> bool | None:
            done = dict(read_steps(self.folder))
            return all(len(done.get(pid, ())) >= count for pid in pids) or None

        self._await(look, f"a worker has not done {count} steps")

    def told(self) -> list[float]:
        """When the launcher told of each death, which it does as soon as the survivors can see it."""
        log = (self.folder / "log").read_text()
        times = re.findall(r"^(.{23}) WARNING worker .* was killed by SIGKILL", log, re.MULTILINE)
        return [datetime.strptime(each, "%Y-%m-%d %H:%M:%S,%f").timestamp() - self._clock_began for each in times]

    def resized(self, size: int, version: int) -> tuple[int, list[int]]:
        """Has `size` written to the cluster store, and waits for the cluster after `version` that follows."""
        # What the launcher has told its workers.
        environ = Path(f"/proc/{self.lines()[-1]['pid']}/environ").read_text().split("\0")
        told = dict(entry.partition("=")[::2] for entry in environ)
        write_size(open_store(told[env.CONFIG_SERVER.name], told[env.JOB_SECRET.name]), size)
        return self.whole(size, version)

    def finish(self) -> None:
        (self.folder / "stop").touch()
        try:
            code = self.process.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self.error("it did not finish") from None
        if code != 0:
            raise self.error(f"kungfu-run exited with {code}")

    def error(self, text: str) -> GroupError:
        said = (self.folder / "output").read_text(errors="replace")[-3000:]
        return GroupError(f"resize: {text}:\n{said}")


@contextlib.contextmanager
def _job(trial: Trial, size: int, standbys: int) -> Iterator[_Job]:
    with tempfile.TemporaryDirectory(prefix="kungfu-bench-") as folder:
        job = _Job(Path(folder), trial, size, standbys)
        try:
            yield job
        finally:
            end_launcher(job.process)


def _wrong(job: _Job) -> str | None:
    """What is not as it has to be at the end: the survivors' parameters, and the ledger."""
    digests = {line["digest"] for line in job.lines() if "digest" in line}
    if len(digests) != 1:
        return f"the parameters differ at the end: {sorted(digests) or 'nobody told them'}"
    found = audit.audit(*audit.read(job.folder / "ledger"))
    return None if found.exact else audit.to_text(found).splitlines()[-1]


def measure(trial: Trial) -> tuple[Pauses, str | None]:
    """Does it `count` times in one job, and what is wrong then. GroupError where the job doesn't go on."""
    rng = random.Random(trial.seed)
    standbys = {"kill": 1, "grow-standby": 2}.get(trial.kind, 0)
    first, other = (2, 4) if trial.kind.startswith("grow") else (4, 2)
    moments: list[Moment] = []
    with _job(trial, first, standbys) as job:
        version, pids = job.whole(first)
        job.await_steps(pids, _WARM_UP_STEPS)
        for _ in range(trial.count):
            time.sleep(rng.uniform(0.3, 0.5))
            if trial.kind == "grow-standby":
                time.sleep(4.0)  # until new standbys are ready: not what is measured
            before, begin = pids, time.monotonic()
            if trial.kind == "kill":
                os.kill(rng.choice(pids), signal.SIGKILL)
                version, pids = job.whole(first, version)
            else:
                version, pids = job.resized(other, version)
            moments.append(Moment(begin, tuple(pid for pid in before if pid in pids)))
            if trial.kind != "kill":
                version, pids = job.resized(first, version)
        time.sleep(0.2)
        job.finish()
        changes: dict[int, list[float]] = {}
        for line in job.lines():
            changes.setdefault(line["pid"], []).append(line["time"])
        told = job.told() if trial.kind == "kill" else ()
        return analyse(moments, dict(read_steps(job.folder)), changes, told), _wrong(job)


def run(options: argparse.Namespace, out: report.Report) -> None:
    """The options are the command line's."""
    for program in options.program:
        for kind in options.pauses:
            trial = Trial(kind, program, options.count, options.seed, options.step_ms, options.timeout)
            load = os.getloadavg()[0]
            pauses, wrong = measure(trial)
            print(to_text(trial, load, pauses, wrong), flush=True)
            out.records.append(record(trial, load, pauses, wrong))


def to_text(trial: Trial, load: float, pauses: Pauses, wrong: str | None) -> str:
    lines = [
        f"{trial.kind}, {trial.program}, seed {trial.seed}, {len(pauses.parts['whole'])} times, "
        f"median step {pauses.median_step * 1e3:.1f} ms, load {load:.1f}" + (f"  WRONG: {wrong}" if wrong else "")
    ]
    for name, values in pauses.parts.items():
        if values:
            ms = {key: f"{value * 1e3:7.1f} ms" for key, value in summary(values).items()}
            lines.append(f"  {_PARTS[name]:30} median {ms['p50']}   p99 {ms['p99']}   max {ms['max']}")
    return "\n".join(lines)


def record(trial: Trial, load: float, pauses: Pauses, wrong: str | None) -> report.Record:
    measured = len(pauses.parts["whole"])
    if measured != trial.count:
        wrong = wrong or f"{measured} of {trial.count} pauses could be measured"
    return {
        "bench": "pauses",
        "contender": f"{trial.kind} {trial.program}",
        "count": trial.count,
        "seed": trial.seed,
        "load": round(load, 2),
        "median_step_ms": round(1e3 * pauses.median_step, 3),
        **{
            f"{name}_{key}_ms": round(1e3 * value, 3)
            for name, values in pauses.parts.items()
            if values
            for key, value in summary(values).items()
        },
        **report.verdict(wrong),
    }
