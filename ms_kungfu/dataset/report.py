"""The outcome of a ledger audit, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ms_kungfu._words import counted

_SHOWN = 20  # the text lists at most this number of samples or problems, and counts the rest


@dataclass
class Epoch:
    """The ledger's facts about an epoch. Sample numbers refer to the source, not to the epoch's permutation."""

    data: int
    epoch: int
    steps: int
    total: int
    finished: bool
    trained: int
    """Number of samples used at least once."""
    missing: list[int] = field(default_factory=list)
    """Samples that weren't used in a finished epoch."""
    repeated: dict[int, list[int]] = field(default_factory=dict)
    """Maps each sample that was used more than once to the steps that used it."""
    dropped: list[int] = field(default_factory=list)
    """Samples left out because of `drop_remainder`."""
    compared: int = 0
    """Number of samples whose recorded content is the same on all workers."""
    given_back: int = 0
    """Number of samples that failed workers had received and that were then assigned to other workers."""

    @property
    def exact(self) -> bool:
        return not (self.missing or self.repeated)


@dataclass
class Report:
    """The outcome of an audit."""

    workers: int
    jobs: int
    epochs: list[Epoch]
    problems: list[str]
    """Contradictions, damage and gaps in the records."""
    notes: list[str]
    """Unusual facts that aren't problems."""

    @property
    def exact(self) -> bool:
        return bool(self.epochs) and not self.problems and all(epoch.exact for epoch in self.epochs)

    @property
    def proves(self) -> str:
        """Return the properties of the samples that the audit proves: "numbers", or "numbers and contents"."""
        return "numbers and contents" if all(epoch.compared for epoch in self.epochs) else "numbers"


def name_of_data(data: int) -> str:
    return f"dataset {data}, " if data else ""


def name_of(data: int, epoch: int, step: int | None = None) -> str:
    return f"{name_of_data(data)}epoch {epoch}" + ("" if step is None else f", step {step}")


def _some(items: Sequence[Any]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(str(item) for item in items[:_SHOWN]) + more


def to_text(report: Report) -> str:
    """Return the report as text; its last line is the outcome."""
    lines = [f"ledger of {counted(report.workers, 'worker')} in {counted(report.jobs, 'job')}"]
    for epoch in report.epochs:
        steps, total = counted(epoch.steps, "step"), epoch.total
        if not epoch.finished:
            text = f"{steps} so far, {epoch.trained} of {counted(total, 'sample')}"
            text += ", each once" if not epoch.repeated else ""
        elif epoch.exact and not epoch.dropped:
            text = f"{steps}, each of {counted(total, 'sample')} once"
        else:
            text = f"{steps}, {epoch.trained} of {counted(total, 'sample')}"
        if epoch.dropped:
            text += f", {len(epoch.dropped)} dropped by drop_remainder"
        if epoch.given_back:
            text += f"; {epoch.given_back} of them assigned again after a failure"
        lines.append(f"{name_of(epoch.data, epoch.epoch)}: {text}")
        if epoch.missing:
            lines.append(f"  not trained: {counted(len(epoch.missing), 'sample')}: {_some(epoch.missing)}")
        if epoch.repeated:
            items = [f"{sample} (steps {', '.join(map(str, steps))})" for sample, steps in epoch.repeated.items()]
            lines.append(f"  trained more than once: {counted(len(items), 'sample')}: {_some(items)}")
    for epoch in {epoch.data: epoch for epoch in report.epochs}.values():
        if epoch.compared:
            of = f"{epoch.compared} of {counted(epoch.total, 'sample')}"
            lines.append(f"{name_of_data(epoch.data)}contents: {of} compared, the same on all workers")
    for kind, texts in (("note", report.notes), ("problem", report.problems)):
        lines += [f"{kind}: {text}" for text in texts[:_SHOWN]]
        if len(texts) > _SHOWN:
            lines.append(f"{kind}: and {len(texts) - _SHOWN} more")
    finished = sum(epoch.finished for epoch in report.epochs)
    if not report.epochs:
        lines.append("NOT exact: no step is on record")
    elif report.exact:
        of = f"{counted(finished, 'finished epoch')} ({report.proves})"
        lines.append(f"exact: each sample was trained once in each of {of}")
    else:
        wrong = sum(not epoch.exact for epoch in report.epochs)
        lines.append(
            f"NOT exact: {counted(wrong, 'epoch')} with samples left out or repeated, "
            f"{counted(len(report.problems), 'problem')} in the records"
        )
    return "\n".join(lines)
