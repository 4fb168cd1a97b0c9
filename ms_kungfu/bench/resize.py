"""`resize`: how long a change of the cluster takes under kungfu-run, from the call to the end of the next step.

The program is :mod:`.resize_worker`. A joiner is a new process, so growing includes the start of a Python and the
import of NumPy; the state that it receives is broadcast by the veterans.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ms_kungfu.bench import machine, report
from ms_kungfu.bench.group import GroupError

_PHASES = ("resize_s", "sync_s", "step_s")


def run(
    schedule: Sequence[int], turns: int, state_bytes: int, step_ms: float, timeout_s: float, out: report.Report
) -> None:
    if len(schedule) < 2 or any(a == b for a, b in zip(schedule, schedule[1:])):
        raise GroupError("resize: the schedule needs two sizes or more, each unlike the one before")
    # Back to the first size where a further turn begins.
    circle = [*schedule[1:], *([schedule[0]] if schedule[-1] != schedule[0] else [])]
    with tempfile.TemporaryDirectory(prefix="kungfu-bench-") as folder:
        results = Path(folder) / "results.jsonl"
        plan = json.dumps({"sizes": circle * turns, "bytes": state_bytes, "step_s": step_ms / 1e3, "out": str(results)})
        launcher = [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-timeout", f"{timeout_s:.0f}s", "-w"]
        done = subprocess.run(
            [*launcher, "-np", str(schedule[0]), sys.executable, "-m", "ms_kungfu.bench.resize_worker", plan],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise GroupError(f"resize: kungfu-run exited with {done.returncode}:\n{done.stdout[-3000:].rstrip()}")
        changes = [json.loads(line) for line in results.read_text().splitlines()]
    if len(changes) != len(circle) * turns:
        raise GroupError(f"resize: {len(changes)} changes instead of {len(circle) * turns}")
    title = f"resize, from the call to the end of the next step, {report.size_text(state_bytes)} of state"
    out.add(title, [_record(pair, changes, turns, state_bytes) for pair in dict.fromkeys(map(_pair, changes))])


def _pair(change: dict[str, float]) -> tuple[int, int]:
    return int(change["from"]), int(change["to"])


def _record(pair: tuple[int, int], changes: Sequence[dict[str, float]], turns: int, nbytes: int) -> report.Record:
    own = [c for c in changes if _pair(c) == pair]
    wrong = next((c["wrong"] for c in own if c["wrong"]), None)
    return {
        "bench": "resize",
        "contender": f"{pair[0]} -> {pair[1]}",
        "ranks": pair[1],
        "transport": "shm",
        "dtype": "float32",
        "bytes": nbytes,
        "rounds": turns,
        **report.times([sum(c[phase] for phase in _PHASES) for c in own]),
        **{f"{phase[:-2]}_p50_us": report.times([c[phase] for c in own])["p50_us"] for phase in _PHASES},
        "algorithm_gb_s": None,
        "ratio": None,
        "ratio_to": None,
        "idle_ranks_cpu": 0.0,
        "verified": wrong is None,
        "wrong": wrong,
        **machine.facts(),
    }
