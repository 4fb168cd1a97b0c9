"""Control one job from the start of its first worker to the exit of its last process.

The controller reacts to the agents' reports, to signals, and to clusters that a client has written to the store.
`coordinator` makes the decisions, and the other parts carry them out: `nodes` handles hosts, `failures` handles workers
that exit, `resizes` handles newer clusters, and `snapshot_writer` writes the leader snapshot. All parts run on one
asyncio loop in the launcher's main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from msgspec.structs import replace

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import ClusterStore
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.controller.etcd_lease import END_S, RENEW_S, EtcdLease
from ms_kungfu.launcher.controller.failures import WorkerFailures
from ms_kungfu.launcher.controller.following import CopiesWatch
from ms_kungfu.launcher.controller.history import History
from ms_kungfu.launcher.controller.job_events import JobEvents
from ms_kungfu.launcher.controller.leadership import Leadership, NoElection
from ms_kungfu.launcher.controller.nodes import JobNodes
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.resizes import Resizes
from ms_kungfu.launcher.controller.revisions import Revisions
from ms_kungfu.launcher.controller.snapshot_writer import SnapshotWriter
from ms_kungfu.launcher.controller.startup import JobStart, MayWrite, prepare
from ms_kungfu.launcher.controller.status import describe, last_step
from ms_kungfu.launcher.controller.takeover import start_of, take_over
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options, what_is_done_instead
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.course import JobCourse
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, Term
from ms_kungfu.launcher.state.outline import outline
from ms_kungfu.launcher.state.policy import Action, Verdict
from ms_kungfu.launcher.status_socket import never_raises
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu.launcher.controller.dashboard import JobDashboard

_log = logging.getLogger(__name__)


class Controller:
    """Run a job once.

    The launcher of the controller's own host is one of the agents. `registration` is that launcher's registration. If a
    `term` is given, the controller makes decisions only while it has the lease. It writes each decision to the snapshot
    before it notifies any worker or host. `remove_at_end(path, inode)` registers a file for removal when this process
    ends. `stop` lets the dashboard end the job through this host's launcher, even under a later controller.
    """

    make_broker: Callable[..., Broker] = staticmethod(Broker)

    def __init__(
        self, options: Options, machine: Machine, registration: m.Registration,
        remove_at_end: Callable[[Path, int], None], stop: Callable[[], None], term: Term | None = None,
    ) -> None:  # fmt: skip
        self.last_words: str | None = None
        self.failed: int | None = None
        self._options, self._machine, self._registration, self._term = options, machine, registration, term
        self._remove_at_end, self._stop = remove_at_end, stop
        self._closers = contextlib.AsyncExitStack()
        self._ended, self._hurry, self._hears_hosts = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._start_error: BaseException | None = None
        self._started_at = machine.time() if term is None else term.since
        history = History(emit=(events := JobEvents(options, machine)).emit)
        self.course = course = JobCourse(history.note, self._ended.set)
        leadership: Leadership = NoElection()
        if term is not None:
            hears = self._on_step_down, self._on_new_lease, self._on_store_awaited
            leadership = EtcdLease(term, machine, options.config_server or "", options.hosts.self_name, *hears)
        self.context = JobContext(options, machine, course, events, history, leadership)
        self._snapshot = SnapshotWriter(self.context, self._started_at)
        self.status = never_raises(self._status)
        self._nodes = JobNodes(self.context, self._snapshot, self.status, self._left_s, self.interrupted, self.hurry)
        self._dashboard: JobDashboard | None = None
        self._copies = CopiesWatch(lambda: course.is_over)
        self._failures = WorkerFailures(self.context, self._nodes, self._copies)
        self._resizes = Resizes(self.context, self._nodes, self._failures)

    async def run(self) -> int:
        """Return the job's exit code as soon as no process of the job is left.

        Raise StartError if the job never started.
        """
        left_s = self._left_s()
        if left_s is not None and (limit_s := self._options.timeout_s) is not None:
            self.context.loop.call_later(left_s, self._on_timeout, limit_s)
        try:
            start = asyncio.ensure_future(self._start())
            start.add_done_callback(self._on_started)
            try:
                await self._ended.wait()
            finally:
                start.cancel()
                await asyncio.wait([start])
            if self.course.verdict is None:
                assert self._start_error is not None
                raise self._start_error
            return self.course.verdict.exit_code
        finally:
            self.course.end(None)
            await self._end(self.course.verdict)
            if self._dashboard is not None:
                await self._dashboard.close()

    # ---- status ----

    def _status(self) -> dict[str, Any]:
        job, course, why = self.context, self.course, ""
        if course.is_over:
            why = "the job is interrupted" if course.verdict is None else course.verdict.reason
        elif job.manager is None and job.remote is not None:
            missing = job.remote.gathering.missing_others()
            why = f"waits for kungfu-run on {', '.join(missing)}" if missing else ""
        document = outline(self._options, course.state, why, self._snapshot.began_at)
        if job.manager is not None:
            describe(document, job.manager, job.coordinator, job.history)
        step = last_step(document["processes"])
        return {**document, **job.events.training.describe(job.events.now(), course.is_over, step)}

    def _left_s(self) -> float | None:
        """Return the seconds that are left until the job's -timeout."""
        return self._options.left_s(self._machine.time() - self._started_at - self._options.delay_s)

    # ---- start ----

    def _on_started(self, start: asyncio.Future[None]) -> None:
        if not start.cancelled() and start.exception() is not None and not self.course.is_over:
            self._start_error = start.exception()
            self.course.end(None)

    async def _start(self) -> None:
        job, options, leadership = self.context, self._options, self.context.leadership
        if leadership.resumes is not None:
            await self._take_over(leadership.resumes)
            return
        await leadership.await_turn()
        start = await prepare(
            options, self._machine, self._closers, check=self._resizes.check, on_change=self._resizes.on_written,
            on_status=self.status, on_secret_left=lambda file: self._remove_at_end(file.path, file.inode),
            before_first=self._acquire,
        )  # fmt: skip
        if instead := what_is_done_instead(options.strategy, options.hosts.is_several):
            _log.warning('strategy: reason="%s"', instead)
        remote = self._expect_hosts(start, start.first)
        await remote.gather(start.join_timeout_s)
        manager = job.manager = self._new_manager(remote)
        job.history.begun(start.first)
        job.events.started(start.first)
        await manager.start(self._note_first)
        self._closers.callback(self._copies.begin(manager.broker, lambda: job.coordinator.newest.size).cancel)
        self._machine.tell_of_the_beginning()
        self._resizes.begun()
        self._closers.callback(self._resizes.watch())
        job.keep_emitting_statistics()

    async def _take_over(self, snapshot: LeaderSnapshot) -> None:
        """Continue from the last decision of the previous controller."""
        job, current = self.context, snapshot.versions.current
        assert self._term is not None
        assert current is not None
        start = start_of(job, snapshot, self._term)
        assert start.store is not None
        self._closers.callback(job.leadership.keep(start.store))
        remote = self._expect_hosts(start, current, resumes=True)
        job.events.taken_over(snapshot.before[-1] if snapshot.before else snapshot.head)
        manager = await take_over(
            job, snapshot, self._nodes, self._snapshot, remote, lambda: self._new_manager(remote, snapshot)
        )
        if manager is not None:
            self._closers.callback(self._resizes.watch())
            self._nodes.resumed()
            job.keep_emitting_statistics()

    def _expect_hosts(self, start: JobStart, current: Cluster, resumes: bool = False) -> RemoteHosts:
        """Accept the registrations of hosts."""
        job = self.context
        job.begun = start
        job.events.begin(start.writer, fresh=not resumes)
        job.coordinator = Coordinator(self._options, current)
        job.revisions = Revisions(self._resizes, job.coordinator, start, self._machine)
        remote = job.remote = RemoteHosts(self._options, self._machine, self._registration, start, self._nodes, resumes)
        self._closers.callback(remote.reachability.close)
        remote.lease = job.leadership.lease
        remote.hold_deadlines(job.leadership.awaits_store)
        self._hears_hosts.set()
        if self._options.dashboard is not None:
            self._dashboard = _dashboard(self._options.dashboard, job, self.status, self._stop)
        return remote

    def _new_manager(self, remote: RemoteHosts, snapshot: LeaderSnapshot | None = None) -> WorkerManager:
        job, moves = self.context, self.context.leadership.moves
        manager = WorkerManager(
            self._options, self._machine, job.begun, job.coordinator, self._failures, remote, self.make_broker,
            versions=None if snapshot is None else snapshot.versions,
            on_commit=self._snapshot.on_commit if moves else None,
            may_prepare=self._snapshot.may_prepare if moves else None,
        )  # fmt: skip
        self._closers.callback(manager.close)
        return manager

    async def _note_first(self) -> bool:
        """Record that the first cluster version is committed. Return False if another host now controls the job."""
        self.course.begins()
        return await self._snapshot.note()

    # ---- leadership ----

    async def _acquire(self, writer: str, store: ClusterStore, first: Callable[[], Cluster]) -> MayWrite:
        """Acquire the lease before this job writes anything else. If two jobs have the same name, one is rejected."""
        leadership, hosts = self.context.leadership, self._options.hosts
        await leadership.acquire(lambda: LeaderSnapshot(writer, hosts.self_name, first(), hosts.each))
        self._closers.callback(leadership.keep(store))
        return leadership.has_it_again

    def _on_step_down(self, why: str) -> None:
        self.context.events.stepped_down(why)
        self.course.end(Verdict(Action.FAIL, why, 1))

    def _on_new_lease(self) -> None:
        if self.context.remote is not None:
            self.context.remote.tell_lease()

    def _on_store_awaited(self, yes: bool) -> None:
        """Suspend the workers' deadlines while a decision, for which workers may be waiting, waits for the store.

        `yes`: whether a decision waits for the store now.
        """
        if self.context.remote is not None:
            self.context.remote.hold_deadlines(yes)

    @property
    def has_stepped_down(self) -> bool:
        return self.context.leadership.has_stepped_down

    @property
    def store_error(self) -> ConfigServerError | None:
        return self.context.leadership.store_error

    @property
    def moves(self) -> bool:
        """Return whether another host continues the job if this one fails."""
        return self.context.leadership.moves

    @property
    def has_left(self) -> bool:
        """Return whether this controller's host has left, so that another host controls the job."""
        return self._nodes.has_left

    # ---- events ----

    @property
    def is_over(self) -> bool:
        return self.course.is_over

    async def leave(self) -> None:
        """Let this host leave. This doesn't end a job that has begun."""
        await self._nodes.leave()

    def host_leaves(self, name: str) -> None:
        self._nodes.host_leaves(name)

    async def serve(self, channel: AnyChannel, message: m.FirstWords) -> bool:
        """Serve a host that has connected to this controller. A joining host waits until the job runs."""
        job = self.context
        joins = isinstance(message, m.Ask) or (isinstance(message, m.Agent) and message.slots is not None)
        while job.remote is None and not self.is_over:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(RENEW_S, self._hears_hosts.wait())
        while joins and job.resumes:
            await asyncio.sleep(RENEW_S)
        if job.remote is None or self.has_stepped_down:
            return False  # the caller looks up again which host controls the job
        return await job.remote.serve(channel, message)

    def then(self) -> str:
        """Return what happens after a host was rejected, as text for the log line."""
        return "" if self.context.remote is None else self.context.remote.gathering.then()

    def interrupted(self, number: int, where: str = "") -> None:
        self.course.interrupted(number, where)

    def hurry(self) -> None:
        """Stop waiting for workers, because a launcher has got a second signal."""
        self._hurry.set()

    def _on_timeout(self, limit_s: float) -> None:
        verdict, remote = policy.timed_out(limit_s), self.context.remote
        missing = () if remote is None or self.context.has_begun else remote.gathering.missing()
        if remote is not None and missing:
            why = f"no message came from {', '.join(missing)}.{remote.gathering.why_missing()}".rstrip(".")
            verdict = replace(verdict, reason=policy.not_begun(limit_s, why))
        self.course.settle(verdict)

    def on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the job because of an exception in a callback of the event loop. No job may run unsupervised."""
        error = context.get("exception")
        _log.error('internal error: where=controller error="%s"', context["message"], exc_info=error)
        what = context["message"] if error is None else policy.bug(error)
        self.course.end(Verdict(Action.FAIL, f"internal error: {what}", 1))

    # ---- end ----

    async def _end(self, verdict: Verdict | None) -> None:
        """End the workers, whatever their state, wait for their last output, and close everything."""
        job, leadership = self.context, self.context.leadership
        failed = verdict is None or verdict.action is Action.FAIL
        if verdict is None and leadership.resumes is not None:
            # This controller doesn't end a running job, because another controller may continue it.
            await leadership.leave()
        if verdict is not None and verdict.action is Action.FAIL:
            self.last_words, self.failed = f"kungfu-run: {verdict.reason}", verdict.failed
        is_noted = await self._note_the_end(verdict)
        if job.manager is not None and not self.has_stepped_down:
            await job.manager.ending.end_all(None if verdict is None else verdict.interrupted_by, self._hurry)
        # A controller that has lost the lease doesn't end the job. But if all workers have finished and no other
        # controller can take over, this controller reports the end.
        has_finished = leadership.is_gone and not failed
        if self.has_stepped_down and not has_finished and job.remote is not None:
            job.remote.leave()
            await self._closers.aclose()
            await job.end_events(None)
            return
        await job.end_events(verdict)
        if job.remote is not None:
            if verdict is None:
                await job.remote.end(1, f"kungfu-run: the job has not started: {self._start_error or 'it was ended'}")
            else:
                await job.remote.end(verdict.exit_code, self.last_words, self.failed)
        if is_noted:
            await leadership.release()
        await self._closers.aclose()

    async def _note_the_end(self, verdict: Verdict | None) -> bool:
        """Record the end of the job before any worker or host is notified.

        Without this record, the next controller would treat each worker that exits because the job ends as failed.
        Return False if the store is unavailable. The controller then doesn't wait for the store, because the lease
        expires anyway.
        """
        if not self.context.leadership.has_held or verdict is None:
            return True
        try:
            return await within(END_S, self._snapshot.note(end=(verdict.exit_code, self.last_words)))
        except asyncio.TimeoutError:
            return False


def _dashboard(
    address: str, job: JobContext, describe: Callable[[], dict[str, Any]], stop: Callable[[], None]
) -> JobDashboard | None:
    """Serve the live page. If that fails (for example, because no thread is left), log the error and return None."""
    try:
        from ms_kungfu.launcher.controller.dashboard import JobDashboard  # loaded only by a job with a live page

        dashboard = JobDashboard(job, describe, stop)
        dashboard.begin(address)
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        _log.warning('dashboard failed: address=%s error="%s". The job goes on without it', address, why)
        return None
    return dashboard
