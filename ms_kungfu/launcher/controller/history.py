"""The latest changes of the cluster, each with its reason and its outcome."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, Literal

from ms_kungfu import job_events as e
from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster, writer_of_workers
from ms_kungfu.launcher.state.states import VersionState
from ms_kungfu.launcher.wire.documents import Change

_KEPT = 20


class History:
    """The latest changes of the cluster and their reasons. Use it in the event loop.

    Each change is passed to `emit` as an event.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, emit: Callable[[e.Event], None] = lambda event: None
    ) -> None:
        self._clock, self._emit = clock, emit
        self._reasons: list[str] = []  # reasons for the next cluster that the launcher writes
        self.changes: deque[Change] = deque(maxlen=_KEPT)

    def note(self, reason: str) -> None:
        """Record a reason for the next cluster that the launcher writes."""
        # If a host was lost, the reason for each of its workers repeats the reason for the host.
        removed = re.search(r" was on host (\S+), which was lost: ", reason)
        if removed is None or not any(known.startswith(f"host {removed[1]} is lost: ") for known in self._reasons):
            self._reasons.append(reason)

    def begun(self, cluster: Cluster) -> None:
        now = self._clock()
        self.changes.append(Change(cluster.version, cluster.size, None, "the job's start", now, now, state="committed"))

    def resumed(self, changes: Sequence[Change], cluster: Cluster) -> None:
        """Continue the history of the previous controller. `cluster`: the committed cluster of the job."""
        self.changes.extend(changes)
        self.committed(cluster, None)  # the snapshot records a commit earlier than `changes` does
        if not self.knows(cluster):
            now = self._clock()
            self.changes.append(
                Change(cluster.version, cluster.size, None, "by the previous controller", now, now, state="committed")
            )

    def knows(self, cluster: Cluster) -> bool:
        return any(change.version == cluster.version for change in self.changes)

    def desired(self, cluster: Cluster, before: Cluster, job: str, refused: str | None = None) -> None:
        removed = [str(worker) for worker in before.workers if worker not in cluster.workers]
        why = _who(cluster, job, removed)
        if cluster.writer == job:
            why = "; ".join(dict.fromkeys(self._reasons)) or why
            self._reasons.clear()
        size = self._running_size(before.size)
        state = VersionState.DESIRED if refused is None else VersionState.REJECTED
        now = self._clock()
        self.changes.append(Change(cluster.version, cluster.size, size, why, now, refused=refused, state=state.value))
        what: dict[str, Any] = {"version": cluster.version, "workers": cluster.size}
        self._emit(
            e.ResizeRequested(**what, workers_before=size, by=_by(cluster, job), reason=why)
            if refused is None
            else e.ResizeRejected(**what, reason=refused)
        )

    def prepared(self, version: int) -> None:
        for change in self.changes:
            if change.version == version and change.state == VersionState.DESIRED.value:
                _move(change, VersionState.PREPARED)
                self._emit(e.VersionPrepared(version=version, seconds=self._since(change)))

    def committed(self, cluster: Cluster, step: int | None) -> None:
        size = self._running_size(None)
        for change in self.changes:
            if change.state not in (VersionState.DESIRED.value, VersionState.PREPARED.value):
                continue
            if change.version == cluster.version:
                _move(change, VersionState.COMMITTED)
                change.chosen_at, change.after_step = self._clock(), step
                change.size_before = change.size_before if size is None else size
                self._emit(
                    e.VersionCommitted(
                        version=cluster.version, workers=cluster.size, workers_before=change.size_before or 0,
                        step=step, reason=change.why, seconds=self._since(change),
                    )
                )  # fmt: skip
            elif change.version < cluster.version:
                _move(change, VersionState.SUPERSEDED)

    def _since(self, change: Change) -> float:
        return round(max(0.0, self._clock() - change.wanted_at), 4)

    def _running_size(self, otherwise: int | None) -> int | None:
        """Return the size of the last committed cluster, or `otherwise` if `changes` doesn't contain a commit."""
        sizes = [change.size for change in self.changes if change.chosen_at is not None]
        return sizes[-1] if sizes else otherwise


def _move(change: Change, state: VersionState) -> None:
    change.state = VersionState(change.state).to(state, f"cluster version {change.version}").value


def _by(cluster: Cluster, job: str) -> Literal["program", "controller", "evict", "client"]:
    if cluster.writer == job:
        return "controller"
    if cluster.writer == WRITER_WHO_EVICTS:
        return "evict"
    return "program" if cluster.writer == writer_of_workers(job) else "client"


def _who(cluster: Cluster, job: str, removed: Sequence[str]) -> str:
    if cluster.writer == writer_of_workers(job):
        return "the program requested it: by a schedule, a policy or a resize call"
    if cluster.writer == job:
        return "the launcher"
    if cluster.writer == WRITER_WHO_EVICTS:
        return f"requested from outside: kungfu-run evict, of {' and '.join(removed) or 'no member'}"
    return "requested from outside: kungfu-run resize, or another client"
