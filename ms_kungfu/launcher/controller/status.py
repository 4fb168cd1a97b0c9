"""The job's status as a document (`kungfu-run status`).

Each query gets a new document, which is created in the event loop. No part of the job waits for the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.history import History
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.policy import Standing
from ms_kungfu.launcher.state.states import JobState, WorkerState


def describe(document: dict[str, Any], manager: WorkerManager, coordinator: Coordinator, history: History) -> None:
    """Add the state of a job that has begun to `document`."""
    current, newest = manager.broker.versions.current, coordinator.newest
    hosts = coordinator.hosts
    document.update(
        job=manager.begun.writer,
        config_server=manager.begun.url,
        hosts=[{"name": name, "lost": name in hosts.lost, "state": hosts.state_of(name).value} for name in hosts.names],
        cluster=None if current is None else _summary(current),
        wanted=None if current is None or newest.version <= current.version else _summary(newest),
        processes=[_process(process, manager, coordinator) for process in _in_order(manager)],
        changes=[msgspec.to_builtins(change) for change in history.changes],
    )
    if document["state"] == JobState.RESIZING.value:
        document["why"] = _missing(manager, newest)


def last_step(processes: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the highest step that a member among `processes` has finished, or None if no step is known."""
    steps = [each["step"] for each in processes if each["standing"] == Standing.MEMBER.value]
    return max((step for step in steps if step), default=None)


def _summary(cluster: Cluster) -> dict[str, int]:
    return {"version": cluster.version, "size": cluster.size}


def _in_order(manager: WorkerManager) -> list[Process]:
    order = list(Standing)
    return sorted(manager.processes, key=lambda p: (order.index(manager.processes.standing(p)), p.rank, p.key))


def _missing(manager: WorkerManager, desired: Cluster) -> str:
    """Return what the change to `desired` waits for."""
    ready = sum(manager.broker.is_ready(p.peer, p.incarnation) for p in _joining(manager) if p.peer is not None)
    missing = len(_joining(manager)) - ready
    if missing:
        return f"cluster version {desired.version} waits for {counted(missing, 'worker')} to start"
    return f"the workers adopt cluster version {desired.version} at their next step"


def _joining(manager: WorkerManager) -> list[Process]:
    return manager.processes.of_standing(Standing.JOINING)


def _process(process: Process, manager: WorkerManager, coordinator: Coordinator) -> dict[str, Any]:
    standing = manager.processes.standing(process)
    progress = None if process.peer is None else manager.broker.facts.progress(process.peer, process.incarnation)
    step, each_s, ago_s = (None, None, None) if progress is None else progress
    return {
        "rank": process.rank if standing in (Standing.MEMBER, Standing.JOINING) else None,
        "host": process.host,
        "peer": None if process.peer is None else str(process.peer),
        "pid": process.pid,
        "joined_with": None if process.peer is None else process.incarnation,
        "standing": standing.value,
        "state": process.state.value,
        "why": _why(process, standing, manager, coordinator),
        "device": manager.agents[process.host].devices.name_of(process.device),
        "step": step,
        "step_s": each_s or None,
        "step_ended_s_ago": ago_s if step else None,
    }


def _why(process: Process, standing: Standing, manager: WorkerManager, coordinator: Coordinator) -> str:
    """Return what a process does or waits for, or "" if the process's state already says that."""
    if process.killed_because:
        return f"it {process.killed_because}"
    if process.state is WorkerState.DISMISSED:
        return "not needed"
    if process.pid is None:
        return ""
    if manager.hanging.is_stopped(process):
        return "stopped by a signal"
    if process.gave_up:
        return "can't go on, expected to exit"
    if standing is Standing.STANDBY:
        ready = process.standby in manager.broker.requests.ready_standbys
        return "standby, ready" if ready else "standby, not ready yet"
    assert process.peer is not None
    ready = manager.broker.is_ready(process.peer, process.incarnation)
    if standing is Standing.JOINING:
        return "joining, ready" if ready else "joining, not ready yet"
    if standing is Standing.LEAVING:
        return "has left the cluster, its program still runs"
    if _is_to_leave(process.peer, coordinator):
        return "leaves after this step"
    return "" if ready else "hasn't joined yet"


def _is_to_leave(peer: PeerID, coordinator: Coordinator) -> bool:
    return peer in coordinator.leaving or peer not in coordinator.newest.workers
