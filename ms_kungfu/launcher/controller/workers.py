"""How the workers of a job start, run and exit. The controller controls each worker through its host's agent.

Agents report what only a host can know: its processes and their heartbeats (`remote`). The broker assigns the slots,
and makes the hosts create the shared memory of each cluster version. `coordinator` decides how to react to a report,
and which cluster is desired. Some parts of a `WorkerManager` are in separate files: `starting`, `ending`, `hanging`,
`cores`, `following`, `prestarted`.

Everything in this module runs in the controller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Callable, Protocol

from ms_kungfu import job_events as e
from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.cores import WorkerCores
from ms_kungfu.launcher.controller.ending import EndOfWorkers
from ms_kungfu.launcher.controller.following import FollowWatch
from ms_kungfu.launcher.controller.hanging import HangingWorkers
from ms_kungfu.launcher.controller.prestarted import PrestartedWorkers
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.segments import NotMadeYet
from ms_kungfu.launcher.controller.starting import StartOfWorkers, log_started
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.hosts import MANY_PER_CORE
from ms_kungfu.launcher.state.policy import Recover, Standing, how_it_ended
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.state.states import WorkerState
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_RETRY_S = 0.2


class WorkerEvents(Protocol):
    """The receiver of events. Its methods are called in the event loop."""

    @property
    def is_over(self) -> bool:
        """Return whether the job is ending, so that no event matters any more and nothing may start."""
        ...

    @property
    def awaits_store(self) -> bool:
        """Return whether a decision waits for the store."""
        ...

    def emit(self, event: e.Event) -> None:
        """Record an event in the job's log."""

    def worker_reports(self, process: Process, events: Sequence[e.Event], steps: e.StepReport | None) -> None:
        """Record a worker's report."""

    def worker_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        """Record that a worker has exited, or counts as failed. `error`: why the worker never ran or was killed."""

    def worker_reaped(self, process: Process) -> None:
        """Record that a worker that survived SIGKILL has exited, so its port is free."""

    def worker_works_on(self, process: Process, version: int) -> None:
        """Record that a worker that isn't in cluster version `version` is still running after -leave-grace."""

    def version_prepared(self, version: int) -> None:
        """Record that all new workers of a cluster version are ready, and that the members have been notified."""

    def version_committed(self, cluster: Cluster, step: int | None) -> None:
        """Record that the members adopt a cluster version. `step`: the step after which they adopt it, if known."""

    def worker_leaves(self, peer: PeerID) -> None:
        """Record that the broker has allowed `peer` to leave."""

    def last_worker_terminated(self, peer: PeerID) -> None:
        """Record that `peer` got a SIGTERM, but must not leave."""

    def version_unknown(self, version: int) -> None:
        """Record that a member has requested a cluster version that the broker doesn't know yet."""

    def version_followed(self) -> None:
        """Record that the worker manager has finished its work after the commit of a version other than the first."""


