"""Convert the files of a run to the numbers of its row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.churn import samples
from benchmarks.churn.worker import read_steps

Rows = Mapping[int, Sequence[tuple[float, int]]]
"""By process: when it committed a step, and the samples in its weights behind it."""


@dataclass(frozen=True)
class Timeline:
    """The committed steps whose updates the final weights contain, ordered by time."""

    times: tuple[float, ...]
    positions: tuple[int, ...]

    def at(self, when: float) -> int:
        """Return how many of the samples in the final weights had been used by time `when`."""
        number = int(np.searchsorted(self.times, when, side="right"))
        return self.positions[number - 1] if number else 0

    def begun_after(self, when: float) -> float | None:
        """Return the commit time of the first step that began after `when` and goes beyond all earlier steps.

        This is the second step committed after `when`: the first one might have been almost complete at that time.
        """
        reached, steps = self.at(when), 0
        for time, position in zip(self.times, self.positions):
            if time > when and position > reached:
                reached, steps = position, steps + 1
                if steps == 2:
                    return time
        return None


def timeline(rows: Rows) -> Timeline:
    """Return the timeline without the steps that were undone later, e.g. because a system resumed from a checkpoint.

    A step is undone if any process later commits a step that contains fewer samples.

    >>> timeline({1: [(0.0, 8), (1.0, 16), (2.0, 24)], 2: [(3.0, 16), (4.0, 24)]})
    Timeline(times=(0.0, 1.0, 3.0, 4.0), positions=(8, 16, 16, 24))
    """
    every = sorted(row for each in rows.values() for row in each)
    kept: list[tuple[float, int]] = []
    least = None
    for time, position in reversed(every):
        if least is None or position <= least:
            kept.append((time, position))
            least = position
    kept.reverse()
    return Timeline(tuple(time for time, _ in kept), tuple(position for _, position in kept))


def recoveries(found: Timeline, kills: Sequence[float], end: float) -> list[float]:
    """Return the seconds from each kill to the end of the next step that began after it, or to the end of the run.

    The step must go beyond all steps before the kill, and must not be undone later. So a system that resumes from a
    checkpoint must first catch up.
    """
    spent = []
    for kill in kills:
        step = found.begun_after(kill)
        spent.append((end if step is None else min(step, end)) - kill)
    return spent


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of the values that is at least as large as a fraction `share` of them.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([], 0.5)
    (2.0, None)
    """
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


@dataclass(frozen=True)
class Observed:
    """The driver's observations of a run, in seconds of CLOCK_MONOTONIC."""

    begin: float
    """Time when all workers had warmed up."""
    end: float
    """Time when the workers were asked to stop. Nothing is killed afterwards."""
    kills: tuple[float, ...]
    finished: bool
    """Whether the job completed without being killed."""
    memory: tuple[int, ...]
    """Total memory of the job's processes in bytes, sampled periodically."""
    uncollected_s: float = 0.0
    """Processor time that usage.json doesn't contain."""
    seen_s: float = 0.0
    """Sampled processor time of all living processes, which is less than they used."""


def final(folder: Path) -> dict[str, Any]:
    """Return the results from the final weights: samples, accuracy, and whether all workers' weights are equal."""
    ends = {int(path.stem): json.loads(path.read_text()) for path in (folder / "ends").glob("*.json")}
    if not ends:
        return {"wrong": "no worker came to its end"}
    process, end = min(ends.items())
    found = {
        "equal_weights": len({each["digest"] for each in ends.values()}) == 1,
        "ended": len(ends),
        "accuracy": round(statistics.median(each["accuracy"] for each in ends.values()), 4),
    }
    try:
        trained = samples.read(np.load(folder / "tallies" / f"{process}.npy"), end["epochs"])
    except ValueError as error:
        return {**found, "wrong": str(error)}
    return {**found, "epochs": round(end["epochs"], 3), "lost": trained.lost, "twice": trained.twice,
            "trained": trained.useful, "wrong": ""}  # fmt: skip


def phases(folder: Path, since: float) -> str:
    """Return the median seconds of each start phase, over the workers whose first step was after time `since`."""
    first = {pid: rows[0][0] for pid, rows in read_steps(folder) if rows}
    found: dict[str, list[float]] = {}
    for path in (folder / "phases").glob("*.json"):
        if first.get(int(path.stem), 0.0) >= since:
            for name, seconds in json.loads(path.read_text()).items():
                found.setdefault(name, []).append(seconds)
    return ", ".join(f"{name} {statistics.median(each):.2f}" for name, each in found.items())


def numbers(folder: Path, observed: Observed) -> dict[str, Any]:
    """Return a run's numbers. Times are in seconds, memory in MiB, `rate` in useful samples per second."""
    found = timeline(dict(read_steps(folder)))
    last = final(folder)
    # A sample that was used twice counts once: the share of useful samples in the final weights is applied to the
    # window.
    in_all = found.positions[-1] if found.positions else 0
    share = last["trained"] / in_all if last.get("trained") and in_all else 1.0
    seconds = observed.end - observed.begin
    useful = (found.at(observed.end) - found.at(observed.begin)) * share
    spent = recoveries(found, observed.kills, observed.end)
    usage = folder / "usage.json"
    cpu = (
        max(json.loads(usage.read_text())["cpu_s"] + observed.uncollected_s, observed.seen_s)
        if usage.exists()
        else None
    )
    per_sample = None if cpu is None or not in_all else cpu / (in_all * share) * 1e3
    median, most = percentile(spent, 0.5), percentile(spent, 0.99)
    return {
        "seconds": round(seconds, 2),
        "kills": len(observed.kills),
        "useful": round(useful),
        "rate": round(useful / seconds, 3),
        "next_step_p50_s": None if median is None else round(median, 4),
        "next_step_p99_s": None if most is None else round(most, 4),
        "cpu_ms_per_sample": None if per_sample is None else round(per_sample, 3),
        "memory_mib": round(statistics.median(observed.memory) / 2**20) if observed.memory else None,
        "start": phases(folder, observed.begin),
        "hung": not observed.finished,
        **{name: last.get(name) for name in ("lost", "twice", "equal_weights", "ended", "epochs", "accuracy")},
        "wrong": last["wrong"],
    }
