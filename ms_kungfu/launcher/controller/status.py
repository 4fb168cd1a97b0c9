"""What a job tells of itself to who asks (`kungfu-run status`), as a document. Pure but for the clock that it is given.

The document is made anew for each question, in the event loop, and nothing in the job waits for who asks.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable

import msgspec

from ms_kungfu._words import counted
from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster, PeerID, writer_of_workers
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.policy import Standing
from ms_kungfu.launcher.wire.documents import Change

_KEPT = 20  # of the last changes


class History:
    """The last changes and their reasons. In the event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reasons: list[str] = []  # of what the launcher is about to write
        self.changes: deque[Change] = deque(maxlen=_KEPT)

    def note(self, reason: str) -> None:
        """Something has happened that the launcher's next cluster is the answer to."""
        # Of each worker of a lost host it is told once more that the host was lost, and why.
        gone = re.search(r" was on host (\S+), which was lost: ", reason)
        if gone is None or not any(told.startswith(f"host {gone[1]} is lost: ") for told in self._reasons):
            self._reasons.append(reason)

    def begun(self, cluster: Cluster) -> None:
        now = self._clock()
        self.changes.append(Change(cluster.version, cluster.size, None, "the job's start", now, now))

    def resumed(self, changes: Sequence[Change], cluster: Cluster) -> None:
        """By the next head of a job that runs in `cluster`: what the one before has told."""
        self.changes.extend(changes)
        self.chosen(cluster, None)  # which is told once it is on record
        if not self.knows(cluster):
            now = self._clock()
            self.changes.append(Change(cluster.version, cluster.size, None, "the head before this one", now, now))

    def knows(self, cluster: Cluster) -> bool:
        return any(change.version == cluster.version for change in self.changes)

    def wanted(self, cluster: Cluster, before: Cluster, job: str, refused: str | None = None) -> None:
        gone = [str(worker) for worker in before.workers if worker not in cluster.workers]
        why = _who(cluster, job, gone)
        if cluster.writer == job:
            why = "; ".join(dict.fromkeys(self._reasons)) or why
            self._reasons.clear()
        size = self._running_size(before.size)
        self.changes.append(Change(cluster.version, cluster.size, size, why, self._clock(), refused=refused))

    def chosen(self, cluster: Cluster, step: int | None) -> None:
        size = self._running_size(None)
        for change in self.changes:
            if change.chosen_at is not None or change.refused is not None:
                continue
            if change.version == cluster.version:
                change.chosen_at, change.after_step = self._clock(), step
                change.size_before = change.size_before if size is None else size
            elif change.version < cluster.version:
                change.dropped = True

    def _running_size(self, otherwise: int | None) -> int | None:
        """Of the cluster that was chosen last; `otherwise` where it isn't among the last changes."""
        sizes = [change.size for change in self.changes if change.chosen_at is not None]
        return sizes[-1] if sizes else otherwise


def _who(cluster: Cluster, job: str, gone: Sequence[str]) -> str:
    if cluster.writer == writer_of_workers(job):
        return "the program asked for it: a schedule, a policy or a resize of its own"
    if cluster.writer == job:
        return "the launcher"
    if cluster.writer == WRITER_WHO_EVICTS:
        return f"somebody else asked for it: kungfu-run evict, of {' and '.join(gone) or 'nobody who was there'}"
    return "somebody else asked for it: kungfu-run resize, or another client"


def describe(document: dict[str, Any], manager: WorkerManager, coordinator: Coordinator, history: History) -> None:
    """Fills in what a job that has begun knows of itself."""
    current, newest = manager.broker.current(), coordinator.newest
    lost = coordinator.hosts.lost
    document.update(
        job=manager.begun.writer,
        config_server=manager.begun.url,
        hosts=[{"name": name, "lost": name in lost} for name in coordinator.hosts.names],
        cluster=None if current is None else _summary(current),
        wanted=None if current is None or newest.version <= current.version else _summary(newest),
        processes=[_process(process, manager, coordinator) for process in _in_order(manager)],
        changes=[msgspec.to_builtins(change) for change in history.changes],
    )
    if document["state"] == "runs" and document["wanted"]:
        document.update(state="changes", why=_missing(manager, newest))


def _summary(cluster: Cluster) -> dict[str, int]:
    return {"version": cluster.version, "size": cluster.size}


def _in_order(manager: WorkerManager) -> list[Process]:
    order = list(Standing)
    return sorted(manager.processes, key=lambda p: (order.index(manager.processes.standing(p)), p.rank, p.key))


def _missing(manager: WorkerManager, wanted: Cluster) -> str:
    """What the change to `wanted` waits for."""
    ready = sum(manager.broker.is_ready(p.peer, p.incarnation) for p in _joining(manager) if p.peer is not None)
    missing = len(_joining(manager)) - ready
    if missing:
        return f"cluster version {wanted.version} waits for {counted(missing, 'worker')} to start"
    return f"the workers go over to cluster version {wanted.version} at their next step"


def _joining(manager: WorkerManager) -> list[Process]:
    return manager.processes.of_standing(Standing.JOINING)


def _process(process: Process, manager: WorkerManager, coordinator: Coordinator) -> dict[str, Any]:
    standing = manager.processes.standing(process)
    told = None if process.peer is None else manager.broker.progress(process.peer, process.incarnation)
    step, each_s, ago_s = (None, None, None) if told is None else told
    return {
        "rank": process.rank if standing in (Standing.MEMBER, Standing.JOINING) else None,
        "host": process.host,
        "peer": None if process.peer is None else str(process.peer),
        "pid": process.pid,
        "joined_with": None if process.peer is None else process.incarnation,
        "standing": standing.value,
        "state": _state(process, standing, manager, coordinator),
        "device": manager.sites[process.host].devices.name_of(process.device),
        "step": step,
        "step_s": each_s or None,
        "step_ended_s_ago": ago_s,
    }


def _state(process: Process, standing: Standing, manager: WorkerManager, coordinator: Coordinator) -> str:
    if process.given_up:
        return "hangs in the kernel"
    if process.killed_because:
        return f"is killed: it {process.killed_because}"
    if process.dismissed:
        return "is ended: it isn't needed"
    if process.pid is None:
        return "starts"
    if manager.is_stopped(process):
        return "is stopped by a signal"
    if process.is_out:
        return "can't go on, and is to end"
    if standing is Standing.STANDBY:
        ready = process.standby in manager.broker.ready_standbys()
        return "waits to be needed" if ready else "starts, to be ready when it is needed"
    assert process.peer is not None
    if standing is Standing.JOINING:
        ready = manager.broker.is_ready(process.peer, process.incarnation)
        return "joins: it is ready" if ready else "joins: it starts"
    if standing is Standing.LEAVING:
        return "has left, and works on" if process.works_on else "has left"
    if _is_to_leave(process.peer, coordinator):
        return "leaves"
    return "works" if manager.broker.is_ready(process.peer, process.incarnation) else "starts: it hasn't joined"


def _is_to_leave(peer: PeerID, coordinator: Coordinator) -> bool:
    return peer in coordinator.leaving or peer not in coordinator.newest.workers
