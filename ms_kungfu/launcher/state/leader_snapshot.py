"""Define the leader snapshot, from which another host's controller continues a job.

This module uses no clock and no I/O.

1. The snapshot contains the facts that may have reached only some hosts: the committed cluster version, the lost hosts,
   and how the job ended. The controller writes the snapshot before it notifies any host.
   (`test_simulated_leadership.py`.)

2. Each host reports everything else to the next controller: its running workers, its exited workers, and the failures
   of which it was notified.

3. The snapshot needs no list of failures. The controller reports failures to all hosts in the same order. So of any
   two hosts' lists of failures, the shorter list is a prefix of the longer one. The longest list among the remaining
   hosts applies to all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.cluster import Cluster, writer_of_workers
from ms_kungfu.cluster_store import LeadershipKeys, LeadershipLease, LeadershipState, has_leadership
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.states import NodeState
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire.documents import LEADER_SNAPSHOT, End, Failure, LeaderSnapshotDocument, Past
from ms_kungfu.launcher.wire.messages import ClusterPart, Loss, ResyncReport


def moves(options: Options) -> bool:
    """Return whether another host continues the job if its controller fails.

    This requires a store that doesn't depend on one host (etcd), and workers that continue without failed workers.
    """
    goes_on = options.watch and options.recover is not Recover.FAIL
    return goes_on and options.hosts.is_several and has_leadership(options.config_server or "")


class LeaderSnapshot(Struct, frozen=True):
    """What the next controller has to know.

    Args:
        job: the job's ID.
        head: the host of the controller.
        first: the cluster with which the job started.
        hosts: the job's hosts.
        versions: the known cluster versions.
        finishing: whether a member has finished its program.
        end: the exit code and the last message of all launchers; None if the job hasn't ended.
        before: the hosts of earlier controllers, the previous one last. This list is empty once this controller has
            made a decision.
        failures: the value of `Coordinator.failures`.
        told: the job's past, which only `kungfu-run status` needs.
        alive: the hosts among `before` and `head` that were alive when a controller gave up the lease.
    """

    job: str
    head: str
    first: Cluster
    hosts: tuple[Host, ...]
    versions: ClusterVersions = field(default_factory=ClusterVersions)
    finishing: bool = False
    end: End | None = None
    before: tuple[str, ...] = ()
    failures: tuple[Failure | None, Failure | None] = (None, None)
    told: Past | None = None
    alive: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(
            LeaderSnapshotDocument(
                self.job, self.head, ClusterPart.of(self.first), [(host.name, host.slots) for host in self.hosts],
                self.versions.kept(), self.finishing, self.end, self.before, self.told, self.failures,
                self.alive,
            )
        )  # fmt: skip
        return found

    @classmethod
    def from_json(cls, fields: object) -> LeaderSnapshot:
        """Return the snapshot that the document `fields` describes.

        Raises:
            ProtocolError: the document isn't a snapshot.
        """
        try:
            found = LEADER_SNAPSHOT.convert(fields)
        except ProtocolError as error:
            raise ProtocolError(f"the leader snapshot is invalid: {error}") from None
        return cls(
            found.job, found.head, found.first.cluster(), tuple(Host(*each) for each in found.hosts),
            ClusterVersions.of(found.versions), found.finishing, found.end, found.before, found.failures, found.told,
            found.alive,
        )  # fmt: skip

    def taken_by(self, host: str) -> LeaderSnapshot:
        """Return the snapshot that a controller on `host` writes when it acquires the lease.

        A second call changes nothing, so the controller may repeat a write whose result is unknown.
        """
        heads = dict.fromkeys((*self.before, self.head))
        before, alive = (tuple(head for head in each if head != host) for each in (heads, self.alive))
        return replace(self, head=host, before=before, alive=alive)

    def left_by(self, host: str, registered: Collection[str]) -> LeaderSnapshot:
        """Return the snapshot that the controller on `host` leaves. `registered`: the hosts registered with it."""
        known = (head for head in self.before if head in registered)
        return replace(self, alive=tuple(dict.fromkeys((*self.alive, *known, host))))

    @property
    def silent(self) -> frozenset[str]:
        """Return the hosts that aren't expected to register: those whose controllers lost the lease, or ended."""
        return frozenset(self.before).difference(self.alive)

    @property
    def lost(self) -> frozenset[str]:
        """Return the hosts that were lost and haven't come back."""
        return frozenset(host for host, last in self.versions.lost_hosts.items() if last == float("inf"))

    def has(self, cluster: Cluster) -> bool:
        """Return whether `cluster`, which the store contains, belongs to this job.

        If not, `cluster` may belong to a job that has written no snapshot, because its controller can't move to another
        host.
        """
        committed = self.versions.current
        known = committed is not None and cluster.version <= committed.version
        return known or cluster.writer in (self.job, writer_of_workers(self.job))

    @property
    def present(self) -> list[str]:
        """Return the names of the hosts that aren't lost, in the order of the job's hosts."""
        return [host.name for host in self.hosts if host.name not in self.lost]

    def hosts_of(self, options: Options) -> Hosts:
        """Return the job's hosts for the next controller, which runs on this machine."""
        own = options.hosts
        return Hosts(
            self.hosts,
            own.self_name,
            own.self_name,
            own.most,
            own.placement,
            own.ports,
            joinable=True,
            states=tuple((host, NodeState.REMOVED) for host in sorted(self.lost)),
        )