@dataclass(eq=False)
class WorkerManager:
    """All workers of the job, from `start` or `resuming.resume` to `close`.

    `versions`: the cluster versions of an earlier controller. `on_commit` and `may_prepare`: see `Broker`.
    """

    options: Options
    machine: Machine
    begun: JobStart
    coordinator: Coordinator
    events: WorkerEvents
    remote: RemoteHosts
    make_broker: Callable[..., Broker] = Broker
    versions: ClusterVersions | None = None
    on_commit: Callable[[int], None] | None = None
    may_prepare: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._trouble = ""  # the last error about the shared memory of a cluster version
        self._retry: asyncio.TimerHandle | None = None  # the timer of the retry after that error
        self._made = asyncio.Event()  # set when the hosts have made a segment, or can't make it
        self._here = self.options.host.name
        self.broker = self._new_broker()
        self.agents: dict[str, AgentHandle] = dict(self.remote.agents)
        self.processes = ProcessTable(self.broker, self.agents)
        self.ending = EndOfWorkers(
            self.processes, self.agents, self.broker, self.machine, self._here, self._is_over, self._on_unkillable,
            self.options.grace_period_s, self.remote.checkpoint,
        )  # fmt: skip
        self.hanging = HangingWorkers(
            self.options, self.machine, self.broker, self.processes, self.agents, self.ending,
            self.begun.join_timeout_s, self._is_over, lambda event: self.events.emit(event),
        )  # fmt: skip
        self.starting = StartOfWorkers(
            self.options, self.begun, self.coordinator, self.broker, self.processes, self.agents, self.ending,
            self.on_exit,
        )  # fmt: skip
        self.cores = WorkerCores(
            self.processes, self.agents, self.options.affinity,
            cluster=lambda: self.broker.versions.current or self.coordinator.newest,
        )  # fmt: skip
        self._follow_watch = FollowWatch(
            self.broker, self.processes, self._is_over, awaits_store=lambda: self.events.awaits_store
        )
        self.prestarted = PrestartedWorkers(
            self.options, self.broker, self.processes, self.agents, self.coordinator, self.starting, self.ending,
            self.events.worker_reaped,
        )  # fmt: skip

    def _new_broker(self) -> Broker:
        events = self.events
        return self.make_broker(
            make_segment=self.remote.make_segment,
            recovers=self.options.recover is not Recover.FAIL,
            min_size=self.options.min_size,
            on_unknown_version=lambda version: events.version_unknown(version),
            on_committed=self._on_committed,
            on_ready=self._on_ready,
            on_trouble=self._on_trouble,
            on_prepared=self._on_prepared,
            on_cores=lambda each: self.cores.fix(each),
            on_expected=lambda expected: self.prestarted.expect(expected),
            on_leave=(lambda peer: events.worker_leaves(peer)) if self.options.watch else None,
            on_last=lambda peer: events.last_worker_terminated(peer),
            on_commit=self.on_commit,
            may_prepare=self.may_prepare,
            begun=self.versions,
        )

    def _is_over(self) -> bool:
        return self.events.is_over

    async def start(self, note: Callable[[], Awaitable[bool]]) -> None:
        """Commit the first cluster, and start its workers as soon as the snapshot contains the commit.

        `note` writes the snapshot, and returns False if another controller now has the job. Raise StartError if the
        shared memory can't be made.
        """
        self.remote.attend(self)
        first = self.coordinator.newest
        self.broker.admit(first)
        await self._commit_first(first)
        if not await note():
            return
        self.starting.missing(first)
        self.prestarted.keep()
        self.hanging.keep_looking_for_the_stuck()

    async def _commit_first(self, cluster: Cluster) -> None:
        """Commit the first cluster version.

        If there are several hosts, retry after an error, because a connection between two hosts may have failed.
        """
        until = self._loop.time() + self.begun.join_timeout_s
        logged: set[str] = set()
        while True:
            try:
                await self.commit_version(cluster)
                return
            except Exception as error:  # any error of the runtime or the kernel
                trouble = f"the shared memory of {counted(cluster.size, 'worker')} can't be made: {error}"
                if len(cluster.hosts) == 1 or self._loop.time() >= until:
                    raise StartError(trouble) from error
            if trouble not in logged:
                logged.add(trouble)
                _log.warning('shared memory failed: error="%s" action=retry', trouble)
            await asyncio.sleep(_RETRY_S)

    async def commit_version(self, cluster: Cluster) -> None:
        """Wait until the shared memory of `cluster` is made, and commit the version. Raise the hosts' errors."""
        while True:
            self._made.clear()
            try:
                self.broker.commit_version(cluster.version)
                return
            except NotMadeYet:
                await self._made.wait()

    def segment_was_made(self) -> None:
        """Record that all hosts of a cluster version have created its shared memory, or can't."""
        self._made.set()
        self.broker.prepare()

    def close(self) -> None:
        self.broker.close()

    def logs_of(self, process: Process) -> str:
        """Return the names of the worker's log files, or "" without -logdir."""
        paths = ", ".join(map(str, self.agents[process.host].log_paths(process.log_name)))
        return f"{paths} on {process.host}" if paths and process.host != self._here else paths

    def warn_of_crowd(self, cluster: Cluster) -> None:
        """Log a warning if `cluster`, which is about to become the desired cluster, has too many workers per core."""
        cores = sum(len(agent.shares.cores) for agent in self.agents.values())
        if cluster.size > max(MANY_PER_CORE * cores, self.coordinator.newest.size):
            _log.warning(
                "many workers: workers=%d cores=%d. If this size is a mistake, a resize to another size "
                "corrects it at once",
                cluster.size, cores,
            )  # fmt: skip

    # ---- events ----

    def on_event(self, host: str, event: m.Started | m.Exited) -> None:
        """Process a host's report about one of its processes."""
        process = self.processes.get(event.key)
        if process is None or process.host != host:
            _log.warning("unknown process: host=%s key=%d", host, event.key)
        elif isinstance(event, m.Exited):
            self.on_exit(process, event)
        else:
            process.pid = event.pid
            if process.state is WorkerState.STARTING:
                process.to(WorkerState.RUNNING)
            log_started(process, self.options.standbys)
            self.events.emit(e.WorkerStarted(**process.named, pid=event.pid, standby=process.standby))

    def on_report(self, host: str, report: m.Report) -> None:
        """Process a worker's report about itself. Ignore the report if the process has exited in the meantime."""
        for process in self.processes:
            if process.host == host and (str(process.peer), process.incarnation) == (report.peer, report.incarnation):
                self.events.worker_reports(process, report.events, report.steps)

    def on_exit(self, process: Process, event: m.Exited) -> None:
        if process.state is WorkerState.EXITED:  # already recorded when its host was lost
            return
        standing = self.processes.standing(process)
        self.processes.remove(process)
        if process.state is WorkerState.UNKILLABLE:
            _log.info("worker reaped: %s", process.who)
            if process.peer is not None:
                self.broker.mark_reaped(process.peer, process.incarnation)
            self.events.worker_reaped(process)
        else:
            self._has_ended(process, standing, event.code, process.killed_because or event.error)
        process.to(WorkerState.EXITED)

    def _on_unkillable(self, process: Process, why: str) -> None:
        self._has_ended(process, self.processes.standing(process), -signal.SIGKILL, why)

    def _has_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        if process.peer is not None:
            reason = self.broker.facts.gave_up(process.peer, process.incarnation) if code == 0 and not error else ""
            if reason and self.options.recover is not Recover.FAIL:
                # The worker hasn't finished, whatever its exit code is: other workers are still waiting in the
                # collective in which this worker was interrupted.
                code, error = 1, f"could not go on ({reason}) and {how_it_ended(code)}"
            # First mark the worker as lost, because the other workers wait for this mark. They continue without a
            # failed worker, but not without a worker that has finished the program.
            self.broker.mark_lost(
                process.peer,
                error or how_it_ended(code),
                process.incarnation,
                recover=standing is not Standing.MEMBER or code != 0,
                reaped=process.state is not WorkerState.UNKILLABLE,
            )
        self.events.worker_ended(process, standing, code, error)

    def lose_host(self, name: str, why: str) -> None:
        """Record that a host has failed together with all of its workers."""
        failed = [(process, self.processes.standing(process)) for process in self.processes if process.host == name]
        reason = f"was on host {name}, which was lost: {why}"
        for process, _ in failed:
            self.processes.remove(process)
        self.broker.lose_host(name, [(p.peer, p.incarnation) for p, _ in failed if p.peer is not None], reason)
        for process, standing in sorted(failed, key=lambda each: each[0].rank):
            # A process that survived SIGKILL has already been reported as exited. The exit of a standby reveals
            # nothing about the program.
            if process.state is not WorkerState.UNKILLABLE and process.peer is not None:
                self.events.worker_ended(process, standing, 1, process.killed_because or reason)
            process.to(WorkerState.EXITED)

    def forget_processes_on(self, host: str) -> None:
        """Forget a failed host's processes, because the job ends after the failure and must not wait for them."""
        for process in self.processes:
            if process.host == host:
                self.processes.remove(process)
                process.to(WorkerState.EXITED)

    def has_processes_on(self, host: str) -> bool:
        """Return whether processes may still exist on the host."""
        return any(p.host == host and p.state is not WorkerState.UNKILLABLE for p in self.processes)

    def add_agent(self, agent: AgentHandle) -> None:
        """Add a host that has joined the job, or has come back."""
        self.cores.joined(agent)
        self.agents[agent.name] = agent
        self.broker.versions.host_is_back(agent.name)

    def end_kept_leavers(self) -> None:
        """If all remaining members want to leave, none may leave. Then end each member that got a SIGTERM."""
        living = self.processes.living_members()
        if self.coordinator.leaving.issuperset(living):
            self.ending.tell_again(living)

    def _on_committed(self, cluster: Cluster, step: int | None) -> None:
        """Record that the members have agreed on a cluster version. `step`: the step after which they adopt it."""
        self._follow_watch.committed()
        _log.info(
            "cluster committed: version=%d workers=%d step=%s",
            cluster.version, cluster.size, "none" if step is None else step,
        )  # fmt: skip
        self.events.version_committed(cluster, step)
        for process in self.processes:
            standing = self.processes.standing(process)
            if process.leave_timer is None and standing is Standing.LEAVING:
                self.limit_leave(process, cluster.version)
                self.events.emit(e.WorkerRemoved(**process.named, version=cluster.version))
            elif standing is Standing.MEMBER and process.peer in cluster.workers:
                process.rank = cluster.workers.index(process.peer)
        staying = self.processes.of_standing(Standing.MEMBER, Standing.JOINING, Standing.STANDBY)
        self.coordinator.leaving &= {p.peer for p in staying if p.peer is not None}
        # Retry each worker that couldn't be started, for example because no file descriptor was free.
        self.starting.missing(self.coordinator.newest)
        self.cores.move(cluster)
        self._loop.call_later(self.machine.standby_delay_s, self.prestarted.keep)
        self.events.version_followed()

    def _on_ready(self, ready: tuple[PeerID, int] | int) -> None:
        """Record that a process is ready to join or has joined.

        `ready`: a worker's peer ID and incarnation, or the number that identifies a standby.
        """
        for process in self.processes:
            is_it = ready == (process.standby if process.peer is None else (process.peer, process.incarnation))
            if not is_it or process.is_registered:
                continue
            process.is_registered = process.peer is not None
            self.events.emit(e.WorkerRegistered(**process.named, standby=process.standby))
            if self.processes.standing(process) in (Standing.JOINING, Standing.STANDBY):
                _log.info("worker ready: %s", process.who)
                if process.peer is None:
                    self.prestarted.keep()  # the next standby waits until this one is ready

    def _on_trouble(self, trouble: str) -> None:
        """Record why a version's shared memory can't be made. Until the memory is made, the cluster stays unchanged."""
        if self.events.is_over:
            return
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning('shared memory failed: error="%s" action=retry. The workers go on as before', trouble)
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._prepare_again)

    def _prepare_again(self) -> None:
        self._retry = None
        self.broker.prepare()

    def _on_prepared(self, version: int) -> None:
        self._follow_watch.prepared(version)
        self.events.version_prepared(version)

    def limit_leave(self, process: Process, version: int) -> None:
        """After -leave-grace, stop waiting for a process that isn't in cluster version `version`, and free its slot."""
        grace_s = self.options.leave_grace_s
        process.leave_timer = self._loop.call_later(grace_s, self._on_grace_over, process, version)

    def _on_grace_over(self, process: Process, version: int) -> None:
        if process.is_ending or self.events.is_over:
            return
        process.to(WorkerState.OVERDUE)
        self.events.worker_works_on(process, version)
        self.ending.clear_slots()
