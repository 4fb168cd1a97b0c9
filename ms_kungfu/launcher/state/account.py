"""Add up a job's events, in bounded memory, for the summary that is logged when the job ends.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

from ms_kungfu import job_events as e
from ms_kungfu._words import counted

MOST_LINES = 12
_FAILURES_SHOWN = 3
_SIZES_SHOWN = 6


@dataclass
class _Failure:
    event: e.WorkerFailed
    seen: e.FailureSeen | None = None  # what the surviving workers reported about the failure


@dataclass
class JobAccount:
    """The totals of one job's events, or of the events since a controller took over the job."""

    began: e.Event | None = None  # the JobStarted or LeaderChanged event
    ended: e.JobEnded | None = None
    last: float = 0.0
    steps: int = 0  # the number of the last step; a job that resumes from a checkpoint doesn't begin with step 1
    committed: int = 0  # how many steps these events report
    samples: int = 0
    committed_s: float = 0.0
    measured_s: float = 0.0  # the wall time that the statistics cover
    loss: float | str | None = None
    sizes: list[tuple[float, int]] = field(default_factory=list)  # (start time, number of workers), one per size
    failures: int = 0
    stalls: int = 0
    stalled_s: float = 0.0
    longest_stall: e.StallEnded | None = None
    slowest: e.Resized | None = None

    def __post_init__(self) -> None:
        self.failed: collections.deque[_Failure] = collections.deque(maxlen=_FAILURES_SHOWN)

    def add(self, event: e.Event) -> None:
        self.last = event.time or self.last
        if isinstance(event, e.JobStarted):
            self.began = event
            self._has_size(event.workers)
        elif isinstance(event, e.LeaderChanged):
            self.began = self.began or event
        elif isinstance(event, e.JobEnded):
            self.ended = event
        elif isinstance(event, e.Statistics):
            self._count(event)
        elif isinstance(event, e.VersionCommitted):
            self._has_size(event.workers)
        elif isinstance(event, e.Resized):
            if self.slowest is None or event.seconds > self.slowest.seconds:
                self.slowest = event
        elif isinstance(event, e.WorkerFailed) and event.standing != "standby":  # a standby's failure costs no step
            self.failures += 1
            self.failed.append(_Failure(event))
        elif isinstance(event, e.FailureSeen):
            newest = next((each for each in reversed(self.failed) if each.event.rank == event.rank), None)
            if newest is not None:  # earlier failures of this rank concern other workers
                newest.seen = newest.seen or event
        elif isinstance(event, e.StallEnded):
            self.stalls += 1
            self.stalled_s += event.seconds
            if self.longest_stall is None or event.seconds > self.longest_stall.seconds:
                self.longest_stall = event

    def _count(self, event: e.Statistics) -> None:
        self.steps = event.step or self.steps
        self.committed += event.steps
        self.samples += event.samples
        self.committed_s += event.committed or 0.0
        self.measured_s += event.seconds
        self.loss = self.loss if event.loss is None else event.loss

    def _has_size(self, workers: int) -> None:
        if not self.sizes or self.sizes[-1][1] != workers:
            self.sizes.append((self.last, workers))

    @property
    def seconds(self) -> float:
        """Return the wall time so far, in seconds."""
        began = self.last if self.began is None or self.began.time is None else self.began.time
        return max(0.0, self.last - began)

    @property
    def goodput(self) -> float | None:
        """Return the fraction of the wall time that went into committed steps; None if no step was reported."""
        return min(1.0, self.committed_s / self.seconds) if self.committed_s and self.seconds else None

    def summary(self, logdir: str | None) -> list[str]:
        """Return at most `MOST_LINES` lines of key=value pairs; an empty list if the job never started."""
        if self.began is None:
            return []
        code = "" if self.ended is None else f" exit_code={self.ended.exit_code}"
        since = f" since={self.began.host}" if isinstance(self.began, e.LeaderChanged) else ""
        lines = [f'duration="{spell(self.seconds)}"{code}{since}']
        if self.steps:
            rate = f" samples_per_s={self.samples / self.seconds:.4g}" if self.samples and self.seconds else ""
            samples = f" samples={self.samples}" if self.samples else ""
            loss = "" if self.loss is None else f" loss={number_of(self.loss)}"
            last = "" if self.committed == self.steps else f" last_step={self.steps}"
            lines.append(f"steps={self.committed}{samples}{rate}{loss}{last}")
        if self.goodput is not None:
            lines.append(f'goodput={self.goodput:.0%} committed="{spell(self.committed_s)}"')
        if len(self.sizes) > 1:
            lines.append(f'workers="{self._sizes()}"')
        elif self.sizes:
            lines[0] += f" workers={self.sizes[0][1]}"
        if self.failures:
            lines.append(f"failures={self.failures}")
            lines += [self._failure(each) for each in self.failed]
        if self.slowest is not None:
            change = self.slowest
            lines.append(
                f'slowest_change="{change.workers_before} -> {change.workers} workers" version={change.version}'
                f' step={change.step} stood="{spell(change.seconds)}"'
            )
        if self.longest_stall is not None:
            longest = self.longest_stall
            lines.append(
                f'stalls={self.stalls} seconds={self.stalled_s:.1f} longest="{spell(longest.seconds)}"'
                f" rank={longest.rank}"
            )
        if logdir is not None:
            lines.append(f"logs={logdir}")
        return lines

    def _sizes(self) -> str:
        until = [since for since, _ in self.sizes[1:]] + [self.last]
        spans = [f"{size} for {spell(end - since)}" for (since, size), end in zip(self.sizes, until)]
        left_out = len(spans) - _SIZES_SHOWN
        return ", ".join([*([f"{counted(left_out, 'size')} before"] if left_out > 0 else []), *spans[-_SIZES_SHOWN:]])

    @staticmethod
    def _failure(failure: _Failure) -> str:
        failed, seen = failure.event, failure.seen
        cost = "" if seen is None else f' cost="{spell(seen.seconds)}"'
        step = failed.step if seen is None else seen.step
        at = "" if step is None else f" step={step}"
        return f'failed rank={failed.rank}{at} decision={failed.decision}{cost} reason="{failed.reason}"'


def spell(seconds: float) -> str:
    """Return a duration as text, e.g. "2 h 5 min", "3 min 20 s" or "1.25 s"."""
    if float(text := f"{seconds:.3g}") < 60:
        return f"{text} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number_of(value: float | str) -> str:
    """Return a measured number as text, with five digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def told(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text, e.g. "rank 1", "ranks 1 and 2" or "ranks 0 and 2 to 63"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [name for run in runs for name in ([f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run))]
    all_but_last = f"{', '.join(names[:-1])} and " if len(names) > 1 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {all_but_last}{names[-1]}"
