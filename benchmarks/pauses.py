"""`resize --pauses`: measure how long training pauses when a worker is killed, and when the cluster grows or shrinks.

A *pause* is how much longer the step with a change takes than the run's median step, on the surviving worker with the
longest pause. The program is :mod:`.pauses_worker`, under kungfu-run with ``-recover replace``. kungfu-run's log shows
when the launcher notices a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import report
from benchmarks.job import Job, running_job
from benchmarks.pauses_worker import read_steps
from ms_kungfu.dataset import audit

KINDS = ("kill", "grow", "grow-standby", "shrink")
PROGRAMS = ("synthetic", "lenet")
_WARM_UP_STEPS = 20
# The parts of a pause, and their names in the table.
_PARTS = {
    "whole": "pause",  # the longest step from the action until the next change of the cluster
    "redo": "the step of the moment",
    "adoption": "the step of the change",  # the first change of the cluster after the action
    "joining": "the step of the next change",  # the second change, e.g. when the replacement joins
    "heard": "until the launcher logs it",  # from the kill; the survivors can notice the failure by then
    "woken": "until the gradients are there",  # from the log line until the step's gradients are reduced
}
Row = tuple[int, float, float, float]


@dataclass(frozen=True)
class Trial:
    """The kind of action, how often it is done, and the job."""

    kind: str
    program: str
    count: int
    seed: int
    step_ms: float
    timeout: float  # seconds, for the whole job


@dataclass(frozen=True)
class Moment:
    """An action on the job: its time, and the processes that continue."""

    time: float
    survivors: tuple[int, ...]


@dataclass(frozen=True)
class Pauses:
    """The results in seconds. Each part of the pause has a number for each moment."""

    median_step: float
    parts: dict[str, list[float]]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return three of the values: the median, the 99th percentile and the maximum.

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
    """Return the parts of the pause after each moment.

    Args:
        steps: the rows of each process: step, begin, end of the reduction, end; in seconds of the same clock.
        changes: the times at which each process adopted its cluster versions.
        told: the time at which the launcher logged each failure, in order.
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


def _job(trial: Trial, size: int, standbys: int) -> contextlib.AbstractContextManager[Job]:
    flags = ["-recover", "replace", "-max-restarts", "1000000", "-standby", str(standbys)]
    worker = ["benchmarks.pauses_worker", trial.program, "{folder}", str(trial.step_ms / 1e3)]
    return running_job("resize", size, worker, flags, trial.timeout)


def _wrong(job: Job) -> str | None:
    """Return the problem in the survivors' parameters or in the ledger at the end of the job, if any."""
    digests = {line["digest"] for line in job.lines() if "digest" in line}
    if len(digests) != 1:
        return f"the parameters differ at the end: {sorted(digests) or 'nobody told them'}"
    found = audit.audit(*audit.read(job.folder / "ledger"))
    return None if found.exact else audit.to_text(found).splitlines()[-1]


def measure(trial: Trial) -> tuple[Pauses, str | None]:
    """Do the action `count` times in one job. Return the pauses, and the problem if any.

    Raise GroupError if the job stops.
    """
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
                time.sleep(4.0)  # until new standbys are ready; their start isn't measured
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
        told = job.heard() if trial.kind == "kill" else ()
        return analyse(moments, dict(read_steps(job.folder)), changes, told), _wrong(job)


def run(options: argparse.Namespace, out: report.Report) -> None:
    """Run the benchmark with the options from the command line."""
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
