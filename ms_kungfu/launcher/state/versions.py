"""Track the known cluster versions and the committed version, and answer the workers' requests for slots.

This module uses no clock and no I/O.

This part of `coordinator` guarantees that all members adopt the same versions.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from msgspec import Struct, field

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.wire.documents import Versions
from ms_kungfu.launcher.wire.messages import ClusterPart, Detached, Stay


class Request(Struct, frozen=True):
    """A worker's request for a slot.

    Args:
        peer: the worker's peer ID.
        incarnation: the cluster version for which the worker's process was started.
        member_of: the cluster version that the worker is in; None for a joining worker.
        version: the cluster version on which the members have agreed; None for a joining worker.
        step: the member's training step, for the launcher's log lines.
    """

    peer: PeerID
    incarnation: int
    member_of: int | None
    version: int | None
    step: int | None = None


class StandbyRequest(Struct, frozen=True):
    """A standby is ready to take any slot. `number`: the launcher's number for the standby."""

    number: int


class Grant(Struct, frozen=True):
    cluster: Cluster
    rank: int


class Refuse(Struct, frozen=True):
    reason: str


class Wait(Struct, frozen=True):
    """There is no answer yet. If `unknown` is set, it is the number of a version that the launcher should look for."""

    unknown: int | None = None


class ClusterVersions(Struct):
    """The known cluster versions, the committed version, and the processes that are excluded or have exited.

    In this class "version" means a cluster version. A process is identified by its peer ID and its incarnation, which
    is the version for which the process was started. If a peer leaves and comes back, it is a new process, and the old
    process must not get the slot of the new process.

    1. The newest version is the desired version. A version between the committed and the newest version is kept only if
       the members can adopt it first and the newest version later, without undoing a change (`_leads_to`). Otherwise it
       is *superseded*. No member is notified of a superseded version. Processes that only a superseded version needs
       are excluded. A member that has agreed on a superseded version stays in its current version. A version isn't
       superseded while its commit is being written to the leader snapshot (`committing` is then its number). If this
       controller fails, the next controller may find the commit in the snapshot. The hosts then need the version's
       shared memory. (`test_cluster_versions.py`.)

    2. A superseded version stays superseded, and all members of the committed version have agreed on the same version.
       So all members get the same answer: either a member has already adopted the agreed version and all other members
       adopt it, too, or no member ever adopts it.

    3. Processes start only for the newest version. All versions that may still be committed refer to the same process
       by a given peer ID.
    """

    clusters: dict[int, Cluster] = field(default_factory=dict)
    committed: int | None = None
    committing: int | None = None
    refused: dict[int, str] = field(default_factory=dict)  # number of a version that can't be run -> reason
    # For each peer, the versions that don't contain it. Each of these versions has excluded all processes that the peer
    # had before. Each peer in a known version has an entry, which may be empty (`_forget`).
    excluded: dict[PeerID, list[int]] = field(default_factory=dict)
    # For each peer, one range of versions per exited process: the versions in which the peer ID means that process. A
    # range starts at the version for which the process was started (its incarnation).
    ended: dict[PeerID, list[range]] = field(default_factory=dict)
    # Processes that have registered and are waiting until a version with them is committed.
    ready: set[tuple[PeerID, int]] = field(default_factory=set)
    # Hosts that failed or left, each with the last version that refers to it. If a host comes back, it counts as a new
    # host, to which later versions refer.
    lost_hosts: dict[str, float] = field(default_factory=dict)
    # Workers that an earlier controller started for versions that this controller doesn't know, each with its version.
    # In these versions, the peer ID doesn't refer to an earlier process that has exited.
    joining: dict[PeerID, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cluster in self.clusters.values():
            for peer in cluster.workers:
                self.excluded.setdefault(peer, [])

    def kept(self) -> Versions:
        """Return what the next controller needs. Uncommitted versions and the list of ready processes are left out."""
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
        """Return the lowest incarnation of a process to which `version` can refer by this peer ID."""
        out = [v + 1 for v in self.excluded.get(peer, ()) if v < version]
        out += [known.stop for known in self.ended.get(peer, ()) if known.stop <= version]
        return max(out, default=0)

    def concerns(self, peer: PeerID, incarnation: int) -> bool:
        """Return whether the exit of this process matters to members or to a version that waits for joining workers."""
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
        """Add a version and make it the desired version. Ignore it if it isn't newer than all known versions."""
        newest = self.newest
        if newest is not None and cluster.version <= newest.version:
            return
        if newest is not None:
            # The writer of the new version might not know that a process has exited. So a peer ID that the newest
            # version also lists refers to the exited process. Any other peer ID refers to a joining worker.
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
            if version != self.committing and not self._leads_to(self.clusters[version], newest):
                for peer in self.clusters.pop(version).workers:
                    if peer not in newest.workers and not self._is_member(peer):
                        self.excluded.setdefault(peer, []).append(newest.version)

    def _leads_to(self, cluster: Cluster, newest: Cluster) -> bool:
        """Return whether the members can adopt `cluster` first and `newest` later, without undoing a change.

        They can if `cluster` adds no process that `newest` excludes, and removes no member that `newest` keeps.
        """
        return all(
            self._is_member(peer) or peer in newest.workers or self._has_ended(peer, cluster.version)
            for peer in cluster.workers
        ) and all(peer in cluster.workers for peer in newest.workers if self._is_member(peer))

    def stop_committing(self) -> None:
        """Record that the leader snapshot doesn't contain the commit of `committing`."""
        self.committing = None
        self._supersede()

    def commit_version(self, version: int) -> None:
        self.committing = None
        cluster = self.clusters[version]
        for known in self.clusters.values():
            for peer in known.workers:
                if peer not in cluster.workers and not self.is_out(peer, version):
                    self.excluded.setdefault(peer, []).append(version)
        # The previous version is kept, because a member stays in it until the member has requested the new version.
        self.clusters = {v: c for v, c in self.clusters.items() if v >= version or v == self.committed}
        self.refused = {v: reason for v, reason in self.refused.items() if v > version}
        self.committed = version
        self._supersede()  # `_leads_to` depends on the committed version
        self._forget()

    # The number of entries for removed peers and hosts depends only on what the known versions list, so it doesn't grow
    # while the job runs. `test_cluster_versions.py` compares the answers with those of an object that drops no entry.
    #
    # 1. A process is started for the newest version, which lists the process's peer. The process's incarnation is that
    #    version. So a peer that has a process has an entry in `excluded`, which `admit` has added.
    # 2. If no known version lists a peer, either an entry excludes the peer's processes, or the processes are newer
    #    than the committed version. An entry excludes the processes if their version was superseded, or if a later
    #    version was committed instead. The processes are newer than the committed version if an earlier controller
    #    started them for versions that this controller doesn't know.
    # 3. So when the committed version is newer than all entries of a peer that no known version lists, the entries
    #    aren't needed. A simple rule gives the same answer: a process is excluded if its incarnation is at most the
    #    committed version. `is_out` applies this rule to a peer without an entry. If a version lists the peer again,
    #    the peer's new entry begins with the committed version. The new process is newer than the committed version
    #    (1), so the entry doesn't exclude the process.
    # 4. `belongs` and `meant_by` are called for known versions only. So of a peer's entries before the oldest known
    #    version, only the last one matters. An exit whose range ends before the oldest known version means the same as
    #    an exclusion by the last version of the range.
    # 5. Callers look up a lost host for a known version (`lost_host_of`), or by its name as one of the job's hosts
    #    (`LeaderSnapshot`). A writer starts from the newest version (compare-and-swap), so the writer names only hosts
    #    that occur in the newest version's workers, runners or slots. If no known version names a host, the host isn't
    #    in the job: `Hosts.check` rejects workers on it, and the snapshot doesn't list it (`Succession._is_over_for`).
    # 6. The entry of a host that came back is needed while a known version refers to the lost host of the same
    #    name.

    def _forget(self) -> None:
        """Drop the entries that no known version needs any more."""
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
        """Exclude all processes, including processes that survive SIGKILL.

        If a process with the same peer ID registers later, it counts as a new process. The caller calls this when all
        members have finished. No member can then commit a version for which other workers were started.
        """
        newest = self.newest
        for peer in {peer for known in self.clusters.values() for peer in known.workers}:
            assert newest is not None
            self.excluded.setdefault(peer, []).append(newest.version)

    def record_end(self, peer: PeerID, incarnation: int) -> None:
        """Record that a process has exited.

        In the known versions, and in later versions whose writer didn't know that the process had exited, `peer` refers
        to this process.
        """
        newest = self.newest
        if newest is not None and not self.is_out(peer, incarnation):
            later = self.joining.get(peer, 0)
            stop = later if later > incarnation else newest.version + 1
            self.ended.setdefault(peer, []).append(range(incarnation, stop))

    def ended_in(self, cluster: Cluster) -> list[PeerID]:
        """Return the workers of `cluster` whose process has exited."""
        return [peer for peer in cluster.workers if self._has_ended(peer, cluster.version)]

    def _has_ended(self, peer: PeerID, version: int) -> bool:
        """Return whether `peer` in cluster version `version` refers to a process that has exited."""
        return any(version in known for known in self.ended.get(peer, ()))

    def _is_member(self, peer: PeerID) -> bool:
        """Return whether `peer` is in the committed cluster and isn't known to have exited.

        If so, the worker has the training state or is about to get it.
        """
        current = self.current
        return current is not None and peer in current.workers and not self._has_ended(peer, current.version)

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Return whether this process is permanently excluded or has exited."""
        forgotten = () if self.committed is None else (self.committed,)
        return any(incarnation <= version for version in self.excluded.get(peer, forgotten)) or any(
            incarnation < known.stop for known in self.ended.get(peer, ())
        )

    def belongs(self, peer: PeerID, incarnation: int, version: int) -> bool:
        """Return whether `peer` in cluster version `version` refers to this process, not to an earlier or later one."""
        return (
            incarnation <= version
            and not any(incarnation <= v <= version for v in self.excluded.get(peer, []))
            and not any(incarnation < known.stop <= version for known in self.ended.get(peer, ()))
        )

    def preparable(self) -> int | None:
        """Return the newest version that members could adopt at once, because all its joining workers are ready.

        If there is no such version that is newer than the committed version, return the committed version. Return None
        if no version is committed.

        A failed member doesn't delay a version. The new version then has a failed rank, like the present version. But
        a version is never committed if one of its joining workers has exited, or if no process in it would have the
        training state. In these cases the members continue training until the controller has written the next version.
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
        """Return whether a member may still commit `cluster`.

        If the result is False, it stays False, because a failed process stays failed. So no member commits `cluster`
        later, and all members get the same answer. If a member requests the version before the failure, that member
        commits it for all members.
        """
        # Each host of a version has a part of the version's shared memory. If a host is lost, its part is lost, and the
        # versions that refer to the host can't be committed.
        if self.lost_host_of(cluster) is not None:
            return False
        return self._keeps_the_state(cluster) and not any(
            self._has_ended(peer, cluster.version) and not self._was_member(peer, cluster.version)
            for peer in cluster.workers
        )

    def may_be_committed(self, version: int) -> bool:
        """Return whether the version with this number, which a member has requested, can still be committed."""
        return version in self.clusters and self._may_come_true(self.clusters[version])

    def lose_host(self, host: str) -> None:
        self.lost_hosts.pop(host, None)  # so that the entries are in the order in which the hosts were lost
        self.lost_hosts[host] = math.inf

    def host_is_back(self, host: str) -> None:
        """Record that a lost host has come back.

        The versions that are known so far still refer to the lost host, so they are never committed. Later versions
        refer to the new host.
        """
        if host in self.lost_hosts:
            self.lost_hosts[host] = -1 if self.newest is None else self.newest.version

    def lost_host_of(self, cluster: Cluster) -> str | None:
        """Return a host of `cluster` that has failed or left; None if there is no such host."""
        return next((host for host in cluster.hosts if cluster.version <= self.lost_hosts.get(host, -1)), None)

    def _keeps_the_state(self, cluster: Cluster) -> bool:
        return self.committed is None or any(self._is_member(peer) for peer in cluster.workers)

    def staying_without(self, peer: PeerID, leaving: Collection[PeerID]) -> int:
        """Return how many members would remain in the newest version if `peer` and the members in `leaving` left."""
        stay = set() if self.newest is None else {*self.newest.workers} - {peer, *leaving}
        return sum(map(self._is_member, stay))

    def _is_here(self, peer: PeerID, version: int) -> bool:
        if self._has_ended(peer, version) or self._is_member(peer):
            return True
        return any(each == peer and self.belongs(each, incarnation, version) for each, incarnation in self.ready)

    def _was_member(self, peer: PeerID, version: int) -> bool:
        """Return whether `peer` in `version` refers to an exited process that was in the committed cluster.

        If so, `version` can be committed although that process has failed.
        """
        current = self.current
        return (
            current is not None
            and peer in current.workers
            and any(version in known and current.version in known for known in self.ended.get(peer, ()))
        )

    def would_commit(self, request: Request) -> Cluster | None:
        """Return the cluster that an answer to `request` would commit; None if the answer would commit none.

        Only a process in the cluster can commit the cluster, because that process is alive and has the training state.
        Suppose that all workers in an agreed version fail before one of them has requested the version. Then no worker
        adopts the version, and the workers that were about to leave stay.
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
        """Return the present answer to `request`. The call may commit the version that a member requests."""
        if self.is_out(request.peer, request.incarnation):
            return Detached()
        current = self.current
        if request.member_of is None:
            if current is None or request.incarnation > current.version:
                return Wait()
            rank = current.rank_of(request.peer)
            return Wait() if rank is None else Grant(current, rank)
        if request.version is None:
            return Refuse("a member must send the version on which its cluster has agreed")
        if current is None:
            return Refuse(f"no cluster version has been committed yet, so {request.peer} is not a member")
        if request.version > current.version:
            if request.member_of != current.version or request.peer not in current.workers:
                return Refuse(
                    f"{request.peer}, member of cluster version {request.member_of}, requests version "
                    f"{request.version}, but version {current.version} is committed"
                )
            if request.version in self.refused:
                return Refuse(f"cluster version {request.version} is rejected: {self.refused[request.version]}")
            if self.newest is None or request.version > self.newest.version:
                return Wait(unknown=request.version)
            desired = self.clusters.get(request.version)
            if desired is None or not self._may_come_true(desired):
                return Stay()
            if self.would_commit(request) is None:
                return Wait()  # until a staying member requests the version and thereby commits it
            self.commit_version(request.version)
            return self.answer(request)
        rank = current.rank_of(request.peer)
        if request.version < current.version or rank is None:
            return Refuse(
                f"{request.peer} requests cluster version {request.version}, but version {current.version} "
                "has been committed since"
            )
        return Grant(current, rank)
