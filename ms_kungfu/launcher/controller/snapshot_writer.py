"""Write the controller's decisions to the leader snapshot before any worker or host is notified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from msgspec.structs import replace

from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire.documents import End, Past


@dataclass(eq=False)
class SnapshotWriter:
    """Writes the leader snapshot. `began_at`: the start of the job, in seconds since 1970."""

    job: JobContext
    began_at: float
    _end: End | None = None  # how the job ended; each later entry includes it

    def __post_init__(self) -> None:
        self._being_removed: set[str] = set()  # hosts whose loss is being written

    async def write(self, committing: int | None = None, lost: str | None = None, end: End | None = None) -> bool:
        """Write an entry. Call this only within `Leadership.act`. Return whether the snapshot contains the entry.

        The entry describes the job as if cluster version `committing` were committed, host `lost` were removed, and
        the job had ended with `end`.
        """
        job = self.job
        leadership = job.leadership
        self._end = end = end or self._end

        def snapshot() -> LeaderSnapshot:
            start, coordinator, own = job.begun, job.coordinator, job.options.hosts.self_name
            if job.manager is None and leadership.resumes is not None:  # the workers aren't known yet
                return replace(leadership.resumes, end=end)
            versions = ClusterVersions() if job.manager is None else job.manager.broker.snapshot(committing, lost)
            forgotten = coordinator.hosts.lost.difference(versions.lost_hosts)
            hosts = tuple(host for host in coordinator.hosts.each if host.name not in forgotten)
            return LeaderSnapshot(
                start.writer, own, start.first, hosts, versions, coordinator.finishing, end,
                failures=coordinator.failures, told=Past(self.began_at, list(job.history.changes)),
            )  # fmt: skip

        return await leadership.write(snapshot)

    async def note(self, lost: str | None = None, end: End | None = None) -> bool:
        """Write a decision to the snapshot. Return False if another host now controls the job."""
        await self.job.leadership.act(lambda: self.write(lost=lost, end=end))
        return not self.job.leadership.has_stepped_down

    def note_soon(self) -> None:
        self.job.in_background(self.job.leadership.act(self.write))

    def resume(self, past: Past | None, current: Cluster) -> None:
        if past is None:
            self.job.history.begun(current)
        else:
            self.began_at = past.began_at
            self.job.history.resumed(past.changes, current)

    def once_noted(self, lost: str, act: Callable[[], None]) -> None:
        """Call `act` as soon as the snapshot records that host `lost` is lost. `act` notifies the other hosts."""
        if not self.job.leadership.moves:
            act()
        elif lost not in self._being_removed:
            self._being_removed.add(lost)
            self.job.in_background(self._note_and(lost, act))

    async def _note_and(self, lost: str, act: Callable[[], None]) -> None:
        job = self.job
        if job.leadership.has_stood_still:
            await job.leadership.step_down(() if job.remote is None else job.remote.registered())
        noted = await self.note(lost=lost)
        self._being_removed.discard(lost)
        if noted and not job.course.is_over and lost not in job.coordinator.hosts.lost:
            act()

    # ---- cluster versions ----

    def may_prepare(self, version: int) -> bool:
        job = self.job
        if job.leadership.may_say(version):
            return True
        job.in_background(self._prepare_once_it_may(version))
        return False

    async def _prepare_once_it_may(self, version: int) -> None:
        job = self.job
        if await job.leadership.until_it_may_be_said(version, lambda: job.course.is_over):
            job.workers.broker.prepare()

    def on_commit(self, version: int) -> None:
        """Write to the snapshot that cluster version `version` is committed. The broker commits it after the write."""
        self.job.in_background(self.job.leadership.act(lambda: self._commit(version)))

    async def _commit(self, version: int) -> None:
        if not await self.write(committing=version):
            return  # no worker is notified
        broker = self.job.workers.broker
        if not broker.noted():
            await self.write()
            broker.not_noted()
