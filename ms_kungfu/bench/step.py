"""`step`: a training step of LeNet with KungFuMomentum, beside the same with nn.Momentum in the same processes.

On one rank the difference is what the package costs a program that isn't distributed. On several, nn.Momentum reduces
nothing: its time is that of the computation alone while all ranks compute, and the difference is the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ms_kungfu.bench import report, rounds
from ms_kungfu.bench.contenders.training import KungFuTraining, MindSporeTraining
from ms_kungfu.bench.group import Group

_STEPS = 20
_TOLERANCE = 1e-3  # between sums of weights; MindSpore's threads add up in any order


def run(
    ranks: int,
    mode: str,
    batch: int,
    steps: int | None,
    turns: int,
    peers: Sequence[str],
    timeout_s: float,
    out: report.Report,
) -> None:
    """`peers` may hold "mindspore": its data parallelism over its own collectives."""
    with ExitStack() as stack:
        ours = stack.enter_context(Group("kungfu", KungFuTraining, ranks, timeout_s))
        runs = [("KungFuMomentum", ours, "KungFuMomentum"), ("nn.Momentum", ours, "nn.Momentum")]
        if "mindspore" in peers and ranks > 1:
            theirs = stack.enter_context(Group("mindspore", MindSporeTraining, ranks, timeout_s))
            runs.append(("mindspore", theirs, "nn.Momentum"))
        for group in {id(group): group for _, group, _ in runs}.values():
            group.wait_ready()
        about = {"model": "lenet", "mode": mode, "batch": batch}
        entries = [
            rounds.Entry(
                label,
                group,
                {"optimizer": optimizer, "mode": mode, "batch": batch, "samples": steps or _STEPS},
                {**about, "transport": "none" if label == "nn.Momentum" else group.contender.transport},
            )
            for label, group, optimizer in runs
        ]
        done = rounds.run(entries, turns)
        _verify(done, ranks)
    images = f"{batch} images a rank"
    title = f"step of lenet, {mode} mode, {images}, {ranks} rank{'s' if ranks > 1 else ''}"
    out.add(title, report.records("step", done, next(e for e in done if e.label == "nn.Momentum")))


def _verify(entries: Sequence[rounds.Entry], ranks: int) -> None:
    """Everyone who trains on the same data must have the same weights by now."""
    together = [e for e in entries if ranks == 1 or e.label != "nn.Momentum"]
    sums = [(e, rank, float(a["checksum"])) for e in together for rank, a in enumerate(e.answers)]
    expected = sums[0][2]
    for entry, rank, got in sums:
        if abs(got - expected) > _TOLERANCE * abs(expected) and entry.wrong is None:
            entry.wrong = (
                f"rank {rank}: its weights sum up to {got:.6g}, those of {together[0].label} to {expected:.6g}"
            )
