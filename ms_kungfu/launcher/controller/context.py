"""What the parts of a controller share: the job's options, its state, and the objects on which the others act."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from ms_kungfu.launcher.controller.history import History
from ms_kungfu.launcher.controller.leadership import Leadership
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.revisions import Revisions, raise_bugs
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.course import JobCourse


@dataclass(eq=False)
class JobContext:
    """The shared state of a job.

    `begun`, `coordinator`, `revisions` and `remote` are there once the job is prepared, `workers` once all hosts have
    registered.
    """

    options: Options
    machine: Machine
    course: JobCourse
    history: History
    leadership: Leadership
    remote: RemoteHosts | None = None
    manager: WorkerManager | None = None
    begun: JobStart = field(init=False)
    coordinator: Coordinator = field(init=False)
    revisions: Revisions = field(init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._background: set[asyncio.Future[None]] = set()

    @property
    def workers(self) -> WorkerManager:
        assert self.manager is not None
        return self.manager

    @property
    def has_begun(self) -> bool:
        """Return whether all hosts have registered, and the first version is committed."""
        return self.manager is not None and self.manager.broker.current() is not None

    @property
    def resumes(self) -> bool:
        """Return whether the job runs, but this controller doesn't know yet which hosts and workers are there."""
        return self.leadership.resumes is not None and not self.has_begun and not self.course.is_over

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(raise_bugs)
