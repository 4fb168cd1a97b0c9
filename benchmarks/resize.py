"""`resize`: measure a change of the cluster under kungfu-run, from the call to the end of the next step.

The program is :mod:`.resize_worker`. A joining worker is a new process, so growing includes the start of Python and
the import of NumPy. The other workers broadcast the state to the joining worker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.group import GroupError

_PHASES = ("resize_s", "sync_s", "step_s")


def run(options: argparse.Namespace, out: report.Report) -> None:
    """Run the benchmark with the options from the command line."""
    schedule, turns, state_bytes = options.schedule, options.rounds, options.state
    if len(schedule) < 2 or any(a == b for a, b in zip(schedule, schedule[1:])):
        raise GroupError("resize: the schedule needs two sizes or more, each unlike the one before")
    # End each turn at the first size, because the next turn begins there.
    circle = [*schedule[1:], *([schedule[0]] if schedule[-1] != schedule[0] else [])]
    with tempfile.TemporaryDirectory(prefix="kungfu-bench-") as folder:
        results = Path(folder) / "results.jsonl"
        plan = json.dumps(
            {"sizes": circle * turns, "bytes": state_bytes, "step_s": options.step_ms / 1e3, "out": str(results)}
        )
        launcher = [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-timeout", f"{options.timeout}s", "-w"]
        done = subprocess.run(
            [*launcher, "-np", str(schedule[0]), sys.executable, "-m", "benchmarks.resize_worker", plan],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise GroupError(f"resize: kungfu-run exited with {done.returncode}:\n{done.stdout[-3000:].rstrip()}")
        changes = [json.loads(line) for line in results.read_text().splitlines()]
    if len(changes) != len(circle) * turns:
        raise GroupError(f"resize: {len(changes)} changes instead of {len(circle) * turns}")
    alike: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for change in changes:
        alike.setdefault((change["from"], change["to"]), []).append(change)
    title = f"resize, from the call to the end of the next step, {report.size_text(state_bytes)} of state"
    out.add(title, [_record(*pair, own, turns, state_bytes) for pair, own in alike.items()])


def _record(old: int, new: int, changes: Sequence[dict[str, Any]], turns: int, nbytes: int) -> report.Record:
    return {
        "bench": "resize",
        "contender": f"{old} -> {new}",
        "ranks": new,
        "transport": "shm",
        "dtype": "float32",
        "bytes": nbytes,
        "rounds": turns,
        **report.times([sum(c[phase] for phase in _PHASES) for c in changes]),
        **{f"{phase[:-2]}_p50_us": report.times([c[phase] for c in changes])["p50_us"] for phase in _PHASES},
        "algorithm_gb_s": None,
        "ratio": None,
        "ratio_to": None,
        "idle_ranks_cpu": 0.0,
        **report.verdict(next((c["wrong"] for c in changes if c["wrong"]), None)),
    }
