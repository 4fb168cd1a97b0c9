"""How the controller handles hosts that fail, leave or join while a job runs."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from dataclasses import dataclass
from typing import Any, Callable

from ms_kungfu import job_events as e
from ms_kungfu._words import counted
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.controller.snapshot_writer import SnapshotWriter
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.policy import Action, Recover, Verdict

_log = logging.getLogger(__name__)

# How a host leaves. The host's agent reports a SIGTERM. From then on:
#   1. No new worker is placed on the host (`Hosts.check`, `Hosts.slots_by_host`). Each revision excludes the host's
#      workers, even if other writers list them (`Coordinator.going`). These workers leave like any other worker, after
#      a step that all members have agreed on. So all members have finished the same steps, and trained on the same
#      samples.
#   2. When the workers have exited and a version without the host is committed, the controller removes the host in the
#      same way as a failed host. Then the host's launcher exits with 0. Inter-host transports of the previous version
#      may still have connections to the host. That is safe, because every other host already has all results that the
#      leaving host's workers have received (transport.h): a version is committed only when each remaining member has
#      reached the agreed step. If another host lacks a result, its members are notified of the leaving host's loss
#      before they wait for that host, and continue as after a host failure.
#   3. After -leave-grace, the controller kills the workers that are left on the host. That counts as a failure. Then
#      the controller removes the host without waiting for the commit in step 2. The version without the host follows
#      from the failures of the host's workers.
# Other events in the meantime are handled separately:
#   - If the connection ends, the host counts as failed.
#   - If workers fail or more hosts want to leave, each revision checks that enough members stay. If not, the job ends.
#   - A pending resize is revised. A new resize is rejected if it needs the host.
#   - If members complete the program, no more workers leave. The host then leaves when the job ends, or after
#     -leave-grace.
#   - The host may come back with -join. `joining` explains how its two memberships are distinguished.


@dataclass(eq=False)
class JobNodes:
    """Implements `remote_agent.NodeEvents`.

    `status()` returns the job's status. `left_s()` returns the number of seconds until the job's -timeout.
    `interrupted` ends the job, and `hurry` ends it at once.
    """

    job: JobContext
    snapshot: SnapshotWriter
    status: Callable[[], dict[str, Any]]
    left_s: Callable[[], float | None]
    interrupted: Callable[[int, str], None]
    hurry: Callable[[], None]
    has_left = False  # whether the controller's own host has left, so that another host controls the job

    def __post_init__(self) -> None:
        self._graces: dict[str, asyncio.TimerHandle] = {}  # host that leaves -> timer of -leave-grace
        self._leaving_early: list[str] = []  # hosts that left before this controller knew the job's hosts
        # exit code of the first worker that exits while a host's loss is about to be reported
        self.exit_code: int | None = None

    @property
    def hosts(self) -> Hosts:
        return self.job.coordinator.hosts

    @property
    def has_stood_still(self) -> bool:
        return self.job.leadership.has_stood_still

    # ---- hosts that fail ----

    def host_lost(self, name: str, reason: str) -> None:
        job = self.job
        is_the_heads = name == job.options.hosts.self_name and not job.leadership.moves
        if job.options.recover is Recover.FAIL or not job.has_begun or is_the_heads:
            lost = f"host {name} is lost: {reason}" if job.options.hosts.is_several else reason
            job.events.emit(e.HostLost(host=name, reason=reason))
            if job.manager is not None:
                job.manager.forget_processes_on(name)
            job.course.settle(policy.host_lost(lost, self.exit_code))
        elif not job.course.is_over:
            _log.warning('host lost: host=%s reason="%s"', name, reason)
            job.events.emit(e.HostLost(host=name, reason=reason))
            job.history.note(f"host {name} is lost: {reason}")
            self.snapshot.once_noted(name, lambda: self._lose(name, reason))

    def _lose(self, name: str, reason: str) -> None:
        self._forget(name, reason)
        if self.job.remote is not None:
            self.job.remote.tell_lost(name)
        self.job.revisions.write()
        self.let_go()

    def _forget(self, name: str, reason: str) -> None:
        grace = self._graces.pop(name, None)
        if grace is not None:
            grace.cancel()
        self.job.coordinator.hosts = self.hosts.without(name)
        self.job.workers.lose_host(name, reason)

    def disconnected(self, host: str, other: str, reason: str) -> None:
        self.job.events.emit(e.HostsDisconnected(host=host, other=other, reason=reason))

    def hosts_apart(self, reason: str) -> None:
        self.job.course.settle(policy.host_lost(reason, self.exit_code))

    # ---- hosts that leave ----

    def host_leaves(self, name: str) -> None:
        job = self.job
        if job.resumes:
            self._leaving_early.append(name)
            return
        if job.course.is_over or not job.options.watch or not job.has_begun:
            self.interrupted(signal.SIGTERM, f" on host {name}")
            return
        hosts = self.hosts
        if name in hosts.leaving or name in hosts.lost:
            return
        when = "when the store answers" if job.leadership.awaits_store else "after this step"
        _log.warning("host leaving: host=%s reason=SIGTERM. Its workers leave %s", name, when)
        job.events.emit(e.HostDraining(host=name, reason="SIGTERM"))
        job.history.note(f"host {name} is leaving")
        job.coordinator.hosts = hosts.letting_go(name)
        self._graces[name] = job.loop.call_later(job.options.leave_grace_s, self._on_grace_over, name)
        if self.has_enough_who_stay():
            job.workers.prestarted.keep()
            job.revisions.write()
            self.let_go()

    def resumed(self) -> None:
        """Process the requests to leave that arrived before this controller knew the job's hosts."""
        for name in self._leaving_early:
            self.host_leaves(name)

    def has_enough_who_stay(self) -> bool:
        """Return whether enough members remain when the leaving hosts have left. If not, end the job."""
        job, leaving = self.job, self.hosts.leaving
        if not leaving or job.coordinator.finishing:
            return True
        living = job.workers.processes.living_members()
        left = [peer for peer in living if peer.host not in leaving and peer not in job.coordinator.leaving]
        return job.course.settle(policy.hosts_leave(" and ".join(sorted(leaving)), len(left), job.options.min_size))

    def _on_grace_over(self, name: str) -> None:
        del self._graces[name]
        if not self.job.course.is_over:
            grace_s = self.job.options.leave_grace_s
            reason = f"was on host {name}, which leaves, for more than {grace_s:g} s (-leave-grace)"
            self.job.workers.ending.all_on(name, reason)
            self.let_go()

    def let_go(self) -> None:
        """Release each leaving host on which the job has no more work to do."""
        job = self.job
        for name in self.hosts.leaving:
            current = job.workers.broker.versions.current
            is_needed = current is not None and name in current.hosts
            if job.course.is_over or job.workers.has_processes_on(name) or (is_needed and name in self._graces):
                continue
            self.snapshot.once_noted(name, functools.partial(self._let_go, name))

    def _let_go(self, name: str) -> None:
        _log.info("host left: host=%s", name)
        self.job.events.emit(e.HostLeft(host=name))
        self._forget(name, "it has left the job")
        if name == self.job.options.hosts.self_name:
            self.job.in_background(self.leave())
            return
        if self.job.remote is not None:
            self.job.remote.let_go(name)
        self.job.revisions.write()

    async def leave(self) -> None:
        """Let the controller's own host leave. This doesn't end a job that has begun."""
        job, leadership = self.job, self.job.leadership
        if leadership.has_stepped_down or job.course.is_over or (leadership.resumes is None and not job.has_begun):
            return
        self.has_left = True
        await leadership.leave()
        job.course.end(Verdict(Action.FAIL, "another host controls the job", 1))

    # ---- hosts that join ----

    def objection_to(self, host: Host) -> str:
        job, hosts = self.job, self.hosts
        if not job.options.watch:
            return "the job was started without -w, so no host can join it"
        if not job.has_begun:
            return "the job has not begun yet; try again when its workers run"
        if job.course.is_over or job.coordinator.finishing:
            return "the job is about to end"
        if host.name in hosts.leaving:
            return f"{host.name} is leaving the job now; try again when it has left"
        slots = hosts.slots_by_host or {}
        if host.name in slots:
            return f"{host.name} is a host of the job already"
        total = sum(slots.values()) + (host.slots or 1)
        if total > hosts.max_workers:
            return (
                f"with {host} the job's hosts would have {counted(total, 'slot')}, but a job can have at "
                f"most {counted(hosts.max_workers, 'worker')}; join with fewer slots"
            )
        return ""

    def host_joined(self, host: Host, agent: AgentHandle) -> None:
        job = self.job
        is_back = host.name in self.hosts.names
        job.coordinator.hosts = self.hosts.joined_by(host)
        job.workers.add_agent(agent)
        self.snapshot.note_soon()
        _log.info("host joined: host=%s slots=%d rejoined=%s", host.name, host.slots or 0, "yes" if is_back else "no")
        job.events.emit(e.HostJoined(host=host.name, slots=host.slots or 0, rejoined=is_back))
        job.history.note(f"host {host.name} has {'come back to' if is_back else 'joined'} the job")
        job.revisions.write()  # add the host's slots to the store, so that a client that resizes the job can fill them
