"""`resize --pauses`: how long training pauses when a worker is killed, and when the cluster grows or shrinks.

A *pause* is how much longer the step that a change falls into takes than the run's median step, at the survivor where
it takes longest. The program is :mod:`.pauses_worker`, under kungfu-run with ``-recover replace``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ms_kungfu import env
from ms_kungfu._processes import end_launcher
from ms_kungfu.bench import machine, report
from ms_kungfu.bench.group import GroupError
from ms_kungfu.bench.pauses_worker import read_steps

KINDS = ("kill", "grow", "grow-standby", "shrink")
PROGRAMS = ("synthetic", "lenet")
_WARM_UP_STEPS = 20
Row = tuple[int, float, float, float]


@dataclass(frozen=True)
class Moment:
    """Something that was done to the job: when, and the processes that go on."""

    time: float
    survivors: tuple[int, ...]


@dataclass
class Pauses:
    """What came of it, in seconds; one number for each moment."""

    median_step: float
    whole: list[float] = field(default_factory=list)
    """The longest of all steps from the moment until the first change that follows."""
    redo: list[float] = field(default_factory=list)
    """The step in which it was done."""
    adoption: list[float] = field(default_factory=list)
    """The step with the first change of the cluster that follows."""
    joining: list[float] = field(default_factory=list)
    """The step with the second, e.g. when the replacement joins."""
    heard: list[float] = field(default_factory=list)
    """From the kill to the launcher's hearing of it."""
    marked: list[float] = field(default_factory=list)
    """From there until the survivors could see it."""
    woken: list[float] = field(default_factory=list)
    """From there until the step's gradients were reduced."""


