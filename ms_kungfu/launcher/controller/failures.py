"""How the controller reacts to workers that exit, leave or hang, according to the failure policy."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ms_kungfu import job_events as e
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.controller.following import CopiesWatch
from ms_kungfu.launcher.controller.job_events import exit_of
from ms_kungfu.launcher.controller.nodes import JobNodes
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.revisions import StoreWatcher
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.policy import Action, Recover, Standing, Verdict, WorkerExited, WorkerWorksOn
from ms_kungfu.launcher.state.states import WorkerState

_log = logging.getLogger(__name__)
# Pause before the controller retries a slot whose process couldn't be started. The pause doubles each time.
_START_PAUSE_S = 0.1
_MAX_START_PAUSE_S = 5.0
# An agent reports a broken connection within 0.2 s. If the connection broke because a host was lost, the loss of the
# host is reported a few seconds later.
_HOSTS_NEWS_S = 0.5
_HOSTS_TELL_S = 5.0


@dataclass(eq=False)
class WorkerFailures:
    """Implements `workers.WorkerEvents`."""

    job: JobContext
    nodes: JobNodes
    copies: CopiesWatch
    watcher: StoreWatcher | None = None
    _pause: asyncio.TimerHandle | None = field(init=False, default=None)

    @property
    def is_over(self) -> bool:
        return self.job.course.is_over

    @property
    def awaits_store(self) -> bool:
        return self.job.leadership.awaits_store

    # ---- events ----

    def emit(self, event: e.Event) -> None:
        self.job.events.emit(event)

    def worker_reports(self, process: Process, events: Sequence[e.Event], steps: e.StepReport | None) -> None:
        for event in events:
            event.host, event.rank = process.host, process.rank if event.rank is None else event.rank
            self.emit(event)
        if steps is not None:
            self.job.statistics.add(process.rank, steps)

    def _emit_end(self, process: Process, standing: Standing, code: int, error: str, verdict: Verdict | None) -> None:
        """Emit the exit of a process. `verdict`: the decision about its failure, or None if it hasn't failed."""
        is_lost = process.host in self.job.coordinator.hosts.lost
        how: dict[str, Any] = {} if is_lost else exit_of(code)
        if verdict is None:
            self.emit(e.WorkerExited(**process.named, **how, reason=error))
            return
        progress = None if process.peer is None else self._progress(process.peer, process.incarnation)
        self.emit(
            e.WorkerFailed(
                **process.named, **how, pid=process.pid, step=progress, reason=error or policy.how_it_ended(code),
                decision=verdict.action.value, standing=standing.value,
            )
        )  # fmt: skip

    def _progress(self, peer: PeerID, incarnation: int) -> int | None:
        told = self.job.workers.broker.facts.progress(peer, incarnation)
        return None if told is None else told[0]

    # ---- workers that exit ----

    def worker_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        self._note_end(process, standing, code, error)
        self.nodes.let_go()

    def _note_end(self, process: Process, standing: Standing, code: int, error: str) -> None:
        job, coordinator, who = self.job, self.job.coordinator, process.who
        dismissed = process.state is WorkerState.DISMISSED
        counted_on = standing in (Standing.MEMBER, Standing.JOINING) and process.peer in coordinator.newest.workers
        finished = standing is Standing.MEMBER and code == 0
        coordinator.finishing = coordinator.finishing or finished
        if standing is Standing.STANDBY and dismissed:
            self._emit_end(process, standing, code, error, None)
            return  # the process wasn't needed
        if dismissed:
            code = 0  # the controller itself has ended the worker and logged that
        elif not self.is_over and code == 0 and process.peer is not None:
            _log.info("worker exited: %s code=%d", who, code)
        if finished:
            job.course.finishes()
            coordinator.member_finished(who)
            job.workers.prestarted.expect_none()
        logs = job.workers.logs_of(process)
        restarts = coordinator.restarts_of(process.slot, job.loop.time())
        late = coordinator.count_late(process.slot, process.is_late)
        ended = (process.peer, process.incarnation) in job.workers.broker.facts.ended_programs
        exited = WorkerExited(who, standing, code, error, logs, restarts, late, ended, process.key)
        verdict = coordinator.decide(exited, job.workers.processes.headcount())
        self._emit_end(process, standing, code, error, verdict if code and not self.is_over else None)
        if verdict.action is Action.FAIL and self._may_be_of_the_hosts(verdict):
            return
        if not self._settle(verdict):
            if code != 0 and logs and not job.course.has_ended_well:
                _log.info('worker logs: %s files="%s"', who, logs)
            return
        if code != 0 and standing in (Standing.MEMBER, Standing.JOINING):
            if coordinator.member_failed(exited):
                _log.warning(
                    "program failed: %s exit_code=%d. Even if the others finish, the job ends with this code", who, code
                )
        self._continue_without(process, standing, verdict, counted_on)

    def _settle(self, verdict: Verdict) -> bool:
        if verdict.action is Action.FINISH:
            self.copies.warn(ended=True)
        return self.job.course.settle(verdict)

    def _may_be_of_the_hosts(self, verdict: Verdict) -> bool:
        """Return whether a connection problem between hosts may have caused the worker's failure.

        If hosts can't reach each other, a host soon reports the problem, and the report ends the job. If no report
        arrives, the worker's failure ends the job.
        """
        job, remote = self.job, self.job.remote
        if self.is_over or job.options.recover is not Recover.FAIL or remote is None:
            return False
        if self.nodes.exit_code is None:
            if not remote.reachability.is_in_trouble():
                return False
            self.nodes.exit_code = verdict.exit_code
            until = job.loop.time() + _HOSTS_TELL_S + (job.options.host_timeout_s or 0)
            job.loop.call_later(_HOSTS_NEWS_S, self._settle_unless_told, verdict, until)
        return True

    def _settle_unless_told(self, verdict: Verdict, until: float) -> None:
        job = self.job
        if job.remote is not None and job.remote.reachability.are_apart() and job.loop.time() < until:
            job.loop.call_later(_HOSTS_NEWS_S, self._settle_unless_told, verdict, until)
        else:
            self._settle(verdict)

    def _continue_without(self, process: Process, standing: Standing, verdict: Verdict, counted_on: bool) -> None:
        """Continue without a process that has exited. `counted_on`: whether the newest cluster contains its peer ID."""
        job, coordinator, now = self.job, self.job.coordinator, self.job.loop.time()
        pause_s = 0.0
        if process.pid is None:  # the process couldn't be started, and an immediate retry would probably fail as well
            pause_s = min(_START_PAUSE_S * 2 ** coordinator.restarts_of(process.slot, now), _MAX_START_PAUSE_S)
        if standing is Standing.STANDBY:
            if verdict.action is Action.REPLACE:
                coordinator.count_restart(process.slot, now)
            else:
                job.workers.prestarted.keep_fewer()
            job.loop.call_later(pause_s, job.workers.prestarted.keep)
        elif verdict.action in (Action.SHRINK, Action.REPLACE):
            if verdict.action is Action.REPLACE and counted_on:
                if pause_s:
                    coordinator.pausing.append(process.slot)
                    self._pause = self._pause or job.loop.call_later(pause_s, self._on_pause_over)
                else:
                    coordinator.vacant.append(process.slot)
            job.revisions.write()

    def _on_pause_over(self) -> None:
        self.job.coordinator.end_pause()
        self._pause = None
        self.job.revisions.write()

    def end_pause_if_filled(self) -> None:
        """End the pause early if no slot waits for the end of the pause any more.

        A slot waits if its process couldn't be started. The wait ends early if another writer requests a newer cluster
        version.
        """
        if self._pause is not None and not self.job.coordinator.pausing:
            self._pause.cancel()
            self._pause = None

    def worker_reaped(self, process: Process) -> None:
        self.job.revisions.write()
        self.nodes.let_go()

    # ---- workers that leave ----

    def worker_works_on(self, process: Process, version: int) -> None:
        job = self.job
        overdue = WorkerWorksOn(process.who, version, job.options.leave_grace_s)
        self._settle(job.coordinator.decide(overdue, job.workers.processes.headcount()))

    def worker_leaves(self, peer: PeerID) -> None:
        job, workers, leaving = self.job, self.job.workers, self.job.coordinator.leaving
        for process in workers.processes.of_standing(Standing.MEMBER, Standing.JOINING):
            if process.peer == peer:
                if peer in leaving:  # the worker got a SIGTERM as well
                    workers.end_kept_leavers()
                    return
                left = [other for other in workers.processes.living_members() if other != peer and other not in leaving]
                why = "it got a SIGTERM" if peer in workers.broker.leaves.told_to_end else "the program evicts it"
                has_steps = self._progress(peer, process.incarnation) is not None
                verdict = policy.leaves(process.who, why, has_steps, len(left), job.options.min_size)
                if not self._settle(verdict):
                    return
                if verdict.action is Action.SHRINK:
                    leaving.add(peer)
                    self.emit(e.WorkerDraining(**process.named, reason=why))
                    job.revisions.write()
                else:
                    workers.ending.tell_again({peer})
                    workers.broker.leaves.stays(peer)
                return

    def last_worker_terminated(self, peer: PeerID) -> None:
        """End the job as after a SIGTERM to the launcher, so that the workers write a checkpoint.

        A scheduler may send SIGTERM to all processes of a job. The job then ends because of the launcher's own signal
        or the worker's, whichever is handled first.
        """
        for process in self.job.workers.processes.of_standing(Standing.MEMBER):
            if process.peer == peer:
                self.job.course.interrupted(signal.SIGTERM, f" at {process.who}")

    # ---- cluster versions ----

    def version_committed(self, cluster: Cluster, step: int | None) -> None:
        self.job.course.resized(is_newest=cluster.version >= self.job.coordinator.newest.version)
        self.job.history.committed(cluster, step)
        self.job.statistics.changed(self.job.machine.monotonic())

    def version_prepared(self, version: int) -> None:
        self.job.history.prepared(version)

    def version_unknown(self, version: int) -> None:
        if self.watcher is not None:
            self.watcher.look_now()

    def version_followed(self) -> None:
        self.nodes.let_go()
