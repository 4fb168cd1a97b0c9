"""The shared memory of each cluster version: made before anybody hears of it, told of the dead, closed at last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, Protocol

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m

Progress = tuple[int, float, float]  # a training's last step, seconds of one (0: not known), seconds since


class NotMadeYet(Exception):
    """The segment is being made, on other hosts too. Whoever makes it says when that is over (`Broker.announce`)."""


class Asker(Protocol):
    """The broker's end of a connection (`broker_protocol.Connection`), or what stands for one on another host."""

    def send(self, message: m.FromBroker, fds: tuple[int, ...] = ()) -> None: ...
    def is_closed(self) -> bool: ...
    def extend(self, timeout: float | None) -> None: ...


class Segment(Protocol):
    """The shared memory of a cluster version, as the launcher holds it."""

    def check_made(self) -> None:
        """Raises `NotMadeYet`, or what the runtime or the kernel of one of its hosts has against it."""

    def hand_over(self, asker: Asker, message: m.Place, rank: int) -> None:
        """Sends `message`, and what `rank` needs to join, to the process that has this rank."""

    def announce(self, version: int) -> None: ...
    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None: ...

    def lose_host(self, host: str) -> None:
        """The members go on without this host: all of its ranks have been marked lost."""

    def heartbeat(self, rank: int) -> int: ...
    def gave_up(self, rank: int) -> str: ...
    def progress(self, rank: int) -> Progress | None: ...

    def awaited(self) -> Sequence[tuple[int | str, int | str, bool]]:
        """(rank, rank that it sleeps for, whether it is about to give up). Over several hosts the name of one stands
        for its link."""

    def set_ending(self, rank: int, ending: bool) -> None:
        """`rank` is about to be ended, or isn't after all: meanwhile those that wait for it don't give up."""

    def close(self) -> None: ...


class HostSegment(Segment, Protocol):
    """One host's, plain or linked (`links`)."""

    def awaited(self) -> list[tuple[int, int, bool]]:
        """Of this host's ranks; -1 is its link."""

    def ranks(self) -> list[int]: ...
    def failure(self) -> str: ...
    def sync_points(self) -> int: ...
    def request_sync_point(self, number: int) -> None: ...

    def hold_deadlines(self, held: bool) -> None:
        """While it is `held` no deadline of the host's ranks runs."""

    def unreachable(self) -> list[tuple[str, str]]: ...


def the_runtime() -> Any:
    """The module that has shared memory. Not loaded at the top: a job whose workers never ask for a segment starts
    without it."""
    from ms_kungfu import _core

    return _core


class PlainSegment:
    """That of a version whose workers are all on this host: the descriptor, which `close` closes, and a mapping, which
    goes with the object."""

    def __init__(self, cluster: Cluster, cores: int, recovers: bool, runtime: Callable[[], Any] = the_runtime) -> None:
        self._size = cluster.size
        self.fd: int = runtime().create_segment(cluster.size, cluster.version, cores, recovers)
        try:
            control = runtime().SegmentControl(self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        self.mark_lost, self.announce = control.mark_lost, control.announce
        self.hold_deadlines = control.hold_deadlines
        self.heartbeat, self.gave_up, self.progress = control.heartbeat, control.gave_up, control.progress
        self.awaited, self.set_ending = control.awaited, control.set_ending

    def check_made(self) -> None:
        pass

    def hand_over(self, asker: Asker, message: m.Place, rank: int) -> None:
        asker.send(message, (self.fd,))

    def lose_host(self, host: str) -> None:
        """There is no other."""

    def unreachable(self) -> list[tuple[str, str]]:
        return []

    def ranks(self) -> list[int]:
        return list(range(self._size))

    def failure(self) -> str:
        """None of a connection where there is none."""
        return ""

    def sync_points(self) -> int:
        """None that another host would have to hear of."""
        return 0

    def request_sync_point(self, number: int) -> None:
        """From another host: there is none."""

    def close(self) -> None:
        os.close(self.fd)


MakeSegment = Callable[[Cluster, bool], Segment]  # whether members outlive others


@dataclass(frozen=True)
class _Loss:
    """A process that has ended; with `recover` the members go on without it."""

    peer: PeerID
    incarnation: int
    reason: str
    recover: bool
    reaped: bool


class Segments:
    """Those of the `versions` that are known. Used by one thread at a time."""

    def __init__(self, versions: ClusterVersions, recovers: bool, make: MakeSegment) -> None:
        self._versions = versions
        self._recovers = recovers
        self.make = make
        self.open: dict[int, Segment] = {}
        self._in_making: dict[int, Segment] = {}
        self._losses: list[_Loss] = []

    def of(self, cluster: Cluster) -> Segment:
        """The segment of a version. Made before the members hear of it, so that they needn't wait for it, and before it
        is chosen, so that nobody is without one. Raises what the runtime or the kernel has against it, or `NotMadeYet`:
        it is on its way, and to be asked for again."""
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

    def places_of(self, peer: PeerID, incarnation: int) -> Iterator[tuple[Segment, int]]:
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