def median(values: Sequence[float]) -> float:
    """
    >>> median([3.0, 1.0, 2.0])
    2.0
    """
    return sorted(values)[len(values) // 2]


def percentile(values: Sequence[float], per_cent: float) -> float:
    """The smallest value that `per_cent` of the values don't exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 99)
    (2.0, 4.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * per_cent) // 100) - 1))]


def analyse(
    moments: Sequence[Moment],
    steps: Mapping[int, Sequence[Row]],
    changes: Mapping[int, Sequence[float]],
    told: Sequence[tuple[float, float]] = (),
) -> Pauses:
    """What the moments cost.

    Args:
        steps: by process, its rows: step, begin, end of the reduction, end; in seconds of the same clock.
        changes: by process, when it had adopted each of its cluster versions.
        told: when the launcher heard of a death, and when it had marked it, in the order of the deaths.
    """
    result = Pauses(median([end - begin for rows in steps.values() for _, begin, _, end in rows]))
    normal = result.median_step
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
                getattr(result, name).append(max(0.0, max(values)))
        if number < len(told) and reduced_at:
            heard, marked = told[number]
            result.heard.append(heard - moment.time)
            result.marked.append(marked - heard)
            result.woken.append(max(reduced_at) - marked)
    return result


class _Run:
    """A job of the worker program and what it has left so far."""

    def __init__(
        self, folder: Path, program: str, size: int, standbys: int, step_ms: float, timeout_s: float, watch_s: float
    ) -> None:
        self.folder = folder
        self._deadline = time.monotonic() + timeout_s
        self._limit_s = watch_s
        flags = ["-q", "-timeout", f"{timeout_s:.0f}s", "-w", "-np", str(size), "-recover", "replace"]
        flags += ["-max-restarts", "1000000", "-standby", str(standbys)]
        worker = [sys.executable, "-m", "ms_kungfu.bench.pauses_worker", program, str(folder), str(step_ms / 1e3)]
        self._output = open(folder / "output", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ms_kungfu.bench.timed_launcher", str(folder / "told"), *flags, *worker],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        text = ""
        with contextlib.suppress(OSError):
            text = (self.folder / "members.jsonl").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half written

    def whole(self, size: int, after: int = -1) -> tuple[int, list[int]]:
        """The newest version that has all of its `size` members, later than `after`, and their processes by rank."""
        limit = min(self._deadline, time.monotonic() + self._limit_s)
        while time.monotonic() < limit and self._process.poll() is None:
            versions: dict[int, dict[int, int]] = {}
            for line in self.lines():
                if line["size"] == size and line["version"] > after:
                    versions.setdefault(line["version"], {})[line["rank"]] = line["pid"]
            if versions and len(versions[max(versions)]) == size:
                version = max(versions)
                return version, [versions[version][rank] for rank in range(size)]
            time.sleep(0.005)
        raise self.error(f"no whole cluster of {size} workers")

    def await_steps(self, pids: Sequence[int], count: int) -> None:
        """Until each of these processes has done as many steps: its first ones compile, and touch memory anew."""
        limit = min(self._deadline, time.monotonic() + self._limit_s)
        while time.monotonic() < limit and self._process.poll() is None:
            done = dict(read_steps(self.folder))
            if all(len(done.get(pid, ())) >= count for pid in pids):
                return
            time.sleep(0.05)
        raise self.error(f"a worker has not done {count} steps")

    def told(self) -> list[tuple[float, float]]:
        with contextlib.suppress(OSError):
            lines = map(json.loads, (self.folder / "told").read_text().splitlines())
            return [(line["heard"], line["marked"]) for line in lines]
        return []

    def resize(self, size: int) -> None:
        """What ``kungfu-run resize`` does, but for the start of a process, which takes cores from what is measured."""
        from ms_kungfu.cluster_store import open_store
        from ms_kungfu.launcher.commands import write_size

        write_size(open_store(self._environ(env.CONFIG_SERVER.name), self._environ(env.JOB_SECRET.name)), size)

    def _environ(self, name: str) -> str:
        """What the launcher has told its workers."""
        pid = self.lines()[-1]["pid"]
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key == name.encode():
                return value.decode()
        raise self.error(f"the workers have no {name}")

    def finish(self) -> None:
        (self.folder / "stop").touch()
        try:
            code = self._process.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self.error("it did not finish") from None
        if code != 0:
            raise self.error(f"kungfu-run exited with {code}")

    def error(self, text: str) -> GroupError:
        self._output.flush()
        said = (self.folder / "output").read_text(errors="replace")[-3000:]
        return GroupError(f"resize: {text}:\n{said}")

    def close(self) -> None:
        end_launcher(self._process)
        self._output.close()


@contextlib.contextmanager
def _job(program: str, size: int, standbys: int, step_ms: float, timeout_s: float) -> Iterator[_Run]:
    with tempfile.TemporaryDirectory(prefix="kungfu-bench-") as folder:
        job = _Run(Path(folder), program, size, standbys, step_ms, timeout_s, 60.0)
        try:
            yield job
        finally:
            job.close()


def _wrong(job: _Run) -> str | None:
    """What is not as it has to be at the end: the survivors' parameters, and the ledger."""
    from ms_kungfu.dataset import audit

    digests = {line["digest"] for line in job.lines() if "digest" in line}
    if len(digests) != 1:
        return f"the parameters differ at the end: {sorted(digests) or 'nobody told them'}"
    found = audit.audit(*audit.read(job.folder / "ledger"))
    return None if found.exact else audit.to_text(found).splitlines()[-1]


def measure(
    kind: str, count: int, program: str, seed: int, step_ms: float, timeout_s: float
) -> tuple[Pauses, str | None]:
    """Does it `count` times in one job. GroupError where the job doesn't go on."""
    rng = random.Random(seed)
    grown, standbys = 4, {"kill": 1, "grow-standby": 2}.get(kind, 0)
    first = 2 if kind.startswith("grow") else 4
    moments: list[Moment] = []
    with _job(program, first, standbys, step_ms, timeout_s) as job:
        version, pids = job.whole(first)
        job.await_steps(pids, _WARM_UP_STEPS)
        for _ in range(count):
            time.sleep(rng.uniform(0.3, 0.5))
            if kind == "kill":
                victim = rng.choice(pids)
                moments.append(Moment(time.monotonic(), tuple(pid for pid in pids if pid != victim)))
                os.kill(victim, signal.SIGKILL)
                version, pids = job.whole(grown, version)
                continue
            for size in (4, 2) if first == 2 else (2, 4):
                if standbys and size == 4:
                    time.sleep(4.0)  # until new standbys are ready: not what is measured
                wanted = size == (4 if first == 2 else 2)
                before, asked = pids, time.monotonic()
                job.resize(size)
                version, pids = job.whole(size, version)
                if wanted:
                    moments.append(Moment(asked, tuple(pid for pid in before if pid in pids)))
        time.sleep(0.2)
        job.finish()
        changes: dict[int, list[float]] = {}
        for line in job.lines():
            changes.setdefault(line["pid"], []).append(line["time"])
        return analyse(moments, dict(read_steps(job.folder)), changes, job.told() if kind == "kill" else ()), _wrong(
            job
        )


def run(
    kinds: Sequence[str],
    programs: Sequence[str],
    count: int,
    seed: int,
    step_ms: float,
    timeout_s: float,
    out: report.Report,
) -> None:
    for program in programs:
        for kind in kinds:
            load = os.getloadavg()[0]
            pauses, wrong = measure(kind, count, program, seed, step_ms, timeout_s)
            print(to_text(kind, program, seed, load, pauses, wrong), flush=True)
            out.records.append(record(kind, program, count, seed, load, pauses, wrong))


_PARTS = {
    "whole": "pause",
    "redo": "the step of the moment",
    "adoption": "the step of the change",
    "joining": "the step of the next change",
    "heard": "until the launcher hears",
    "marked": "until it is marked",
    "woken": "until the gradients are there",
}


def to_text(kind: str, program: str, seed: int, load: float, pauses: Pauses, wrong: str | None) -> str:
    lines = [
        f"{kind}, {program}, seed {seed}, {len(pauses.whole)} times, median step {pauses.median_step * 1e3:.1f} ms, "
        f"load {load:.1f}" + (f"  WRONG: {wrong}" if wrong else "")
    ]
    for name, what in _PARTS.items():
        values = getattr(pauses, name)
        if values:
            p50, p99 = percentile(values, 50), percentile(values, 99)
            numbers = f"median {p50 * 1e3:7.1f} ms   p99 {p99 * 1e3:7.1f} ms   max {max(values) * 1e3:7.1f} ms"
            lines.append(f"  {what:29} {numbers}")
    return "\n".join(lines)


def record(
    kind: str, program: str, count: int, seed: int, load: float, pauses: Pauses, wrong: str | None
) -> report.Record:
    wrong = wrong or (
        None if len(pauses.whole) == count else f"{len(pauses.whole)} of {count} pauses could be measured"
    )
    numbers = {
        f"{name}_{key}_ms": round(1e3 * value, 3)
        for name in _PARTS
        if (values := getattr(pauses, name))
        for key, value in (("p50", percentile(values, 50)), ("p99", percentile(values, 99)), ("max", max(values)))
    }
    return {
        "bench": "pauses",
        "contender": f"{kind} {program}",
        "count": count,
        "seed": seed,
        "load": round(load, 2),
        "median_step_ms": round(1e3 * pauses.median_step, 3),
        **numbers,
        "verified": wrong is None,
        "wrong": wrong,
        **machine.facts(),
    }