def how_it_has_ended(end: End) -> str:
    code, words = end
    return f"exit code {code}" + (f", {words}" if words else "")


def may_go_on(found: LeadershipState, own: str) -> bool:
    """Return whether another host will continue the job in the snapshot as soon as the leadership lease is free."""
    try:
        snapshot = None if found.snapshot is None else LeaderSnapshot.from_json(found.snapshot)
    except ProtocolError:
        return False
    if snapshot is None or snapshot.end is not None or snapshot.versions.committed is None:
        return False
    return any(name != own for name in snapshot.present)


class Term(Struct):
    """The term of a controller.

    Args:
        keys: the leadership keys of the job.
        lease: the leadership lease that this controller holds.
        snapshot: the snapshot of the previous controller, which held the lease before; None if the job hasn't begun.
        secret: the secret of the job's brokers.
        since: when this host began to take part in the job.
    """

    keys: LeadershipKeys
    lease: LeadershipLease
    snapshot: LeaderSnapshot | None
    secret: str
    since: float

    def guard(self, store: Any) -> None:
        """Make the store reject each write to the cluster if this controller no longer holds the lease."""
        store.led_since = lambda: self.lease.since


class Pauses:
    """Detect whether this host was paused for so long that its lease may have expired."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._ran_at: float | None = None
        self._stood_still = -lease_s  # when the host was last paused

    def runs(self, now: float) -> bool:
        """Return whether the host was paused until now. Call this at least every quarter of a lease."""
        is_late = self._is_late(now)
        if is_late:
            self._stood_still = now
        self._ran_at = now
        return is_late

    def has_stood_still(self, now: float) -> bool:
        """Return whether the host was paused a moment ago."""
        return self._is_late(now) or now - self._stood_still < self._lease_s / 4

    def _is_late(self, now: float) -> bool:
        """Return whether the last call was too long ago.

        A controller calls the store four times per lease, and each call may take half a lease.
        """
        return self._ran_at is not None and now - self._ran_at > 0.75 * self._lease_s


class TimeToAsk(Pauses):
    """Count the seconds in which the other hosts have been able to find out which host holds the lease.

    The time between two of the store's answers to the controller counts, because the store was available then. If the
    controller itself was stopped, it has missed calls from other hosts, so the count restarts at zero. The counted time
    may have gaps. If gaps weren't allowed and the store failed repeatedly, no host would ever be declared lost.
    """

    def __init__(self, lease_s: float) -> None:
        super().__init__(lease_s)
        self._answered: float | None = None  # the time of the last call that the store answered
        self.seconds = 0.0

    def answered(self, now: float) -> None:
        self._ask(now)
        if self._answered is not None:
            self.seconds += now - self._answered
        self._answered = now

    def failed(self, now: float) -> None:
        self._ask(now)
        self._answered = None

    def _ask(self, now: float) -> None:
        if self.runs(now):
            self.seconds, self._answered = 0.0, None


def all_losses(reports: Sequence[ResyncReport], version: int) -> list[Loss]:
    """Return the failures in a cluster version, in the same order on all hosts: the longest list that any host has.

    Raises:
        ProtocolError: two lists contradict each other.
    """
    each = sorted((report.losses[version] for report in reports if version in report.losses), key=len)
    for shorter in each[:-1]:
        if [loss[0] for loss in shorter] != [loss[0] for loss in each[-1]][: len(shorter)]:
            raise ProtocolError(f"two hosts report different failures in version {version}: {shorter} and {each[-1]}")
    return each[-1] if each else []
