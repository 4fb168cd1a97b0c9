"""What a controller's parts share: the job's options and state, and the objects that act on hosts and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from ms_kungfu import job_events as e
from ms_kungfu.launcher.controller.history import History
from ms_kungfu.launcher.controller.job_events import JobEvents
from ms_kungfu.launcher.controller.leadership import Leadership
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.revisions import Revisions, raise_bugs
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.course import JobCourse
from ms_kungfu.launcher.state.policy import Verdict
from ms_kungfu.launcher.state.statistics import JobStatistics

_STATISTICS_S = 1.0


@dataclass(eq=False)
class JobContext:
    """The shared state of a job.

    `begun`, `coordinator`, `revisions` and `remote` are set when the job has been prepared. `manager` is set when all
    hosts have registered.
    """

    options: Options
    machine: Machine
    course: JobCourse
    events: JobEvents
    history: History
    leadership: Leadership
    remote: RemoteHosts | None = None
    manager: WorkerManager | None = None
    begun: JobStart = field(init=False)
    coordinator: Coordinator = field(init=False)
    revisions: Revisions = field(init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.statistics = JobStatistics(self.machine.monotonic())
        self._background: set[asyncio.Future[None]] = set()

    @property
    def workers(self) -> WorkerManager:
        assert self.manager is not None
        return self.manager

    @property
    def has_begun(self) -> bool:
        """Return whether all hosts have registered and the first cluster version is committed."""
        return self.manager is not None and self.manager.broker.versions.current is not None

    @property
    def resumes(self) -> bool:
        """Return whether the job is running, but its hosts and workers haven't yet registered with this controller."""
        return self.leadership.resumes is not None and not self.has_begun and not self.course.is_over

    def keep_emitting_statistics(self) -> None:
        """Emit the job's statistics once a second, within the size limit of the event log."""
        if self.course.is_over:
            return
        if self.events.may_add():
            current = self.workers.broker.versions.current
            by_rank = self.statistics.by_rank(self.machine.monotonic(), 0 if current is None else current.size)
            if by_rank is not None:
                self.events.emit(by_rank)
            self.emit_statistics()
        self.loop.call_later(_STATISTICS_S, self.keep_emitting_statistics)

    def emit_statistics(self) -> None:
        line = self.statistics.line(self.machine.monotonic())
        if line is not None:
            self.events.emit(line)

    async def end_events(self, verdict: Verdict | None) -> None:
        """Emit the event that the job has ended, log the job's summary, and close the event log.

        If `verdict` is None, this controller doesn't end the job, so only close the event log.
        """
        if verdict is not None:
            self.emit_statistics()
            living = [] if self.manager is None else self.manager.processes.living_members()
            self.events.emit(e.JobEnded(exit_code=verdict.exit_code, reason=verdict.reason, workers=len(living)))
            self.events.summarize()
        await self.events.close()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(raise_bugs)
