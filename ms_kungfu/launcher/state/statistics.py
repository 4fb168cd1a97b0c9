"""Combine the workers' step reports into the statistics of a job. This module uses no clock and no I/O.

1. A step counts once, even if several ranks report it. `_newest` is the last step that has been counted. A report adds
   steps and committed time only for its steps after `_newest`. (`test_step_counts_once_whichever_ranks_report_it`.)

2. If a rank's step number decreases, the program has begun another training run, and counting restarts.

3. Ranks report how long they spent in operations, including the time in which they waited there for other ranks. The
   rank that spent the smallest fraction of its time in operations didn't wait. So its fraction is the cost of the
   reduction itself. If another rank's fraction is larger, the difference is the time in which that rank waited.

4. The committed time of an event is at most the time that the event covers. A report may contain a step that began
   earlier. The excess is counted in the next events. (`test_committed_time_never_exceeds_the_time_of_its_event`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from ms_kungfu.job_events import RankStatistics, Statistics, StepReport

_LASTING = ("learning_rate", "batch", "epoch", "epochs", "total_steps", "noise_scale")


class _Rank(Struct):
    """The reports of one rank since the last statistics event."""

    seconds: float = 0.0
    committed: float = 0.0
    collectives: float = 0.0
    checkpoint: float = 0.0
    data: float | None = None
    p50: float = 0.0
    p99: float = 0.0

    def add(self, report: StepReport) -> None:
        self.seconds += report.seconds
        self.committed += report.committed
        self.collectives += report.collectives
        self.checkpoint += report.checkpoint
        if report.data is not None:
            self.data = (self.data or 0.0) + report.data
        self.p50, self.p99 = report.p50, max(self.p99, report.p99)

    @property
    def computing(self) -> float:
        return max(0.0, self.seconds - self.collectives - self.checkpoint - (self.data or 0.0))


@dataclass
class JobStatistics:
    """The sums of all ranks' reports since the last statistics event."""

    now: float
    _ranks: dict[int, _Rank] = field(default_factory=dict)  # since the last Statistics event
    _each: dict[int, _Rank] = field(default_factory=dict)  # since the last RankStatistics event
    _last: dict[int, int] = field(default_factory=dict)  # rank -> its last step
    _newest: int | None = None
    _steps: int = 0
    _samples: float = 0.0
    _committed: float = 0.0

    def __post_init__(self) -> None:
        self.latest: dict[int, StepReport] = {}  # rank -> its last report
        self._said_at = self._each_said_at = self.now
        self._loss: object = None
        self._lasting: dict[str, float | int] = {}  # values that an event contains only if they have changed
        self._said: dict[str, float | int] = {}  # the values of `_lasting` in the last events

    def add(self, rank: int, report: StepReport) -> None:
        """Add the report that a rank has sent."""
        self.latest[rank] = report
        for ranks in (self._ranks, self._each):
            ranks.setdefault(rank, _Rank()).add(report)
        if report.trained is None:
            self._samples += report.samples
        if self._newest is None or report.step < self._last.get(rank, 0):
            self._newest = report.step - report.ended
        self._last[rank] = report.step
        new = min(report.ended, report.step - self._newest)
        if new > 0:
            self._steps += new
            self._samples += (report.trained or 0) * new / report.ended
            self._committed += report.committed * new / report.ended
            self._newest = report.step
        self._loss = self._loss if report.loss is None else report.loss
        self._lasting.update({k: v for k in _LASTING if (v := getattr(report, k)) is not None})

    def changed(self, now: float) -> None:
        """Record that the cluster has changed. From now on, a rank may belong to another worker."""
        self.latest.clear()
        self._each.clear()
        self._each_said_at = now
        self._last.clear()

    def line(self, now: float) -> Statistics | None:
        """Return the statistics since the last event; None if no rank has reported."""
        if not self._ranks:
            return None
        from statistics import median  # imported here so that the launcher starts faster

        ranks, self._ranks = self._ranks, {}
        seconds = sum(each.seconds for each in ranks.values()) or 1.0
        least = min(_share(each.collectives, each.seconds) for each in ranks.values())
        collectives = sum(each.collectives for each in ranks.values()) / seconds
        data = [each.data for each in ranks.values() if each.data is not None]
        covered = max(0.0, now - self._said_at)
        committed = min(self._committed, covered)
        said = Statistics(
            step=self._newest,
            seconds=_short(covered),
            steps=self._steps,
            samples=round(self._samples),
            loss=self._loss,  # type: ignore[arg-type]
            p50=_short(median(each.p50 for each in ranks.values())),
            p99=_short(max(each.p99 for each in ranks.values())),
            committed=_short(committed),
            computing=_part(sum(each.computing for each in ranks.values()) / seconds),
            reduction=_part(least),
            waiting=_part(max(0.0, collectives - least)),
            data=_part(sum(data) / seconds) if data else None,
            checkpoint=_part(sum(each.checkpoint for each in ranks.values()) / seconds) or None,
            **{k: v for k, v in self._lasting.items() if self._said.get(k) != v},  # type: ignore[arg-type]
        )
        self._said = dict(self._lasting)
        self._said_at, self._steps, self._samples, self._loss = now, 0, 0.0, None
        self._committed -= committed
        return said

    def by_rank(self, now: float, size: int) -> RankStatistics | None:
        """Return the statistics of each rank; None if no rank has reported, or if the last result is too recent.

        There is at most one result every `size` seconds. For a single rank the result is always None, because the
        rank's statistics would be those of the job.
        """
        if size < 2 or now - self._each_said_at < size or not self._each:
            return None
        ranks, self._each = self._each, {}
        least = min(_share(each.collectives, each.seconds) for each in ranks.values())

        def values(of: Mapping[int, float | None]) -> list[float | None]:
            return [of.get(rank) for rank in range(size)]

        def parts(of: Mapping[int, float]) -> list[float | None]:
            return values({rank: _part(_share(part, ranks[rank].seconds)) for rank, part in of.items()})

        said = RankStatistics(
            seconds=_short(now - self._each_said_at),
            p50=values({rank: _short(each.p50) for rank, each in ranks.items()}),
            p99=values({rank: _short(each.p99) for rank, each in ranks.items()}),
            computing=parts({rank: each.computing for rank, each in ranks.items()}),
            waiting=parts({rank: each.collectives - least * each.seconds for rank, each in ranks.items()}),
            data=parts({rank: each.data for rank, each in ranks.items() if each.data is not None}),
            checkpoint=parts({rank: each.checkpoint for rank, each in ranks.items() if each.checkpoint}),
        )
        self._each_said_at = now
        return said


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _part(share: float) -> float:
    return round(min(1.0, max(0.0, share)), 3)


def _short(value: float) -> float:
    return float(f"{max(0.0, value):.4g}")
