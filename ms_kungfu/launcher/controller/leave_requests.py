"""Decide which workers may leave the newest cluster version, after a request to leave or a SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Callable

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.state.policy import would_be_left
from ms_kungfu.launcher.state.versions import ClusterVersions


class LeaveRequests:
    """The part of the broker that handles requests to leave. `on_leave` and `on_last` are documented in `Broker`."""

    def __init__(
        self,
        versions: ClusterVersions,
        min_size: int,
        on_leave: Callable[[PeerID], None] | None,
        on_last: Callable[[PeerID], None],
    ) -> None:
        self._versions, self._min_size, self._on_leave, self._on_last = versions, min_size, on_leave, on_last
        self._loop = asyncio.get_running_loop()
        self.job_ends = False
        self.leaving: set[PeerID] = set()  # members that may leave but are still in the newest version
        self.evicted: set[PeerID] = set()  # peers that a resize request removes by name
        self.told_to_end: set[PeerID] = set()  # members that got a SIGTERM and may leave

    def objection(self, peer: PeerID, terminated: bool) -> str:
        """Return why `peer` can't leave. If `peer` can leave, add it to `leaving`, call `on_leave`, and return "".

        If several workers ask to leave at the same time, perhaps only the first of them may leave. If a member got a
        SIGTERM but can't leave, call `on_last`, which ends the job, and return "". This member trains until the
        launcher's signal ends it.
        """
        newest = self._versions.newest
        if self.job_ends or newest is None:
            return "the job is ending"
        if peer not in newest.workers:  # the peer is leaving already
            if terminated and self._on_leave is not None:
                self.told_to_end.add(peer)
                self._loop.call_soon(self._on_leave, peer)  # the permission to leave may have been revoked
            return ""
        left = self._versions.staying_without(peer, self.leaving)
        if self._on_leave is not None and left >= max(1, self._min_size):
            self.leaving.add(peer)
            (self.told_to_end if terminated else self.evicted).add(peer)
            self._loop.call_soon(self._on_leave, peer)
            return ""
        current = self._versions.current
        if terminated and current is not None and peer in current.workers:
            self._loop.call_soon(self._on_last, peer)
            return ""
        if left == 0:
            return f"{peer} is the last worker"
        if left < self._min_size:
            return f"{peer} can't leave: {would_be_left(left, self._min_size)}"
        return "this launcher does not follow changes of the cluster (-w)"

    def follow(self, newest: Cluster) -> None:
        self.leaving &= set(newest.workers)
        self.evicted -= set(newest.workers)

    def note_evicted(self, peers: Iterable[PeerID]) -> None:
        """Record that a resize request removes these peers by name."""
        self.evicted.update(peers)

    def stays(self, peer: PeerID) -> None:
        """Revoke a worker's permission to leave, because too few workers would remain."""
        for peers in (self.leaving, self.evicted, self.told_to_end):
            peers.discard(peer)
