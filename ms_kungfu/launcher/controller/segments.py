"""The shared memory of each cluster version: made before anybody hears of it, told of the dead, closed at last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.state.segment import MakeSegment, NotMadeYet, Segment
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m


@dataclass(frozen=True)
class _Loss:
    """A process that has ended; with `recover` the members go on without it."""

    peer: PeerID
    incarnation: int
    reason: str
    recover: bool
    reaped: bool


class Segments:
    """Those of the `versions` that are known."""

    def __init__(self, versions: ClusterVersions, recovers: bool, make: MakeSegment) -> None:
        self._versions = versions
        self._recovers = recovers
        self.make = make
        self.open: dict[int, Segment] = {}
        self._in_making: dict[int, Segment] = {}
        self._losses: list[_Loss] = []

    def of(self, cluster: Cluster) -> Segment:
        """The segment of a version. Made before the members hear of it, so that they needn't wait for it, and before it
        is committed, so that nobody is without one. Raises what the runtime or the kernel has against it, or
        `NotMadeYet`: it is on its way, and to be asked for again."""
        segment = self.open.get(cluster.version)
        if segment is None:
            lost = self._versions.lost_host_of(cluster)
            if lost is not None:
                raise OSError(f"host {lost} has gone")
            segment = self._in_making.pop(cluster.version, None) or self.make(cluster, self._recovers)
            try:
                segment.check_made()
            except NotMadeYet:
                self._in_making[cluster.version] = segment
                raise
            except BaseException:
                segment.close()
                raise
            self.open[cluster.version] = segment
            segment.announce(cluster.version)
            for loss in self._losses:
                self._tell(segment, cluster, loss)
        return segment

    def resume(self, there: Mapping[int, Segment], losses: Mapping[int, Sequence[m.Loss]]) -> None:
        """What hosts have of the versions that are known, and the `losses` that some host has been told of, in order:
        now all are."""
        self.open.update(there)
        for version, told in losses.items():
            for loss in told:
                there[version].mark_lost(*loss)
        for host, last in self._versions.lost_hosts.items():
            for version, segment in there.items():
                if version <= last and host in self._versions.clusters[version].hosts:
                    self._resume_without(host, version, segment)

    def _resume_without(self, host: str, version: int, segment: Segment) -> None:
        """The controller before had it on record that this host is lost, and may not have told all others."""
        for rank, worker in enumerate(self._versions.clusters[version].workers):
            if worker.host == host:
                segment.mark_lost(rank, f"was on host {host}, which was lost", True, True)
                if version == self._versions.committed:
                    self._versions.record_end(worker, self._versions.meant_by(worker, version))
        segment.lose_host(host)

    def mark_lost(self, peer: PeerID, incarnation: int, reason: str, recover: bool, reaped: bool) -> None:
        """Tells all members whose version means this process, also in segments that are made later."""
        self._losses.append(_Loss(peer, incarnation, reason, recover and self._recovers, reaped))
        self._tell_all(self._losses[-1])

    def lose_host(self, host: str) -> None:
        """After all processes there have been marked lost."""
        for version, segment in self.open.items():
            if host in self._versions.clusters[version].hosts:
                segment.lose_host(host)

    def mark_reaped(self, peer: PeerID, incarnation: int) -> None:
        for place, loss in enumerate(self._losses):
            if (loss.peer, loss.incarnation) == (peer, incarnation) and not loss.reaped:
                self._losses[place] = replace(loss, reaped=True)
                self._tell_all(self._losses[place])

    def slots_of(self, peer: PeerID, incarnation: int) -> Iterator[tuple[Segment, int]]:
        """The segments in which the process has a rank, and that rank."""
        for version, segment in self.open.items():
            rank = self._versions.clusters[version].rank_of(peer)
            if rank is not None and self._versions.belongs(peer, incarnation, version):
                yield segment, rank

    def drop_unknown(self) -> None:
        """Closes the segments of versions that are not known any more."""
        for segments in (self.open, self._in_making):
            for version in set(segments) - set(self._versions.clusters):
                segments.pop(version).close()

    def drop_unlisted_losses(self) -> None:
        """Forgets the dead whom no known version means: nobody is to be told of them."""
        known, belongs = self._versions.clusters, self._versions.belongs
        self._losses = [
            loss
            for loss in self._losses
            if any(belongs(loss.peer, loss.incarnation, v) for v, c in known.items() if loss.peer in c.workers)
        ]

    def close(self) -> None:
        for segments in (self.open, self._in_making):
            for segment in segments.values():
                segment.close()
            segments.clear()

    def _tell_all(self, loss: _Loss) -> None:
        for version, segment in self.open.items():
            self._tell(segment, self._versions.clusters[version], loss)

    def _tell(self, segment: Segment, cluster: Cluster, loss: _Loss) -> None:
        rank = cluster.rank_of(loss.peer)
        if rank is not None and self._versions.belongs(loss.peer, loss.incarnation, cluster.version):
            segment.mark_lost(rank, loss.reason, loss.recover, loss.reaped)
