"""How a new controller takes over a running job, using the leader snapshot, the store and the hosts' resync reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Callable

from ms_kungfu import env
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.controller.etcd_lease import RENEW_S
from ms_kungfu.launcher.controller.nodes import JobNodes
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.resuming import resume
from ms_kungfu.launcher.controller.snapshot_writer import SnapshotWriter
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.hosts import HostError
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, Term

_log = logging.getLogger(__name__)
# time for the hosts of a running job to register with its new controller, unless -host-timeout sets it
_GATHER_S = 10.0
# Each controller has this many numbers for its attempts to create shared memory, so that no two controllers use the
# same number.
_ATTEMPTS = 1 << 16


def start_of(job: JobContext, snapshot: LeaderSnapshot, term: Term) -> JobStart:
    """Return what the job began with, in the same form as `startup.prepare`. This controller already has the lease."""
    store = job.machine.open_store(job.options.config_server or "", term.secret, writer=snapshot.job)
    return JobStart(
        env.JOIN_TIMEOUT.get(job.machine.environ), term.secret, snapshot.first, snapshot.job,
        job.options.config_server, store=store, attempts=term.lease.since * _ATTEMPTS,
    )  # fmt: skip


async def take_over(
    job: JobContext,
    snapshot: LeaderSnapshot,
    nodes: JobNodes,
    notes: SnapshotWriter,
    remote: RemoteHosts,
    new_manager: Callable[[], WorkerManager],
) -> WorkerManager | None:
    """Take over the job. Return the workers' manager.

    Return None if hosts have left this controller because it was paused.
    """  # fmt: skip
    options, leadership, coordinator, store = job.options, job.leadership, job.coordinator, job.begun.store
    current = snapshot.versions.current
    assert current is not None
    assert store is not None
    coordinator.finishing = snapshot.finishing
    coordinator.resume_failures(*snapshot.failures)
    desired, _ = await asyncio.gather(
        _desired(job.machine, store),
        remote.gather_again(options.host_timeout_s or _GATHER_S, snapshot.silent, leadership.time_to_ask),
    )
    missing = remote.gathering.missing()
    if missing and remote.was_left:
        await leadership.step_down(remote.registered())
        return None
    manager = job.manager = new_manager()
    job.course.begins()
    notes.resume(snapshot.told, current)
    is_behind = False
    if desired is not None and desired.version > current.version:
        coordinator.last_version = desired.version
        # If the desired cluster has slots on failed hosts, write a revision, as if the hosts had failed now.
        is_behind = any(worker.host in coordinator.hosts.lost for worker in desired.workers)
        why_not = None if is_behind or _can_run(job, desired) else "the controller that had to run it is lost"
        if not job.history.knows(desired):
            job.history.desired(desired, current, job.begun.writer, refused=why_not)
        if why_not is None:
            coordinator.newest = desired
            job.course.resizes()
        else:
            manager.broker.refuse(desired.version, why_not)
    if snapshot.finishing:
        job.course.finishes()
    newest = coordinator.newest
    lost = [worker for worker in current.workers if worker.host in snapshot.lost]
    coordinator.resume_losses(lost)
    resume(manager, snapshot.versions, remote.reports, newest if newest.version > current.version else None)
    job.begun.cpu_isa = max((report.cpu_isa for report in remote.reports.values()), default="") or None
    manager.cores.resume(max((report.cores for report in remote.reports.values()), default=0))
    coordinator.leaving |= {PeerID.parse(peer) for report in remote.reports.values() for peer in report.leaving}
    remote.catch_up()
    verdict = coordinator.takes_over(lost, manager.processes.headcount())
    if verdict is not None:
        job.course.settle(verdict)
    job.history.note(f"host {options.hosts.self_name} controls the job from now on")
    for name in missing:
        nodes.host_lost(name, "its launcher didn't register with the job's new controller")
    if not missing and not is_behind and newest.version > current.version:
        manager.starting.missing(newest)
        manager.broker.prepare()  # necessary if no worker has to start
    job.revisions.write()
    return manager


async def _desired(machine: Machine, store: ClusterStore) -> Cluster | None:
    while True:
        try:
            return await machine.in_thread(store.get)
        except StoreUnreachableError:
            await asyncio.sleep(RENEW_S)
        except ConfigServerError as error:  # a client has written an invalid cluster
            _log.warning('cluster rejected: error="%s". The job goes on as it is', error)
            return None


def _can_run(job: JobContext, cluster: Cluster) -> bool:
    with contextlib.suppress(HostError):
        job.coordinator.hosts.check(cluster, ())
        return True
    return False
