"""How a new controller takes over a running job's workers, using the leader snapshot and the agents' reports."""

from __future__ import annotations

from collections.abc import Mapping

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.agents import AbsentAgent
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.state.leader_snapshot import all_losses
from ms_kungfu.launcher.state.policy import CANT_RUN, Recover, Standing
from ms_kungfu.launcher.state.states import WorkerState
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m


def resume(
    manager: WorkerManager, versions: ClusterVersions, reports: Mapping[str, m.ResyncReport], desired: Cluster | None
) -> None:
    """Continue with the previous controller's cluster versions, the hosts' reports, and the desired cluster."""
    known, recovers = sorted(versions.clusters), manager.options.recover is not Recover.FAIL
    remote, broker = manager.remote, manager.broker
    living = [worker for report in reports.values() for worker in report.workers if worker.code is None]
    committed = versions.committed or 0
    joining = {PeerID.parse(w.peer): w.incarnation for w in living if w.peer is not None and w.incarnation > committed}
    losses = {version: all_losses(list(reports.values()), version) for version in known}
    broker.resume(
        {version: remote.take_over(versions.clusters[version], recovers) for version in known},
        losses, [(PeerID.parse(peer), since) for report in reports.values() for peer, since in report.slot_holders],
        joining, desired,
    )  # fmt: skip
    manager.starting.resume(manager.begun.attempts)
    remote.close_all_but(known, reports)
    agents = manager.agents
    agents.update({name: AbsentAgent(name) for name in manager.coordinator.hosts.names if name not in agents})
    current = broker.versions.current
    assert current is not None
    lost = [current.workers[rank] for rank, *_ in losses[current.version]]
    ended = _enter_reported(manager, versions, reports, lost)
    ended += _enter_unreported(manager, versions, reports, current, len(lost))
    remote.attend(manager)
    for _, process, exited in sorted(ended, key=lambda each: each[0]):
        manager.on_exit(process, exited)
    for process in manager.processes.of_standing(Standing.MEMBER):
        if process.peer is not None and process.peer in lost and process.host in reports:
            process.state = WorkerState.UNKILLABLE  # the previous controller continued the job without this process
            broker.mark_lost(
                process.peer, "was declared failed by the previous controller", process.incarnation, True, False
            )
    for process in manager.processes.of_standing(Standing.JOINING):
        manager.starting.limit_join(process, process.incarnation)
    for process in manager.processes.of_standing(Standing.LEAVING):
        manager.limit_leave(process, current.version)
    manager.prestarted.resume(max((w.standby or 0 for report in reports.values() for w in report.workers), default=0))
    manager.hanging.keep_looking_for_the_stuck()


_Ended = list[tuple[int, Process, m.Exited]]  # each with its index in the order of notifications


def _enter_reported(
    manager: WorkerManager, versions: ClusterVersions, reports: Mapping[str, m.ResyncReport], lost: list[PeerID]
) -> _Ended:
    """Record the processes that agents report. Return the processes that have exited."""
    ended: _Ended = []
    for host, report in reports.items():
        for worker in report.workers:
            peer = None if worker.peer is None else PeerID.parse(worker.peer)
            if worker.code is not None and (peer is None or not versions.concerns(peer, worker.incarnation)):
                continue
            process = manager.starting.known(worker.key, worker.log_name, host, peer, worker.incarnation, worker.rank)
            process.pid, process.device, process.standby = worker.pid, worker.device, worker.standby
            # the worker may still be waiting for its slot
            if worker.standby is not None and peer is not None and worker.code is None:
                manager.broker.requests.assign(worker.standby, peer, worker.incarnation)
            if process.pid is not None:
                process.to(WorkerState.RUNNING)
            if worker.code is not None:
                place = lost.index(peer) if peer in lost else len(lost)
                ended.append((place, process, m.Exited(worker.key, worker.code, worker.error)))
    return ended


def _enter_unreported(
    manager: WorkerManager,
    versions: ClusterVersions,
    reports: Mapping[str, m.ResyncReport],
    current: Cluster,
    last: int,
) -> _Ended:
    """Record the workers that belong to known versions but that no agent reports.

    Return the workers that were never started.
    """
    ended: _Ended = []
    for version, cluster in sorted(versions.clusters.items()):
        ended_peers = versions.ended_in(cluster)
        for rank, peer in enumerate(cluster.workers):
            incarnation = versions.meant_by(peer, version)
            is_lost = peer.host not in reports
            if version <= versions.lost_hosts.get(peer.host, -1):
                continue  # the snapshot already says that the worker's host is lost
            if peer in ended_peers or not (is_lost or version == current.version) or _has(manager, peer, version):
                continue
            process = manager.starting.known(None, "", peer.host, peer, incarnation, rank)
            if not is_lost:  # the previous controller hadn't started the worker
                ended.append((last, process, m.Exited(process.key, CANT_RUN, "was not started")))
    return ended


def _has(manager: WorkerManager, peer: PeerID, version: int) -> bool:
    """Return whether the manager knows the process that has peer ID `peer` in cluster version `version`."""
    return any(
        p.peer == peer and manager.broker.versions.belongs(peer, p.incarnation, version) for p in manager.processes
    )
