"""The shared memory of each cluster version, called a segment.

The controller makes the hosts create a segment before it notifies workers of the version. After failures, it makes the
hosts update the segment. Later, it makes the hosts close the segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Callable, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import LeadershipLease
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.segment import MAKE_S, Progress
from ms_kungfu.launcher.state.stuck import waits_between_hosts
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m

_DOING_S = 3.0  # how long a host's report about its workers' activity is valid


class NotMadeYet(Exception):
    """The hosts are still making the segment. When it is complete or can't be made, `Broker.prepare` is called."""


class _Loss(Struct, frozen=True):
    """A process that has exited. `recover`: whether the members continue without the process."""

    peer: PeerID
    incarnation: int
    reason: str
    recover: bool
    reaped: bool


MakeSegment = Callable[[Cluster, bool], "SpreadSegment"]  # the bool: whether members continue without failed members


class Segments:
    """The segments of the cluster versions in `versions`."""

    def __init__(self, versions: ClusterVersions, recovers: bool, make: MakeSegment) -> None:
        self._versions = versions
        self._recovers = recovers
        self.make = make
        self.open: dict[int, SpreadSegment] = {}
        self._in_making: dict[int, SpreadSegment] = {}
        self._losses: list[_Loss] = []

    def of(self, cluster: Cluster) -> SpreadSegment:
        """Return the segment of a cluster version, and start making it if there is none.

        The segment is complete before the members are notified of the version, so they needn't wait for the segment.
        It is also complete before the commit, so each member has a segment.

        Raises:
            NotMadeYet: if the segment is still being made; call again later.
            Exception: if the segment can't be made because of an error of the runtime or the kernel.
        """
        segment = self.open.get(cluster.version)
        if segment is None:
            lost = self._versions.lost_host_of(cluster)
            if lost is not None:
                raise OSError(f"host {lost} is lost")
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

    def resume(self, there: Mapping[int, SpreadSegment], losses: Mapping[int, Sequence[m.Loss]]) -> None:
        """Take over the segments of the known versions, which an earlier controller has made.

        `losses`: the failures of which at least one host was notified, in the order of the notifications. `resume`
        notifies all hosts of these failures.
        """
        self.open.update(there)
        for version, each in losses.items():
            for loss in each:
                there[version].mark_lost(*loss)
        for host, last in self._versions.lost_hosts.items():
            for version, segment in there.items():
                if version <= last and host in self._versions.clusters[version].hosts:
                    self._resume_without(host, version, segment)

    def _resume_without(self, host: str, version: int, segment: SpreadSegment) -> None:
        """Notify the other hosts that `host` is lost. The previous controller might not have notified all of them."""
        for rank, worker in enumerate(self._versions.clusters[version].workers):
            if worker.host == host:
                segment.mark_lost(rank, f"was on host {host}, which was lost", True, True)
                if version == self._versions.committed:
                    self._versions.record_end(worker, self._versions.meant_by(worker, version))
        segment.lose_host(host)

    def mark_lost(self, peer: PeerID, incarnation: int, reason: str, recover: bool, reaped: bool) -> None:
        """Notify all members of the versions that contain this process of its failure.

        Segments that are made later will contain the failure, too.
        """
        self._losses.append(_Loss(peer, incarnation, reason, recover and self._recovers, reaped))
        self._tell_all(self._losses[-1])

    def lose_host(self, host: str) -> None:
        """Remove a host from all segments after all its processes have been marked lost."""
        for version, segment in self.open.items():
            if host in self._versions.clusters[version].hosts:
                segment.lose_host(host)

    def mark_reaped(self, peer: PeerID, incarnation: int) -> None:
        for place, loss in enumerate(self._losses):
            if (loss.peer, loss.incarnation) == (peer, incarnation) and not loss.reaped:
                self._losses[place] = replace(loss, reaped=True)
                self._tell_all(self._losses[place])

    def slots_of(self, peer: PeerID, incarnation: int) -> Iterator[tuple[SpreadSegment, int]]:
        """Yield each segment in which the process has a rank, together with that rank."""
        for version, segment in self.open.items():
            rank = self._versions.clusters[version].rank_of(peer)
            if rank is not None and self._versions.belongs(peer, incarnation, version):
                yield segment, rank

    def drop_unknown(self) -> None:
        """Close the segments of unknown versions."""
        for segments in (self.open, self._in_making):
            for version in set(segments) - set(self._versions.clusters):
                segments.pop(version).close()

    def drop_unlisted_losses(self) -> None:
        """Forget failed processes that no known version contains, because no member needs to know about them."""
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

    def _tell(self, segment: SpreadSegment, cluster: Cluster, loss: _Loss) -> None:
        rank = cluster.rank_of(loss.peer)
        if rank is not None and self._versions.belongs(loss.peer, loss.incarnation, cluster.version):
            segment.mark_lost(rank, loss.reason, loss.recover, loss.reaped)


