"""`step`: compare a training step with KungFuMomentum to one with nn.Momentum in the same processes.

On one rank the difference is the package's cost for a program that isn't distributed. On several ranks, nn.Momentum
reduces nothing: its time is the computation alone while all ranks compute, and the difference is the communication.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from benchmarks import report, rounds
from benchmarks.contenders.base import Contender
from benchmarks.contenders.training import KungFuTraining, MindSporeTraining
from benchmarks.group import Group, running

_STEPS = 20
_TOLERANCE = 1e-3  # between sums of weights, because MindSpore's threads add in any order


def run(options: argparse.Namespace, ranks: int, out: report.Report) -> None:
    """Run the benchmark with the command line's options. "mindspore" in `vs` adds MindSpore's data parallelism."""
    runs = [("KungFuMomentum", "kungfu", "KungFuMomentum"), ("nn.Momentum", "kungfu", "nn.Momentum")]
    kinds: dict[str, type[Contender]] = {"kungfu": KungFuTraining}
    if "mindspore" in options.vs and ranks > 1:
        kinds["mindspore"] = MindSporeTraining
        runs.append(("mindspore", "mindspore", "nn.Momentum"))
    with running(kinds, ranks, options.timeout) as groups:
        for network in options.networks:
            _run(network, options, ranks, groups, [(*each, kinds[each[1]]) for each in runs], out)


def _run(
    network: str,
    options: argparse.Namespace,
    ranks: int,
    groups: Mapping[str, Group],
    runs: Sequence[tuple[str, str, str, type[Contender]]],
    out: report.Report,
) -> None:
    about = {"model": network, "mode": options.mode, "batch": options.batch}
    task = {"network": network, "mode": options.mode, "batch": options.batch, "samples": options.samples or _STEPS}
    entries = [
        rounds.Entry(
            label,
            groups[group],
            {"optimizer": optimizer, **task},
            {**about, "transport": "none" if label == "nn.Momentum" else kind.transport},
        )
        for label, group, optimizer, kind in runs
    ]
    done = rounds.run(entries, options.rounds)
    _verify(done, ranks)
    images = f"{options.batch} samples a rank"
    title = f"step of {network}, {options.mode} mode, {images}, {ranks} rank{'s' if ranks > 1 else ''}"
    out.add(title, report.records("step", done, next(e for e in done if e.label == "nn.Momentum")))


def _verify(entries: Sequence[rounds.Entry], ranks: int) -> None:
    """Check that all entries that train on the same data have the same weights."""
    together = [e for e in entries if ranks == 1 or e.label != "nn.Momentum"]
    sums = [(e, rank, float(a["checksum"])) for e in together for rank, a in enumerate(e.answers)]
    expected = sums[0][2]
    for entry, rank, got in sums:
        if abs(got - expected) > _TOLERANCE * abs(expected) and entry.wrong is None:
            entry.wrong = (
                f"rank {rank}: its weights sum up to {got:.6g}, those of {together[0].label} to {expected:.6g}"
            )
