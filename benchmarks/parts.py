"""`parts`: measure the share of a training step that each part of ms_kungfu takes, from the workers' traces.

The program (`parts_worker`) trains by ``Model.train`` with KungFuMomentum, KungFuElasticCallback, an ElasticDataset and
a ledger. A part's share is the time of its spans in the steps after the warm-up, divided by the time of these steps,
as the mean over the workers:

- reduction: the gradients' collectives and the copies in and out, without waiting;
- agreement: the collectives by which the workers agree on a step's end, without waiting;
- callback: the hooks of KungFuElasticCallback without the agreement and the ledger;
- ledger: writing the step's line;
- data: the next batch from MindSpore's pipeline and ElasticDataset; most of this time is spent in the pipeline,
  as in a program without ms_kungfu;
- waiting: for other ranks, in all collectives;
- MindSpore: the rest.

"ours" is the sum of the first four. The second table shows the seconds from the start of the command to the end of the
first step, and the median step. It compares them with one process that runs nn.Momentum without ms_kungfu or a trace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.group import GroupError
from ms_kungfu._words import counted
from ms_kungfu.launcher.state.timeline import TraceEvent
from ms_kungfu.launcher.trace_command import events_in

WARM_UP = 5  # steps: the first compiles, and the launcher starts its watches during the next ones
OURS = ("reduction", "agreement", "callback", "ledger")
_COLUMNS = ("MindSpore", *OURS, "data", "waiting")


def shares(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Return the parts' shares of one worker's steps after the first `WARM_UP`.

    Raises:
        ValueError: the trace has too few steps, or lacks events.
    """
    every = sorted(events, key=lambda event: event.ts)
    if any(event.name == "kungfu_end" and (event.args["lost"] or "reason" in event.args) for event in every):
        raise ValueError("the trace lacks events")
    steps = [event for event in every if event.cat == "step"][WARM_UP:]
    if not steps:
        raise ValueError(f"the trace has no step after the first {WARM_UP}")
    begin, end = steps[0].ts, steps[-1].ts + steps[-1].dur
    spent = dict.fromkeys(_COLUMNS, 0.0)
    for event in every:
        if not begin <= event.ts < end:
            continue
        if event.cat == "operation":
            own = event.name.partition(" ")[2].startswith("kungfu/")
            waiting = min(event.args["waiting_us"], event.dur)
            spent["agreement" if own else "reduction"] += event.dur - waiting
            spent["waiting"] += waiting
            if own:
                spent["callback"] -= event.dur
        elif event.name == "elastic callback":
            spent["callback"] += event.dur
        elif event.name == "ledger":
            spent["ledger"] += event.dur
            spent["callback"] -= event.dur
        elif event.name == "wait for MindSpore":
            spent["callback"] -= event.dur
        elif event.name == "data":
            spent["data"] += event.dur
    total = sum(step.dur for step in steps)
    spent["MindSpore"] = total - sum(spent.values())
    return {name: us / total for name, us in spent.items()}


def run(options: argparse.Namespace, ranks: int, out: report.Report) -> None:
    """Run the benchmark with the options from the command line."""
    if options.samples is not None and options.samples <= WARM_UP:
        raise ValueError(f"--samples {options.samples}: the first {WARM_UP} steps don't count; give more")
    for network in options.networks:
        turns: list[dict[str, float]] = []
        starts: list[tuple[dict[str, float], dict[str, float]]] = []
        for _ in range(options.rounds):
            plain, _ = _measure(options, network, ranks, plain=True)
            first, parts = _measure(options, network, ranks, plain=False)
            starts.append((plain, first))
            turns.append({name: float(np.mean([part[name] for part in parts])) for name in parts[0]})
        _tell(network, ranks, options, turns, starts, out)


def _tell(
    network: str,
    ranks: int,
    options: argparse.Namespace,
    turns: Sequence[dict[str, float]],
    starts: Sequence[tuple[dict[str, float], dict[str, float]]],
    out: report.Report,
) -> None:
    median = {name: float(np.median([turn[name] for turn in turns])) for name in turns[0]}
    ours = [sum(turn[name] for name in OURS) for turn in turns]
    title = f"{network}, {options.mode} mode, {options.batch} samples a rank, {counted(ranks, 'rank')}"
    told = {}
    for name in ("first_step_s", "step_s"):
        told[name] = [float(np.median([each[side][name] for each in starts])) for side in (0, 1)]
    (plain_first, first), (plain_step, step) = told["first_step_s"], told["step_s"]
    print(f"{title}, {counted(options.rounds, 'round')}: step {step * 1e3:.1f} ms")
    print("  " + ", ".join(f"{name} {median[name]:.2%}" for name in _COLUMNS))
    print(f"  ours: {np.median(ours):.2%} (" + ", ".join(f"{each:.2%}" for each in ours) + ")")
    print(f"  until the first step ended: {first:.2f} s; nn.Momentum alone, one process: {plain_first:.2f} s")
    print(f"  median step: {step * 1e3:.1f} ms; nn.Momentum alone, one process: {plain_step * 1e3:.1f} ms", flush=True)
    out.records.append({
        "bench": "parts", "model": network, "mode": options.mode, "batch": options.batch, "ranks": ranks,
        "rounds": options.rounds, **median, "step_s": step, "ours": float(np.median(ours)), "ours_by_round": ours,
        "first_step_s": first, "plain_first_step_s": plain_first, "plain_step_s": plain_step, **report.verdict(None),
    })  # fmt: skip


def _measure(
    options: argparse.Namespace, network: str, ranks: int, *, plain: bool
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the last rank's times, and each rank's shares (none if `plain`)."""
    with tempfile.TemporaryDirectory(prefix="kungfu-bench-") as folder:
        plan = {
            "network": network, "mode": options.mode, "batch": options.batch, "ranks": ranks, "plain": plain,
            "steps": options.samples or 40, "folder": folder, "began_s": time.monotonic(),
        }  # fmt: skip
        program = [sys.executable, "-m", "benchmarks.parts_worker", json.dumps(plan)]
        launcher = [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-timeout", f"{options.timeout}s"]
        try:
            done = subprocess.run(
                program if plain else [*launcher, "-np", str(ranks), *program],
                env={**os.environ, **({} if plain else {"KUNGFU_TRACE": folder})}, timeout=options.timeout + 30,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise GroupError(f"parts: the program hasn't ended within {options.timeout} s (--timeout)") from None
        if done.returncode != 0:
            raise GroupError(f"parts: the program exited with {done.returncode}:\n{done.stdout[-3000:].rstrip()}")
        firsts = [json.loads(path.read_text()) for path in Path(folder).glob("first-*.json")]
        parts = [shares(events_in(path)) for path in sorted(Path(folder).glob("trace-*.json"))]
    if len(firsts) != (1 if plain else ranks) or len(parts) != (0 if plain else ranks):
        raise GroupError(f"parts: {len(firsts)} of {ranks} ranks ended, and {len(parts)} wrote a trace")
    return {name: max(each[name] for each in firsts) for name in firsts[0]}, parts
