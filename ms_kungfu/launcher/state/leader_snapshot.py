"""What the controller of a job over several hosts leaves behind in the store, for the next one, and what the hosts add.
Pure.

The snapshot has what hosts can't tell, because they may have heard it or not: which version is committed, which hosts
are lost, how the job ends. It is written before anybody hears of it. All else the hosts tell: who runs there, who has
ended, which deaths were told there. Deaths need no record: the controller tells them all in one order, so what one host
has heard is the beginning of what another has, and the longest that any of those has who go on is what all go on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

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
    """Whether another host goes on with the job where its controller dies: the store has to outlive hosts, and the
    workers to go on without those that die."""
    goes_on = options.watch and options.recover is not Recover.FAIL
    return goes_on and options.hosts.is_several and has_leadership(options.config_server or "")


@dataclass(frozen=True)
class LeaderSnapshot:
    """`end`: the exit code and the last words of all launchers. `before`: the hosts of heads before this one, as long
    as it hasn't decided anything: they are expected not to come. `failures`: as the coordinator has them. `told`: what
    `kungfu-run status` tells of the job's past, nothing that is decided by."""

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

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(
            LeaderSnapshotDocument(
                self.job, self.head, ClusterPart.of(self.first), [(host.name, host.slots) for host in self.hosts],
                self.versions.kept(), self.finishing, self.end, self.before, self.told, self.failures,
            )
        )  # fmt: skip
        return found

    @classmethod
    def from_json(cls, fields: object) -> LeaderSnapshot:
        """ProtocolError where it can't be that."""
        try:
            found = LEADER_SNAPSHOT.convert(fields)
        except ProtocolError as error:
            raise ProtocolError(f"the leader snapshot isn't one: {error}") from None
        return cls(
            found.job, found.head, found.first.cluster(), tuple(Host(*each) for each in found.hosts),
            ClusterVersions.of(found.versions), found.finishing, found.end, found.before, found.failures, found.told,
        )  # fmt: skip

    def taken_by(self, host: str) -> LeaderSnapshot:
        """As it is written by who takes the lease. Again, where he doesn't know whether he has."""
        heads = dict.fromkeys((*self.before, self.head))
        return replace(self, head=host, before=tuple(head for head in heads if head != host))

    @property
    def lost(self) -> frozenset[str]:
        """Hosts that have gone."""
        return frozenset(host for host, last in self.versions.lost_hosts.items() if last == float("inf"))

    def has(self, cluster: Cluster) -> bool:
        """Whether `cluster`, which the store has, is of this job: one that doesn't move its controller leaves no
        record, and what is there is of a job before."""
        committed = self.versions.current
        known = committed is not None and cluster.version <= committed.version
        return known or cluster.writer in (self.job, writer_of_workers(self.job))

    @property
    def present(self) -> list[str]:
        """The hosts that haven't gone, in the job's order."""
        return [host.name for host in self.hosts if host.name not in self.lost]

    def hosts_of(self, options: Options) -> Hosts:
        """As the next controller has them."""
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
    """Whether there is a job with which other hosts than this go on, once nobody has the lease."""
    try:
        snapshot = None if found.snapshot is None else LeaderSnapshot.from_json(found.snapshot)
    except ProtocolError:
        return False
    if snapshot is None or snapshot.end is not None or snapshot.versions.committed is None:
        return False
    return any(name != own for name in snapshot.present)


@dataclass
class Term:
    """A term of a controller. `snapshot`: what the one before has left, whose lease this one has taken; None: the job
    is about to begin. `secret`: of the job's brokers. `since`: when its host's part in the job has begun."""

    keys: LeadershipKeys
    lease: LeadershipLease
    snapshot: LeaderSnapshot | None
    secret: str
    since: float

    def guard(self, store: Any) -> None:
        """Nothing is written to the cluster store either without the lease."""
        store.led_since = lambda: self.lease.since


class TimeToAsk:
    """For how long the other hosts could have found out who has the lease, in seconds: while the store has answered the
    controller, as far as the controller can tell by two answers. Other time doesn't count. Where it has stood still
    meanwhile, and so hasn't heard who called, all begins anew.

    Not since when without a break: of a store that comes and goes nobody would ever be given up.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._asked: float | None = None  # last
        self._answered: float | None = None  # the last time, where that was one
        self._stood_still = -lease_s  # until then
        self.seconds = 0.0

    def answered(self, now: float) -> None:
        self._ask(now)
        if self._answered is not None:
            self.seconds += now - self._answered
        self._answered = now

    def failed(self, now: float) -> None:
        self._ask(now)
        self._answered = None

    def has_stood_still(self, now: float) -> bool:
        """The controller has, a moment ago."""
        return self._is_late(now) or now - self._stood_still < self._lease_s / 4

    def _ask(self, now: float) -> None:
        if self._is_late(now):
            self.seconds, self._answered, self._stood_still = 0.0, None, now
        self._asked = now

    def _is_late(self, now: float) -> bool:
        """It asks four times in a lease, and has half of one for each."""
        return self._asked is not None and now - self._asked > 0.75 * self._lease_s


def all_losses(reports: Sequence[ResyncReport], version: int) -> list[Loss]:
    """Those of a version, in the one order: the longest that any host was told. ProtocolError where there are two."""
    each = sorted((report.losses[version] for report in reports if version in report.losses), key=len)
    for shorter in each[:-1]:
        if [loss[0] for loss in shorter] != [loss[0] for loss in each[-1]][: len(shorter)]:
            raise ProtocolError(f"two hosts have other deaths in version {version}: {shorter} and {each[-1]}")
    return each[-1] if each else []
