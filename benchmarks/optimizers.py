"""`optimizers`: compare the throughput of all workers with S-SGD, SMA and pair averaging.

The reference is nn.Momentum with the same number of workers, without synchronisation. Each round runs each optimizer
in turn in the same processes. The steps are real training steps: a worker waits for others only if its optimizer does.
This benchmark measures only the throughput; examples/optimizers compares the accuracy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from benchmarks import report
from benchmarks.contenders.averaging import OPTIMIZERS, Averaging
from benchmarks.group import running
from benchmarks.rounds import Entry

_STEPS = 30


def run(options: argparse.Namespace, ranks: int, out: report.Report) -> None:
    """Run the benchmark with the options from the command line."""
    for network in options.networks:
        with running({"kungfu": Averaging}, ranks, options.timeout) as groups:
            task = {"network": network, "batch": options.batch, "samples": options.samples or _STEPS}
            about = {"model": network, "mode": "graph", "batch": options.batch}
            entries = [
                Entry(label, groups["kungfu"], {"optimizer": label, **task}, dict(about)) for label in OPTIMIZERS
            ]
            for turn in range(options.rounds + 1):
                for entry in entries:
                    answers = entry.group.measure(entry.task)
                    entry.wrong = entry.wrong or next((a["wrong"] for a in answers if a["wrong"]), None)
                    if turn > 0:  # the first turn compiles
                        entry.rounds.append([_together([float(a["samples"][0]) for a in answers])])
        for entry in entries:
            seconds = median(each for (each,) in entry.rounds)
            entry.about["samples_per_s"] = round(ranks * options.batch / seconds, 1)
        workers = f"{ranks} worker{'s' if ranks > 1 else ''}"
        title = f"training {network}, batches of {options.batch}, {workers}"
        records = report.records("optimizers", entries, entries[0])
        out.add(title, records)
        for record in records:
            print(f"  {record['contender']}: {record['samples_per_s']:g} samples/s of all workers", flush=True)


def _together(seconds: Sequence[float]) -> float:
    """Return the common step time that would give the same number of workers the same total throughput."""
    return len(seconds) / sum(1 / each for each in seconds)
