"""Which cluster versions there are, which one is committed, and what each worker that asks is answered. Pure.

This is the part of the coordinator that the members rely on: nothing here knows of sockets, processes or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.wire.documents import Versions
from ms_kungfu.launcher.wire.messages import ClusterPart, Detached, Stay


@dataclass(frozen=True)
class Request:
    """What a worker asks: a member names the version it comes from and the agreed one, a joining worker neither.
    `step`: the one that its training is at, for the launcher's lines."""

    peer: PeerID
    incarnation: int
    member_of: int | None
    version: int | None
    step: int | None = None


@dataclass(frozen=True)
class StandbyRequest:
    """A spare process is ready to become whoever is needed. `number` is its name at the launcher."""

    number: int


@dataclass(frozen=True)
class Grant:
    cluster: Cluster
    rank: int


@dataclass(frozen=True)
class Refuse:
    reason: str


@dataclass(frozen=True)
class Wait:
    """There is no answer yet; `unknown` is a version that the launcher should look for."""

    unknown: int | None = None


@dataclass
class ClusterVersions:
    """Which cluster versions are known, which one is committed, who is out and who has ended.

    A process is named by its peer ID and its incarnation, the version it was started for: a peer that left and came
    back is another process, and the old one must not get the place of the new one.

    The newest version is what is wanted. Of those between it and the committed one only such are kept as lead there
    (see `_leads_to`); the others are *superseded*: nobody is told of them any more, processes that they alone needed
    are out, and a member that has agreed on one stays where it is. As this holds for ever once it does, and all members
    of the committed version have agreed on the same one, all of them get the same answer: either somebody has gone over
    to it and so do all, or nobody ever does. It also means that a process is only ever started for the newest version,
    and that every version which is still to be chosen means that same process by its peer ID.
    """

    clusters: dict[int, Cluster] = field(default_factory=dict)
    committed: int | None = None
    refused: dict[int, str] = field(default_factory=dict)  # versions that the launcher can't run, and why
    # Versions without the peer, at which its processes that were started before were out for good. Each peer that a
    # known version lists has an entry, if only an empty one (`_forget`).
    excluded: dict[PeerID, list[int]] = field(default_factory=dict)
    # Peers of whom processes have ended: from which incarnation on to which version the peer ID means such a process.
    ended: dict[PeerID, list[range]] = field(default_factory=dict)
    # Processes that have come and wait for their first version.
    ready: set[tuple[PeerID, int]] = field(default_factory=set)
    # Hosts that were lost or have left, and the last version that means those: a host that comes back is another one.
    lost_hosts: dict[str, float] = field(default_factory=dict)
    # Of a controller that has taken over: who was started, and since which version, for versions of which it doesn't
    # know. A process that ended earlier under the same name isn't meant by those.
    joining: dict[PeerID, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cluster in self.clusters.values():
            for peer in cluster.workers:
                self.excluded.setdefault(peer, [])

    def kept(self) -> Versions:
        """All of it that the next controller has to know: not who is ready, and of what isn't committed nothing."""
        kept = [ClusterPart.of(each) for each in self.clusters.values() if each.version <= (self.committed or 0)]
        return Versions(
            kept if self.committed is not None else [],
            self.committed,
            {str(peer): versions for peer, versions in self.excluded.items() if versions},
            {str(peer): [(k.start, k.stop) for k in known] for peer, known in self.ended.items()},
            [(host, None if last == math.inf else int(last)) for host, last in self.lost_hosts.items()],
        )

    @classmethod
    def of(cls, kept: Versions) -> ClusterVersions:
        return cls(
            {each.version: each.cluster() for each in kept.clusters},
            kept.chosen,
            excluded={PeerID.parse(peer): versions for peer, versions in kept.excluded.items()},
            ended={PeerID.parse(peer): [range(*ends) for ends in known] for peer, known in kept.ended.items()},
            lost_hosts={host: math.inf if last is None else last for host, last in kept.lost},
        )

    def meant_by(self, peer: PeerID, version: int) -> int:
        """The earliest incarnation that the process can have which `version` means by this peer."""
        out = [v + 1 for v in self.excluded.get(peer, ()) if v < version]
        out += [known.stop for known in self.ended.get(peer, ()) if known.stop <= version]
        return max(out, default=0)

    def concerns(self, peer: PeerID, incarnation: int) -> bool:
        """Whether the end of this process is news to members, or to those who wait for joining workers."""
        if any(incarnation < known.stop for known in self.ended.get(peer, ())):
            return False
        is_new = self.committed is not None and incarnation > self.committed
        return is_new or any(
            peer in cluster.workers and self.belongs(peer, incarnation, version)
            for version, cluster in self.clusters.items()
        )

    @property
    def current(self) -> Cluster | None:
        return None if self.committed is None else self.clusters[self.committed]

    @property
    def newest(self) -> Cluster | None:
        return self.clusters[max(self.clusters)] if self.clusters else None

    def admit(self, cluster: Cluster) -> None:
        """A version is known from now on, and is the one that is wanted. A version is never redefined."""
        newest = self.newest
        if newest is not None and cluster.version <= newest.version:
            return
        if newest is not None:
            # Whoever wrote it may not have heard of a process's end: a peer that is still listed is the one that ended.
            # One that a version has left out and that is listed again is a joining worker.
            for peer in set(cluster.workers).intersection(self.ended_in(newest)).difference(self.joining):
                self.ended[peer][-1] = range(self.ended[peer][-1].start, cluster.version + 1)
        for peer in cluster.workers:
            self.excluded.setdefault(peer, [] if self.committed is None else [self.committed])
        self.clusters[cluster.version] = cluster
        self._supersede()

    def _supersede(self) -> None:
        newest, committed = self.newest, self.committed
        if newest is None or committed is None:
            return
        for version in [v for v in self.clusters if committed < v < newest.version]:
            if not self._leads_to(self.clusters[version], newest):
                for peer in self.clusters.pop(version).workers:
                    if peer not in newest.workers and not self._is_member(peer):
                        self.excluded.setdefault(peer, []).append(newest.version)

    def _leads_to(self, cluster: Cluster, newest: Cluster) -> bool:
        """Whether going over to `cluster` first undoes nothing: it takes in nobody whom the newest version leaves out,
        and lets no member go that the newest one keeps."""
        return all(
            self._is_member(peer) or peer in newest.workers or self._has_ended(peer, cluster.version)
            for peer in cluster.workers
        ) and all(peer in cluster.workers for peer in newest.workers if self._is_member(peer))

    def commit_version(self, version: int) -> None:
        cluster = self.clusters[version]
        for known in self.clusters.values():
            for peer in known.workers:
                if peer not in cluster.workers and not self.is_out(peer, version):
                    self.excluded.setdefault(peer, []).append(version)
        # The one before is kept: its members are still in it until each of them has asked for this one.
        self.clusters = {v: c for v, c in self.clusters.items() if v >= version or v == self.committed}
        self.refused = {v: reason for v, reason in self.refused.items() if v > version}
        self.committed = version
        self._forget()

    # The entries of peers and hosts that are gone are bounded by what the known versions list, however long the job
    # runs. `test_cluster_versions.py` compares the answers with those of an object that forgets nothing.
    #
    # 1. A process is started for the newest version, which lists its peer. Its incarnation is that version. So a peer
    #    that has processes has had an entry in `excluded` since `admit`.
    # 2. If no known version lists a peer, its processes are out by an entry, or newer than the committed version. Their
    #    version was superseded or passed over by a choice, and both exclude the living workers that they drop. The
    #    newer ones were started by an earlier controller, for versions that this controller doesn't know.
    # 3. So once the committed version has passed all entries of such a peer, one rule says the same: a process is out
    #    if its incarnation is at most the committed version. `is_out` applies that rule to a peer without an entry. If
    #    a version lists the peer again, its entry begins with the committed version; the new process is newer (1).
    # 4. `belongs` and `meant_by` are asked about known versions, none of which is before the oldest. Of what is before
    #    that, only the last matters. An end whose range stops there says what an exclusion one version earlier does.
    # 5. A lost host is asked about for known versions (`lost_host_of`), and by its name, as one of the job's hosts
    #    (`LeaderSnapshot`). A writer starts from the newest version, by compare-and-swap, and so names only hosts that
    #    this version names in its workers, runners or slots. Once no known version names the host it is none of the
    #    job's: `Hosts.check` refuses workers there, and its launcher isn't in the record (`Agent._is_over_for`).
    # 6. The entry of a host that came back is needed while a known version means the host as it was before.

    def _forget(self) -> None:
        """Drop the entries that no known version can ask about any more."""
        oldest, committed = min(self.clusters), self.committed or 0
        listed = {peer for cluster in self.clusters.values() for peer in cluster.workers}
        for peer in {**self.excluded, **self.ended}:
            out, ended = self.excluded.pop(peer, []), self.ended.pop(peer, [])
            before = [*(v for v in out if v < oldest), *(known.stop - 1 for known in ended if known.stop <= oldest)]
            out = [*sorted(before)[-1:], *(v for v in out if v >= oldest)]
            ended = [known for known in ended if known.stop > oldest]
            if peer in listed or any(last > committed for last in (*out, *(known.stop - 1 for known in ended))):
                self.excluded[peer] = out
                if ended:
                    self.ended[peer] = ended
        self.lost_hosts = {
            host: last
            for host, last in self.lost_hosts.items()
            if any(version <= last and host in cluster.named_hosts for version, cluster in self.clusters.items())
        }

    def exclude_everybody(self) -> None:
        """Whoever comes is another process: all members have finished, nobody is left to choose a version that others
        were started for, and one that can't even be killed has no part in anything more."""
        newest = self.newest
        for peer in {peer for known in self.clusters.values() for peer in known.workers}:
            assert newest is not None
            self.excluded.setdefault(peer, []).append(newest.version)

    def record_end(self, peer: PeerID, incarnation: int) -> None:
        """A process has ended: every known version, and those written before their writer knew, means it by `peer`."""
        newest = self.newest
        if newest is not None and not self.is_out(peer, incarnation):
            later = self.joining.get(peer, 0)
            stop = later if later > incarnation else newest.version + 1
            self.ended.setdefault(peer, []).append(range(incarnation, stop))

    def ended_in(self, cluster: Cluster) -> list[PeerID]:
        """The workers of `cluster` whose processes have ended."""
        return [peer for peer in cluster.workers if self._has_ended(peer, cluster.version)]

    def _has_ended(self, peer: PeerID, version: int) -> bool:
        """Whether the process that `version` means by `peer` has ended."""
        return any(version in known for known in self.ended.get(peer, ()))

    def _is_member(self, peer: PeerID) -> bool:
        """Whether `peer` is in the committed cluster and lives, as far as is known: it has the state, or is getting
        it."""
        current = self.current
        return current is not None and peer in current.workers and not self._has_ended(peer, current.version)

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether this process has been excluded, or has ended. It can't come back."""
        forgotten = () if self.committed is None else (self.committed,)
        return any(incarnation <= version for version in self.excluded.get(peer, forgotten)) or any(
            incarnation < known.stop for known in self.ended.get(peer, ())
        )

    def belongs(self, peer: PeerID, incarnation: int, version: int) -> bool:
        """Whether the process is the one that `version` means by its peer ID, and not an earlier or later one."""
        return (
            incarnation <= version
            and not any(incarnation <= v <= version for v in self.excluded.get(peer, []))
            and not any(incarnation < known.stop <= version for known in self.ended.get(peer, ()))
        )

    def preparable(self) -> int | None:
        """The newest version that its members could go over to at once: all its joining workers are ready.

        A member that has ended holds up nobody: such a version has a dead rank as the present one has, until the next.
        But a version whose joining worker has ended, or in which nobody who has the state would be left, never comes
        true: the next one, which the launcher is about to write, has to be waited for, while the members train on.
        """
        for version in sorted(self.clusters, reverse=True):
            if self.committed is not None and version <= self.committed:
                return self.committed
            if self._may_come_true(self.clusters[version]) and all(
                self._is_here(peer, version) for peer in self.clusters[version].workers
            ):
                return version
        return None

    def _may_come_true(self, cluster: Cluster) -> bool:
        """Whether a member may choose it: if not, nobody ever does, for what is dead stays so. All members get the same
        answer therefore: whoever asks before a death that matters has chosen it for all."""
        # A host has its part of the memory of each version that it is in, so a lost one is in none to come.
        if self.lost_host_of(cluster) is not None:
            return False
        return self._keeps_the_state(cluster) and not any(
            self._has_ended(peer, cluster.version) and not self._was_member(peer, cluster.version)
            for peer in cluster.workers
        )

    def may_be_committed(self, version: int) -> bool:
        """Whether one that a member has asked for can still become the committed one."""
        return version in self.clusters and self._may_come_true(self.clusters[version])

    def lose_host(self, host: str) -> None:
        self.lost_hosts.pop(host, None)  # they are in the order of their losses
        self.lost_hosts[host] = math.inf

    def host_is_back(self, host: str) -> None:
        """Those versions that are known mean the one that has gone, and never come true, now as before; those to come
        mean the new one."""
        if host in self.lost_hosts:
            self.lost_hosts[host] = -1 if self.newest is None else self.newest.version

    def lost_host_of(self, cluster: Cluster) -> str | None:
        """One that `cluster` means and that isn't there any more."""
        return next((host for host in cluster.hosts if cluster.version <= self.lost_hosts.get(host, -1)), None)

    def _keeps_the_state(self, cluster: Cluster) -> bool:
        return self.committed is None or any(self._is_member(peer) for peer in cluster.workers)

    def staying_without(self, peer: PeerID, leaving: Collection[PeerID]) -> int:
        """How many members of the newest version would be left if `peer` went, and those who are `leaving`."""
        stay = set() if self.newest is None else {*self.newest.workers} - {peer, *leaving}
        return sum(map(self._is_member, stay))

    def _is_here(self, peer: PeerID, version: int) -> bool:
        if self._has_ended(peer, version) or self._is_member(peer):
            return True
        return any(who == peer and self.belongs(who, incarnation, version) for who, incarnation in self.ready)

    def _was_member(self, peer: PeerID, version: int) -> bool:
        """Whether the process that `version` means by `peer`, and that has ended, was in the committed cluster: its
        death leaves nothing there that was counted on for `version`."""
        current = self.current
        return (
            current is not None
            and peer in current.workers
            and any(version in known and current.version in known for known in self.ended.get(peer, ()))
        )

    def would_commit(self, request: Request) -> Cluster | None:
        """The cluster that an answer to `request` makes the committed one.

        Only who is in it can do so: it lives, and has the state. If all those die who have agreed on a version and are
        in it, before one of them has asked for it, nobody goes over, and those who were to leave are still there.
        """
        current = self.current
        if current is None or request.version is None or request.version <= current.version:
            return None
        cluster = self.clusters.get(request.version)
        is_next = request.member_of == current.version and request.version not in self.refused
        may = is_next and self._is_member(request.peer) and not self.is_out(request.peer, request.incarnation)
        if not may or cluster is None or request.peer not in cluster.workers:
            return None
        return cluster if self._may_come_true(cluster) else None

    def answer(self, request: Request) -> Grant | Detached | Stay | Refuse | Wait:
        """The answer to `request` now. May choose the version that a member asks for."""
        if self.is_out(request.peer, request.incarnation):
            return Detached()
        current = self.current
        if request.member_of is None:
            if current is None or request.incarnation > current.version:
                return Wait()
            rank = current.rank_of(request.peer)
            return Wait() if rank is None else Grant(current, rank)
        if request.version is None:
            return Refuse("a member must name the version that its cluster has agreed on")
        if current is None:
            return Refuse(f"no cluster version has been committed yet, so {request.peer} is no member")
        if request.version > current.version:
            if request.member_of != current.version or request.peer not in current.workers:
                return Refuse(
                    f"{request.peer}, member of cluster version {request.member_of}, asks for version "
                    f"{request.version}, but version {current.version} is the committed one"
                )
            if request.version in self.refused:
                return Refuse(f"cluster version {request.version} is refused: {self.refused[request.version]}")
            if self.newest is None or request.version > self.newest.version:
                return Wait(unknown=request.version)
            desired = self.clusters.get(request.version)
            if desired is None or not self._may_come_true(desired):
                return Stay()
            if self.would_commit(request) is None:
                return Wait()  # for one who stays
            self.commit_version(request.version)
            return self.answer(request)
        rank = current.rank_of(request.peer)
        if request.version < current.version or rank is None:
            return Refuse(
                f"{request.peer} asks for cluster version {request.version}, but version {current.version} has been "
                "committed since"
            )
        return Grant(current, rank)
