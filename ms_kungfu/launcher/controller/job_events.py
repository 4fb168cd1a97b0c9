"""The events of a job, which the controller's parts emit. This module passes them to the event log and the status."""

from __future__ import annotations

import collections
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from msgspec.structs import replace

from ms_kungfu import job_events as e
from ms_kungfu._version import VERSION
from ms_kungfu._words import printable
from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.event_file import EventFile
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.account import JobAccount
from ms_kungfu.launcher.state.training import TrainingWatch
from ms_kungfu.launcher.wire.codec import encode

_log = logging.getLogger(__name__)
_KEPT = 4096
_MOST_CHARACTERS = 4096  # the limit of `job_events.Text`
# With 64 ranks, statistics alone take 240 B/s. If other events use up the limit, statistics are written less often than
# once per second, and each statistics line covers a longer time.
BYTES_PER_HOUR = 1_000_000
_BURST_BYTES = 32 * 1024
_SPARE_BYTES = 16 * 1024  # the bytes of each hour that are reserved for lines that can't wait


@dataclass(eq=False)
class JobEvents:
    """Receive the job's events in the controller's event loop. `emit` never raises and never waits.

    Events in the log carry the host's time of day. Durations and rates are computed from `now`, so they stay correct
    if the host's clock is set during the job. (`test_clock_that_is_set_changes_no_duration`.)
    """

    options: Options
    machine: Machine
    _bytes: int = 0
    _file: EventFile | None = None

    def __post_init__(self) -> None:
        self.account, self.training = JobAccount(), TrainingWatch()
        self.kept: collections.deque[e.Event] = collections.deque(maxlen=_KEPT)
        """The newest events."""
        self.listeners: list[Callable[[e.Event], None]] = []
        self._began, self._began_at = self.machine.monotonic(), self.machine.time()

    def begin(self, job: str, fresh: bool) -> None:
        """Begin the log.

        `fresh`: whether this is the job's first controller. If it isn't, an earlier controller may have written to the
        log file already.
        """
        if self.options.logdir is not None:
            self._file = self.machine.open_event_file(self.options.logdir / e.FILE_NAME, fresh)
        self.emit(e.LogBegan(version=e.VERSION, job=job, ms_kungfu=VERSION, host=self.options.hosts.self_name))

    def started(self, first: Cluster) -> None:
        """Record the start of the job."""
        command = printable(" ".join(self.options.command))[:_MOST_CHARACTERS]
        self.emit(e.JobStarted(workers=first.size, hosts=list(first.hosts), command=command))

    def taken_over(self, before: str) -> None:
        """Record that this controller continues the job. `before`: the host of the previous controller."""
        self.emit(e.LeaderChanged(host=self.options.hosts.self_name, before=before))

    def stepped_down(self, why: str) -> None:
        """Record that this controller no longer controls the job."""
        self.emit(e.LeaderLost(host=self.options.hosts.self_name, reason=why))

    def emit(self, event: e.Event) -> None:
        """Record an event now."""
        event.time = round(self.machine.time(), 3)
        steady = replace(event, time=round(self.now(), 3))
        self.account.add(steady)
        self.training.add(steady)
        self.kept.append(event)
        for listener in self.listeners:
            listener(event)
        line = encode(event) + b"\n"
        self._bytes += len(line)
        if self._file is not None:
            self._file.write(line)

    def now(self) -> float:
        """Return the seconds since 1970: the clock's value at the beginning, plus the monotonic time since then."""
        return self._began_at + self.machine.monotonic() - self._began

    def store_outage(self, error: str) -> None:
        """Record that the cluster store doesn't answer because of `error`, or answers again if `error` is ""."""
        self.emit(e.StoreLost(reason=error) if error else e.StoreRestored())

    def may_add(self) -> bool:
        """Return whether the hourly limit of bytes allows a line that can wait."""
        elapsed_s = self.machine.monotonic() - self._began
        return self._bytes < _BURST_BYTES + elapsed_s * (BYTES_PER_HOUR - _BURST_BYTES - _SPARE_BYTES) / 3600

    def summarize(self) -> None:
        """Log the job's summary."""
        for line in self.account.summary(None if self._file is None else str(self._file.path.parent)):
            _log.info("summary: %s", line)

    async def close(self) -> None:
        """Write the last lines. Also write the report if this controller has ended the job."""
        if self._file is not None:
            await self._file.close(None if self.account.ended is None else _write_report)


def _write_report(log: Path) -> None:
    from ms_kungfu.launcher.dashboard import report  # imported here, because it is used only once, at the end

    report.write_report([log], log.with_name(report.FILE_NAME))


def exit_of(code: int) -> dict[str, int]:
    """Return the fields of an event that report the exit code `code`. A negative code means a signal."""
    return {"signal": -code} if code < 0 else {"exit_code": code}