class Member(Protocol):
    """A host that has a part of the segment (`remote.RemoteAgent`)."""

    name: str
    lost: str  # why the host is lost
    segments: dict[int, SpreadSegment]  # segments of which the host has made, or is making, its part
    apart: dict[tuple[int, str], str]  # (version, host that it can't reach any more) -> reason

    def send(self, message: m.FromController) -> None: ...


class Owner(Protocol):
    """The object that manages all hosts (`remote.RemoteHosts`)."""

    machine: Machine
    lease: LeadershipLease | None
    stuck_sure_s: float

    @property
    def agents(self) -> Mapping[str, Member]: ...

    def was_made(self) -> None:
        """Record that a segment has been made, or can't be made."""


class SpreadSegment:
    """The shared memory of a cluster version. It consists of a part on each host that has ranks of the version.

    Changes reach all of these hosts in the same order. Each change reaches a host before any later message to the host.

    The segment is made in the background. The hosts connect their transports to each other, and each host must report
    that its part is complete.
    """

    def __init__(self, owner: Owner, cluster: Cluster, attempt: int, recovers: bool, is_made: bool = False) -> None:
        """Begin to make the segment. `is_made`: the segment already exists on all registered hosts."""
        self.cluster, self.attempt = cluster, attempt
        self.words: dict[int, str] = {}  # rank -> why it can't continue
        self.beats: dict[int, int] = {}
        # host -> which of its ranks wait for which rank, and when the host reported that
        self._waits: dict[str, tuple[list[tuple[int, int, bool]], float]] = {}
        self._progress: dict[int, tuple[Progress, float]] = {}  # rank -> its progress, and the report's time
        self._doing: dict[int, tuple[m.Doing, float]] = {}  # rank -> its activity, and the report's time
        self._owner = owner
        self._recovers = recovers
        # The version's hosts when this object was created. A host that is lost and comes back counts as a different
        # host, which doesn't have this segment.
        self._agents = [owner.agents[host] for host in cluster.hosts if host in owner.agents]
        self._missing: dict[str, asyncio.Future[None]] = {}  # hosts that haven't reported their part yet
        self._is_made = is_made
        self._trouble: Exception | None = None
        self._is_closed = False
        self._sync_points = 0  # number of sync points that were passed on
        self._task: asyncio.Task[None] | None = None
        if is_made:
            for agent in self._agents:
                agent.segments[cluster.version] = self
        else:
            self._task = asyncio.ensure_future(self._make())

    async def _make(self) -> None:
        trouble: Exception | None = None
        loop = asyncio.get_running_loop()
        for agent in self._agents:
            agent.segments[self.cluster.version] = self
            self._missing[agent.name] = loop.create_future()
            agent.send(m.Make(self.attempt, m.ClusterPart.of(self.cluster), self._recovers))
            if agent.lost:
                self.was_made(agent.name, agent.lost, is_lost=True)
        try:
            if not self._missing:
                raise OSError("none of its hosts is still in the job")
            missing = self._missing.values()
            done, late = await asyncio.wait(missing, timeout=2 * MAKE_S, return_when=asyncio.FIRST_EXCEPTION)
            for wait in done:
                wait.result()
            if late:
                raise OSError(f"its hosts took longer than {2 * MAKE_S:g} s")
        except asyncio.CancelledError:
            trouble = OSError("the controller has given up")
        except Exception as error:
            trouble = error
        self._task = None
        self._trouble, self._is_made = trouble, trouble is None
        if not self._is_made or self._is_closed:
            self._undo()
        self._owner.was_made()

    def was_made(self, host: str, error: str, is_lost: bool = False) -> None:
        """Record that a host has made its part of the segment, or why the host can't make it.

        If the host is lost (`is_lost`), and its loss must first be written to the snapshot, members that request this
        version wait. Later they get another version, which doesn't contain the host.
        """
        missing = self._missing.get(host)
        where = f"host {host}: " if len(self._agents) > 1 else ""
        if missing is not None and not missing.done():
            if error and is_lost and self._owner.lease is not None:
                missing.set_exception(NotMadeYet(f"{where}{error}"))
                missing.exception()
            elif error:
                missing.set_exception(OSError(f"{where}{error}"))
                missing.exception()  # mark the exception as retrieved, even if another host failed first
            else:
                missing.set_result(None)

    def _undo(self) -> None:
        self._forget()
        self._tell(m.Close(self.cluster.version))

    def pass_on_sync_points(self, number: int) -> None:
        """Notify all hosts that the workers of one host have requested sync points, `number` in total."""
        if self._is_closed or number <= self._sync_points:
            return
        self._sync_points = number
        self._tell(m.Sync(self.cluster.version, number))

    def has(self, agent: Member) -> bool:
        return agent in self._agents

    def check_made(self) -> None:
        """Raise `NotMadeYet` if the segment isn't complete yet. If it can't be made, raise the error."""
        if self._trouble is not None:
            raise self._trouble
        if not self._is_made:
            raise NotMadeYet

    def announce(self, version: int) -> None:
        self._tell(m.VersionPrepared(self.cluster.version, version))

    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None:
        self._tell(m.Lost(self.cluster.version, rank, reason, recover, reaped))

    def lose_host(self, host: str) -> None:
        """Let the members continue without this host, whose ranks have all been marked lost."""
        for agent in self._agents:
            if agent.name != host:
                agent.send(m.LoseHost(self.cluster.version, host))

    def _tell(self, message: m.FromController) -> None:
        for agent in self._agents:
            agent.send(message)

    def heartbeat(self, rank: int) -> int:
        return self.beats.get(rank, 0)

    def gave_up(self, rank: int) -> str:
        return self.words.get(rank, "")

    def note_waits(self, host: str, waits: list[tuple[int, int, bool]]) -> None:
        self._waits[host] = (waits, self._owner.machine.monotonic())

    def awaited(self) -> list[tuple[int | str, int | str, bool]]:
        """Return which ranks wait for which rank, without the ranks on hosts whose report is old or missing.

        It is unknown whether ranks on these hosts are still waiting. If the same report is read twice, the second
        reading must not confirm that a rank is stuck (`stuck`, 2).
        """
        since = self._owner.machine.monotonic() - self._owner.stuck_sure_s
        fresh = {host: waits for host, (waits, reported) in self._waits.items() if reported > since}
        waits_of = {agent.name: fresh[agent.name] for agent in self._agents if not agent.lost and agent.name in fresh}
        ranks: dict[str, list[int]] = {host: [] for host in waits_of}
        for rank, peer in enumerate(self.cluster.workers):
            if peer.host in ranks:
                ranks[peer.host].append(rank)
        return waits_between_hosts(waits_of, ranks)

    def set_ending(self, rank: int, ending: bool) -> None:
        """Record whether the controller is about to end `rank`. If so, ranks that wait for `rank` don't time out."""
        self._tell(m.Ending(self.cluster.version, rank, ending))

    def note_progress(self, rank: int, progress: Progress) -> None:
        self._progress[rank] = (progress, self._owner.machine.monotonic())

    def note_doing(self, rank: int, doing: m.Doing) -> None:
        self._doing[rank] = (doing, self._owner.machine.monotonic())

    def doing(self, rank: int) -> m.Doing | None:
        """Return what rank `rank` is doing, or None if its host's report is old or missing."""
        doing, reported = self._doing.get(rank, (None, 0.0))
        return doing if self._owner.machine.monotonic() - reported < _DOING_S else None

    def progress(self, rank: int) -> Progress | None:
        if rank not in self._progress:
            return None
        (step, each_s, ago_s), reported = self._progress[rank]
        return step, each_s, ago_s + self._owner.machine.monotonic() - reported

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_made:
            self._undo()
        elif self._task is not None:
            self._task.cancel()

    def _forget(self) -> None:
        for agent in self._agents:
            if agent.segments.get(self.cluster.version) is self:
                del agent.segments[self.cluster.version]
                agent.apart = {(v, host): why for (v, host), why in agent.apart.items() if v != self.cluster.version}
