"""The broker hands each worker the shared memory of the cluster version that it belongs to, and nobody else.

What a request is answered is decided by :class:`Membership`, which is pure; the broker adds the socket, the proof of
the secret and the waiting. A thread for each connection: there are as many as workers, which keep theirs, and most of
their life is waiting.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Protocol

from ms_kungfu.broker_protocol import Channel, ProtocolError, new_nonce, proof_of, text_field
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.policy import would_be_left
from ms_kungfu.launcher.stores import Stores

_log = logging.getLogger(__name__)
_HANDSHAKE_TIMEOUT_S = 10.0
_ACCEPT_RETRY_S = 0.2
_MAX_CONNECTIONS = 1024
# Of them, those that have proved nothing yet: more than a host's workers, which may all connect in one moment.
_MAX_UNPROVED = 512
_SILENT_S = 1.0  # a worker proves itself within milliseconds; one that is taken for a stranger comes again


class Segment(Protocol):
    """The shared memory of a cluster version, as the launcher holds it."""

    fd: int

    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None: ...

    def heartbeat(self, rank: int) -> int: ...

    def gave_up(self, rank: int) -> str: ...

    def announce(self, version: int) -> None: ...

    def close(self) -> None: ...


class CoreSegment:
    """A segment of the runtime. Closes its descriptor; the mapping goes with the object."""

    def __init__(self, size: int, cluster_version: int, cores: int, recovers: bool) -> None:
        # Not at the top: a job whose workers never ask for a segment starts without loading the runtime.
        import ms_kungfu._core as _core

        self.fd: int = _core.create_segment(size, cluster_version, cores, recovers)
        try:
            self._control: Any = _core.SegmentControl(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None:
        self._control.mark_lost(rank, reason, recover, reaped)

    def heartbeat(self, rank: int) -> int:
        return int(self._control.heartbeat(rank))

    def gave_up(self, rank: int) -> str:
        return str(self._control.gave_up(rank))

    def announce(self, version: int) -> None:
        self._control.announce(version)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Request:
    """What a worker asks: a member names the version it comes from and the agreed one, a newcomer neither. `step`: the
    one that its training is at, for the launcher's lines."""

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
class LeaveRequest:
    """A worker asks that the cluster go on without `peer`, itself perhaps; `terminated`: because it got a SIGTERM."""

    peer: PeerID
    terminated: bool = False


@dataclass(frozen=True)
class Grant:
    cluster: Cluster
    rank: int


@dataclass(frozen=True)
class Detach:
    pass


@dataclass(frozen=True)
class Stay:
    """The version that was agreed on has been given up, and nobody went over to it: the members stay where they are."""


@dataclass(frozen=True)
class Refuse:
    reason: str


@dataclass(frozen=True)
class Wait:
    """There is no answer yet; `unknown` is a version that the launcher should look for."""

    unknown: int | None = None


@dataclass
class Membership:
    """Which cluster versions are known, which one is chosen, who is out and who has ended. Pure.

    A process is named by its peer ID and its incarnation, the version it was started for: a peer that left and came
    back is another process, and the old one must not get the place of the new one.

    The newest version is what is wanted. Of those between it and the chosen one only such are kept as lead there (see
    `_leads_to`); the others are *superseded*: nobody is told of them any more, processes that they alone needed are
    out, and a member that has agreed on one stays where it is. As this holds for ever once it does, and all members of
    the chosen version have agreed on the same one, all of them get the same answer: either somebody has gone over to
    it and so do all, or nobody ever does. It also means that a process is only ever started for the newest version,
    and that every version which is still to be chosen means that same process by its peer ID.
    """

    clusters: dict[int, Cluster] = field(default_factory=dict)
    chosen: int | None = None
    refused: dict[int, str] = field(default_factory=dict)  # versions that the launcher can't run, and why
    # Versions without the peer, at which its processes that were started before were out for good.
    excluded: dict[PeerID, list[int]] = field(default_factory=dict)
    # Peers of whom processes have ended: from which incarnation on to which version the peer ID means such a process.
    ended: dict[PeerID, list[range]] = field(default_factory=dict)
    # Processes that have come and wait for their first version.
    ready: set[tuple[PeerID, int]] = field(default_factory=set)

    @property
    def current(self) -> Cluster | None:
        return None if self.chosen is None else self.clusters[self.chosen]

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
            # One that a version has left out and that is listed again is a newcomer.
            for peer in set(cluster.workers) & set(self.ended_in(newest)):
                self.ended[peer][-1] = range(self.ended[peer][-1].start, cluster.version + 1)
        self.clusters[cluster.version] = cluster
        self._supersede()

    def _supersede(self) -> None:
        newest, chosen = self.newest, self.chosen
        if newest is None or chosen is None:
            return
        for version in [v for v in self.clusters if chosen < v < newest.version]:
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

    def choose(self, version: int) -> None:
        cluster = self.clusters[version]
        for known in self.clusters.values():
            for peer in known.workers:
                if peer not in cluster.workers and not self.is_out(peer, version):
                    self.excluded.setdefault(peer, []).append(version)
        # The one before is kept: its members are still in it until each of them has asked for this one.
        self.clusters = {v: c for v, c in self.clusters.items() if v >= version or v == self.chosen}
        self.refused = {v: reason for v, reason in self.refused.items() if v > version}
        self.chosen = version

    def bury(self, peer: PeerID, incarnation: int) -> None:
        """A process has ended: every known version, and those written before their writer knew, means it by `peer`."""
        newest = self.newest
        if newest is not None and not self.is_out(peer, incarnation):
            oldest = min(self.clusters)
            before = [known for known in self.ended.get(peer, ()) if oldest < known.stop]
            self.ended[peer] = [*before, range(incarnation, newest.version + 1)]

    def ended_in(self, cluster: Cluster) -> list[PeerID]:
        """The workers of `cluster` whose processes have ended."""
        return [peer for peer in cluster.workers if self._has_ended(peer, cluster.version)]

    def _has_ended(self, peer: PeerID, version: int) -> bool:
        """Whether the process that `version` means by `peer` has ended."""
        return any(version in known for known in self.ended.get(peer, ()))

    def _is_member(self, peer: PeerID) -> bool:
        """Whether `peer` is in the chosen cluster and lives, as far as is known: it has the state, or is getting it."""
        current = self.current
        return current is not None and peer in current.workers and not self._has_ended(peer, current.version)

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether this process has been excluded, or has ended. It can't come back."""
        return any(incarnation <= version for version in self.excluded.get(peer, ())) or any(
            incarnation < known.stop for known in self.ended.get(peer, ())
        )

    def belongs(self, peer: PeerID, incarnation: int, version: int) -> bool:
        """Whether the process is the one that `version` means by its peer ID, and not an earlier or later one."""
        return (
            incarnation <= version
            and not any(incarnation <= v <= version for v in self.excluded.get(peer, []))
            and not any(incarnation < known.stop <= version for known in self.ended.get(peer, ()))
        )

    def announceable(self) -> int | None:
        """The newest version that its members could go over to at once: all its newcomers are ready.

        A member that has ended holds up nobody: such a version has a dead rank as the present one has, until the next.
        But a version whose newcomer has ended, or in which nobody who has the state would be left, never comes true:
        the next one, which the launcher is about to write, has to be waited for, while the members train on.
        """
        for version in sorted(self.clusters, reverse=True):
            if self.chosen is not None and version <= self.chosen:
                return self.chosen
            if self._may_come_true(self.clusters[version]) and all(
                self._is_here(peer, version) for peer in self.clusters[version].workers
            ):
                return version
        return None

    def _may_come_true(self, cluster: Cluster) -> bool:
        """Whether a member may choose it: if not, nobody ever does, for what is dead stays so. All members get the same
        answer therefore: whoever asks before a death that matters has chosen it for all."""
        return self._keeps_the_state(cluster) and not any(
            self._has_ended(peer, cluster.version) and not self._was_member(peer, cluster.version)
            for peer in cluster.workers
        )

    def _keeps_the_state(self, cluster: Cluster) -> bool:
        return self.chosen is None or any(self._is_member(peer) for peer in cluster.workers)

    def staying_without(self, peer: PeerID, leaving: Collection[PeerID]) -> int:
        """How many members of the newest version would be left if `peer` went, and those who are `leaving`."""
        stay = set() if self.newest is None else {*self.newest.workers} - {peer, *leaving}
        return sum(map(self._is_member, stay))

    def _is_here(self, peer: PeerID, version: int) -> bool:
        if self._has_ended(peer, version) or self._is_member(peer):
            return True
        return any(who == peer and self.belongs(who, incarnation, version) for who, incarnation in self.ready)

    def _was_member(self, peer: PeerID, version: int) -> bool:
        """Whether the process that `version` means by `peer`, and that has ended, was in the chosen cluster: its death
        leaves nothing there that was counted on for `version`."""
        current = self.current
        return (
            current is not None
            and peer in current.workers
            and any(version in known and current.version in known for known in self.ended.get(peer, ()))
        )

    def would_choose(self, request: Request) -> Cluster | None:
        """The cluster that an answer to `request` makes the chosen one.

        Only who is in it can do so: it lives, and has the state. If all those die who have agreed on a version and are
        in it, before one of them has asked for it, nobody goes over, and those who were to leave are still there.
        """
        current = self.current
        if current is None or request.version is None or request.version <= current.version:
            return None
        cluster = self.clusters.get(request.version)
        is_next = request.member_of == current.version and request.version not in self.refused
        may = is_next and self._is_member(request.peer) and not self.is_out(request.peer, request.incarnation)
        return cluster if may and cluster is not None and request.peer in cluster.workers else None

    def answer(self, request: Request) -> Grant | Detach | Stay | Refuse | Wait:
        """The answer to `request` now. May choose the version that a member asks for."""
        if self.is_out(request.peer, request.incarnation):
            return Detach()
        current = self.current
        if request.member_of is None:
            if current is None or request.incarnation > current.version:
                return Wait()
            rank = current.rank_of(request.peer)
            return Wait() if rank is None else Grant(current, rank)
        if request.version is None:
            return Refuse("a member must name the version that its cluster has agreed on")
        if current is None:
            return Refuse(f"no cluster version has been chosen yet, so {request.peer} is no member")
        if request.version > current.version:
            if request.member_of != current.version or request.peer not in current.workers:
                return Refuse(
                    f"{request.peer}, member of cluster version {request.member_of}, asks for version "
                    f"{request.version}, but version {current.version} is the chosen one"
                )
            if request.version in self.refused:
                return Refuse(f"cluster version {request.version} is refused: {self.refused[request.version]}")
            if self.newest is None or request.version > self.newest.version:
                return Wait(unknown=request.version)
            wanted = self.clusters.get(request.version)
            if wanted is None or not self._may_come_true(wanted):
                return Stay()
            if self.would_choose(request) is None:
                return Wait()  # for one who stays
            self.choose(request.version)
            return self.answer(request)
        rank = current.rank_of(request.peer)
        if request.version < current.version or rank is None:
            return Refuse(
                f"{request.peer} asks for cluster version {request.version}, but version {current.version} has been "
                "chosen since"
            )
        return Grant(current, rank)


@dataclass(frozen=True)
class _Loss:
    """A process that has ended; with `recover` the members go on without it."""

    peer: PeerID
    incarnation: int
    reason: str
    recover: bool
    reaped: bool


class Broker:
    """Listens on an abstract Unix socket, `address`, from construction to `close`. Every method is thread-safe.

    `on_unknown_version` is called when a member asks for a version that has not been admitted, `on_chosen` when a
    version has become the chosen one by a member's request, `on_ready` when a newcomer (peer ID and incarnation) or a
    standby (its number) is ready to join; all from the broker's threads, without its lock. `on_leave` is told who of
    the newest version has been granted to leave it; `on_trouble` why the shared memory of a version can't be made:
    `announce` tries it again. These two may be called with the lock held, and must not come back here.
    `recovers`: members go on without those who die. Fewer than `min_size` members are never left by a leave.
    """

    def __init__(
        self,
        secret: bytes,
        cores: int,
        *,
        recovers: bool = False,
        min_size: int = 1,
        make_segment: Callable[[int, int, int, bool], Segment] = CoreSegment,
        on_unknown_version: Callable[[int], None] | None = None,
        on_chosen: Callable[[Cluster, int | None], None] | None = None,
        on_leave: Callable[[PeerID], None] | None = None,
        on_ready: Callable[[tuple[PeerID, int] | int], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self._secret = secret
        self._cores = cores
        self._recovers = recovers
        self._min_size = min_size
        self._make_segment = make_segment
        self._on_unknown_version = on_unknown_version
        self._on_chosen = on_chosen
        self._on_leave = on_leave
        self._on_ready = on_ready
        self._on_trouble = on_trouble
        self._stores = Stores()
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._membership = Membership()
        self._segments: dict[int, Segment] = {}
        self._losses: list[_Loss] = []
        self._announced = -1
        self._leaving: set[PeerID] = set()  # those of the newest version that may leave it, and haven't yet
        self._told_to_end: set[PeerID] = set()  # members that may leave because they got a SIGTERM
        self._holders: dict[tuple[PeerID, int], int] = {}  # process -> process ID that came with its name
        self._counting: set[tuple[PeerID, int]] = set()  # processes of which a heartbeat has been seen
        self._ready_standbys: set[int] = set()
        self._identities: dict[int, tuple[PeerID, int]] = {}  # of standbys that are needed
        self._connections: set[socket.socket] = set()
        self._unproved: dict[socket.socket, float] = {}  # of these, oldest first: when they were accepted
        self._ending = False
        self._closed = False

        self.address = f"kungfu-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kungfu-broker", daemon=True).start()

    def admit(self, cluster: Cluster) -> None:
        """A version is known: members may choose it, and are told that it is wanted once its newcomers are ready."""
        with self._changed:
            self._membership.admit(cluster)
            self._leaving &= set(cluster.workers)
            self._close_segments()
            self._stores.drop(self._membership.is_out)
            self._announce()
            self._changed.notify_all()

    def announce(self) -> None:
        """Tries again to make the shared memory that could not be made."""
        with self._changed:
            self._announce()

    def refuse(self, version: int, reason: str) -> None:
        """A version that this host can't run: members who ask for it are told why instead of waiting for it."""
        with self._changed:
            self._membership.refused[version] = reason
            self._changed.notify_all()

    def choose(self, version: int) -> None:
        """The launcher's own choice: the initial version. It must have been admitted.

        Raises what the runtime or the kernel has against its shared memory; nothing is chosen then.
        """
        with self._changed:
            self._segment_of(self._membership.clusters[version])
            self._membership.choose(version)
            self._after_choice()

    def forget_the_ended(self) -> None:
        """Everybody has ended: whoever is listed from now on is a newcomer."""
        with self._changed:
            self._membership.ended.clear()
            self._losses.clear()

    def current(self) -> Cluster | None:
        """The chosen cluster."""
        with self._changed:
            return self._membership.current

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether the process has ended, or a chosen version has excluded it."""
        with self._changed:
            return self._membership.is_out(peer, incarnation)

    def ended_in(self, cluster: Cluster) -> list[PeerID]:
        """The workers of `cluster` whose processes have ended."""
        with self._changed:
            return self._membership.ended_in(cluster)

    def is_ready(self, peer: PeerID, incarnation: int) -> bool:
        """Whether a newcomer waits for its first version, or has got it."""
        with self._changed:
            process = (peer, incarnation)
            return process in self._membership.ready or process in self._holders

    def connections(self) -> int:
        """How many processes have come; each keeps its connection."""
        with self._changed:
            return len(self._connections) - len(self._unproved)

    def ready_standbys(self) -> set[int]:
        with self._changed:
            return set(self._ready_standbys)

    def assign(self, standby: int, peer: PeerID, incarnation: int) -> None:
        """The standby is this peer from now on."""
        with self._changed:
            self._identities[standby] = (peer, incarnation)
            self._changed.notify_all()

    def mark_lost(
        self, peer: PeerID, reason: str, incarnation: int, recover: bool = False, reaped: bool = True
    ) -> None:
        """A process has ended: tells the members of every version that it belongs to, also of those to come.

        With `recover` they go on without it. It must have been `reaped`, or not have answered SIGKILL: what it
        publishes then is taken from nobody, and it can't come back.
        """
        with self._changed:
            self._membership.bury(peer, incarnation)
            self._told_to_end.discard(peer)
            self._stores.drop(self._membership.is_out)
            loss = _Loss(peer, incarnation, reason, recover and self._recovers, reaped)
            self._losses.append(loss)
            for version, segment in self._segments.items():
                self._tell(segment, self._membership.clusters[version], loss)
            self._announce()  # a version may have waited for it alone
            self._changed.notify_all()

    def mark_reaped(self, peer: PeerID, incarnation: int) -> None:
        """A process that was marked lost without being reaped is gone at last: what it has bound is free."""
        with self._changed:
            for place, loss in enumerate(self._losses):
                if (loss.peer, loss.incarnation) == (peer, incarnation) and not loss.reaped:
                    self._losses[place] = loss = replace(loss, reaped=True)
                    for version, segment in self._segments.items():
                        self._tell(segment, self._membership.clusters[version], loss)

    def heartbeat(self, peer: PeerID, incarnation: int) -> tuple[int, ...]:
        """Counts that move for as long as the process runs; none before it has a place, or once it has left."""
        with self._changed:
            beats = []
            for version, segment in self._segments.items():
                rank = self._membership.clusters[version].rank_of(peer)
                if rank is not None and self._membership.belongs(peer, incarnation, version):
                    beats.append(segment.heartbeat(rank))
            process = (peer, incarnation)
            if any(beats):
                self._counting.add(process)
            elif process in self._counting or process not in self._holders:
                return ()  # it has left, or has no place yet
            return tuple(beats)

    def gave_up(self, peer: PeerID, incarnation: int) -> str:
        """Why a process that lives can't go on, and its end is what the other members wait for; "" where it can."""
        with self._changed:
            for version, segment in self._segments.items():
                rank = self._membership.clusters[version].rank_of(peer)
                if rank is not None and self._membership.belongs(peer, incarnation, version):
                    reason = segment.gave_up(rank)
                    if reason:
                        return reason
            return ""

    def end(self) -> None:
        """The job is about to end: nobody may leave any more, or become somebody."""
        with self._changed:
            self._ending = True

    def close(self) -> None:
        """Ends every connection and closes the segments. Workers that are waiting see a closed connection."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = list(self._connections)
            segments, self._segments = self._segments, {}
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close() alone does not
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for segment in segments.values():
            segment.close()
        self._stores.drop(lambda *_: True)

    # ---- one thread each ----

    def _accept(self) -> None:
        trouble = ""
        while True:
            try:
                connection, _ = self._listener.accept()
                trouble = ""
            except OSError as error:
                # Without descriptors or memory, most likely: whoever connects waits in the backlog meanwhile.
                with self._changed:
                    if self._closed:
                        return
                    if str(error) != trouble:
                        trouble = str(error)
                        _log.warning("a worker can't be heard for now: %s", error)
                    self._send_strangers_away()
                    self._changed.wait(_ACCEPT_RETRY_S)
                continue
            if not self._take(connection):
                connection.close()

    def _take(self, connection: socket.socket) -> bool:
        """Whether the connection is served from now on."""
        with contextlib.suppress(OSError, ProtocolError, RuntimeError):  # the last: no thread can be started
            Channel(connection, None).check_same_user()  # before it costs a thread
            with self._changed:
                if self._closed or len(self._connections) >= _MAX_CONNECTIONS:
                    return False
                if len(self._unproved) >= _MAX_UNPROVED:
                    self._send_strangers_away()
                self._connections.add(connection)
                self._unproved[connection] = time.monotonic()
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kungfu-broker", daemon=True).start()
                return True
            except BaseException:
                with self._changed:
                    self._connections.discard(connection)
                    self._unproved.pop(connection, None)
                raise
        return False

    def _send_strangers_away(self) -> None:
        """Makes room: ends the connections that have proved nothing for long, the oldest in any case. Their threads
        close them. Called with the lock held."""
        now = time.monotonic()
        strangers = [c for n, (c, since) in enumerate(self._unproved.items()) if n == 0 or now - since > _SILENT_S]
        for connection in strangers:
            del self._unproved[connection]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, _HANDSHAKE_TIMEOUT_S)
        try:
            with contextlib.suppress(OSError, ProtocolError):
                pid = self._authenticate(channel)
                with self._changed:
                    self._unproved.pop(connection, None)
                while self._serve_one(channel, pid):
                    channel.extend(None)  # the next one may come after hours of training
        finally:
            # In this order: who sees no connections any more counts on their descriptors being closed.
            channel.close()
            with self._changed:
                self._connections.discard(connection)
                self._unproved.pop(connection, None)

    def _serve_one(self, channel: Channel, pid: int) -> bool:
        """Answers a request. Whether there may be another one."""
        try:
            message = channel.receive()
            if "store" in message:
                self._stores.serve(channel, message, self.is_out)
                return False
            request = _request_from(message)
        except (ProtocolError, ValueError) as error:
            channel.send({"error": str(error)})
            return False
        if isinstance(request, LeaveRequest):
            refusal = self._let_leave(request)
            channel.send({"error": refusal} if refusal else {"leaving": True})
        else:
            self._answer(channel, request, pid)
        return True

    def _authenticate(self, channel: Channel) -> int:
        pid, _ = channel.peer_credentials()
        challenge = new_nonce()
        channel.send({"nonce": challenge})
        reply = channel.receive()
        nonce, proof = text_field(reply, "nonce"), text_field(reply, "proof")
        if not hmac.compare_digest(proof.encode(), proof_of(self._secret, "worker", challenge, nonce).encode()):
            # Said, lest it be taken for a crowded broker. It tells nothing that the end of the connection doesn't.
            channel.send({"error": "the job's broker has another secret (KUNGFU_JOB_SECRET)"})
            raise ProtocolError("wrong proof")
        channel.send({"proof": proof_of(self._secret, "broker", challenge, nonce)})
        return pid

    def _answer(self, channel: Channel, request: Request | StandbyRequest, pid: int) -> None:
        try:
            self._answer_in_time(channel, request, pid)
        finally:
            with self._changed:
                if isinstance(request, StandbyRequest):
                    self._ready_standbys.discard(request.number)
                    who = self._identities.get(request.number)
                else:
                    who = (request.peer, request.incarnation)
                if who is not None:
                    self._membership.ready.discard(who)

    def _answer_in_time(self, channel: Channel, asked: Request | StandbyRequest, pid: int) -> None:
        asked_for: int | None = None
        channel.extend(_HANDSHAKE_TIMEOUT_S)
        while True:
            unknown: int | None = None
            chosen: Cluster | None = None
            news = False
            with self._changed:
                if self._closed:
                    return
                request = self._identified(asked)
                if request is None:
                    answer: Grant | Detach | Stay | Refuse | Wait = Wait()
                else:
                    before = self._membership.chosen
                    if self._membership.would_choose(request) is not None and _is_closed(channel.socket):
                        return  # it has died since it asked, and can't carry the state over
                    answer = self._refusal_of(request, pid) or self._answer_of(request)
                    chosen = self._membership.current if self._membership.chosen != before else None
                if chosen is not None:
                    self._after_choice()
                if isinstance(answer, Grant) and request is not None:
                    # Sent under the lock: mark_lost and the next choice must not close the descriptor meanwhile.
                    channel.extend(_HANDSHAKE_TIMEOUT_S)
                    self._grant(channel, request, answer, pid)
                elif isinstance(answer, Wait):
                    if answer.unknown is not None and answer.unknown != asked_for:
                        unknown = asked_for = answer.unknown
                    elif self._note_ready(asked, request):
                        news = True
                    else:
                        # Woken by every change; now and then to see whether the worker has given up.
                        self._changed.wait(1.0)
                        if _is_closed(channel.socket):
                            return
            if chosen is not None and self._on_chosen is not None:
                self._on_chosen(chosen, asked.step if isinstance(asked, Request) else None)
            if news and self._on_ready is not None:
                self._on_ready(asked.number if isinstance(asked, StandbyRequest) else (asked.peer, asked.incarnation))
            if isinstance(answer, Wait):
                if unknown is not None and self._on_unknown_version is not None:
                    self._on_unknown_version(unknown)
                continue
            channel.extend(_HANDSHAKE_TIMEOUT_S)
            if isinstance(answer, Detach):
                channel.send({"detached": True})
            elif isinstance(answer, Stay):
                channel.send({"stay": True})
            elif isinstance(answer, Refuse):
                channel.send({"error": answer.reason})
            return

    def _let_leave(self, request: LeaveRequest) -> str:
        """Grants the wish and passes it on; the reason where it can't be granted. Of several who ask at once those are
        granted who came first."""
        peer = request.peer
        with self._changed:
            newest = self._membership.newest
            if self._ending or newest is None:
                return "the job is ending"
            if peer not in newest.workers:  # it is leaving already
                if request.terminated and self._on_leave is not None:
                    self._told_to_end.add(peer)
                    self._on_leave(peer)  # it may have been taken back in meanwhile
                return ""
            left = self._membership.staying_without(peer, self._leaving)
            if left == 0:
                return f"{peer} is the last worker"
            if left < self._min_size:
                return f"{peer} can't leave: {would_be_left(left, self._min_size)}"
            if self._on_leave is None:
                return "this launcher does not follow changes of the cluster (-w)"
            self._leaving.add(peer)
            if request.terminated:
                self._told_to_end.add(peer)
            # With the lock: before whoever asks next is refused, and ends because of it.
            self._on_leave(peer)
        return ""

    def stays(self, peer: PeerID) -> None:
        """Whoever was granted to leave stays after all: too few would be left by now."""
        with self._changed:
            self._leaving.discard(peer)
            self._told_to_end.discard(peer)

    def told_to_end(self) -> set[PeerID]:
        """The members that have been granted to leave because each of them got a SIGTERM."""
        with self._changed:
            return set(self._told_to_end)

    # ---- with the lock held ----

    def _identified(self, asked: Request | StandbyRequest) -> Request | None:
        if isinstance(asked, Request):
            return asked
        identity = self._identities.get(asked.number)
        return None if identity is None or self._ending else Request(*identity, member_of=None, version=None)

    def _note_ready(self, asked: Request | StandbyRequest, request: Request | None) -> bool:
        """Notes who waits for a first version. Whether that was news."""
        if request is None and isinstance(asked, StandbyRequest):
            known, who = len(self._ready_standbys), asked.number
            self._ready_standbys.add(who)
            return len(self._ready_standbys) != known
        if request is None or request.member_of is not None:
            return False
        process = (request.peer, request.incarnation)
        if process in self._membership.ready:
            return False
        self._membership.ready.add(process)
        self._announce()
        return True

    def _announce(self) -> None:
        """Tells the members of the chosen version. Those of the one before have agreed on it, and look no more."""
        version, chosen = self._membership.announceable(), self._membership.chosen
        if self._closed or version is None or chosen is None or version <= max(chosen, self._announced):
            return
        try:
            self._segment_of(self._membership.clusters[version])
        except Exception as error:  # whatever the runtime or the kernel has against it
            # The members would agree on a version that they can't go over to: better that they don't hear of it yet.
            if self._on_trouble is not None:
                self._on_trouble(_unmakeable(self._membership.clusters[version], error))
            return
        self._announced = version
        self._segments[chosen].announce(version)

    def _answer_of(self, request: Request) -> Grant | Detach | Stay | Refuse | Wait:
        wanted = self._membership.would_choose(request)
        if wanted is not None:
            try:
                self._segment_of(wanted)
            except Exception as error:
                # Once and for all, so that all members are told the same.
                self._membership.refused[wanted.version] = _unmakeable(wanted, error)
        return self._membership.answer(request)

    def _segment_of(self, cluster: Cluster) -> Segment:
        """The segment of a version. Made before the members hear of it, so that they needn't wait for it, and before it
        is chosen, so that nobody is without one."""
        segment = self._segments.get(cluster.version)
        if segment is None:
            segment = self._make_segment(cluster.size, cluster.version, self._cores, self._recovers)
            self._segments[cluster.version] = segment
            segment.announce(cluster.version)
            for loss in self._losses:
                self._tell(segment, cluster, loss)
        return segment

    def _tell(self, segment: Segment, cluster: Cluster, loss: _Loss) -> None:
        rank = cluster.rank_of(loss.peer)
        if rank is not None and self._membership.belongs(loss.peer, loss.incarnation, cluster.version):
            segment.mark_lost(rank, loss.reason, loss.recover, loss.reaped)

    def _refusal_of(self, request: Request, pid: int) -> Refuse | None:
        """A forked child has its parent's name and secret, but not its place."""
        holder = self._holders.get((request.peer, request.incarnation))
        if holder is None or holder == pid or not _is_alive(holder):
            return None
        return Refuse(f"the place of {request.peer} belongs to process {holder}; process {pid} has no place of its own")

    def _grant(self, channel: Channel, request: Request, grant: Grant, pid: int) -> None:
        self._holders[(request.peer, request.incarnation)] = pid
        message = {
            "cluster": grant.cluster.to_json(),
            "rank": grant.rank,
            "peer": str(request.peer),
            "incarnation": request.incarnation,
        }
        channel.send(message, (self._segments[grant.cluster.version].fd,))

    def _after_choice(self) -> None:
        known = self._membership.clusters
        self._close_segments()
        belongs = self._membership.belongs
        self._losses = [
            loss
            for loss in self._losses
            if any(belongs(loss.peer, loss.incarnation, v) for v, c in known.items() if loss.peer in c.workers)
        ]
        self._holders = {who: pid for who, pid in self._holders.items() if not self._membership.is_out(*who)}
        self._counting &= set(self._holders)
        current = self._membership.current
        self._told_to_end &= set() if current is None else set(current.workers)
        # What was ready to be gone over to from the version before need not be so from this one: a peer in it may have
        # been a member that this choice has excluded, and is another process from now on.
        self._announced = -1
        self._announce()  # to the segment of the chosen one
        self._stores.drop(self._membership.is_out)
        self._changed.notify_all()

    def _close_segments(self) -> None:
        for version in set(self._segments) - set(self._membership.clusters):
            self._segments.pop(version).close()


def _unmakeable(cluster: Cluster, error: Exception) -> str:
    return f"the shared memory of cluster version {cluster.version} ({cluster.size} workers) can't be made: {error}"


def _request_from(message: dict[str, Any]) -> Request | StandbyRequest | LeaveRequest:
    if "leave" in message:
        return LeaveRequest(PeerID.parse(message["leave"]), message.get("terminated") is True)
    numbers: dict[str, int | None] = {}
    for name in ("incarnation", "member_of", "version", "standby", "step"):
        value = message.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ProtocolError(f"{name} must be a number or null, got {value!r}")
        numbers[name] = value
    if numbers["standby"] is not None:
        return StandbyRequest(numbers["standby"])
    if numbers["incarnation"] is None:
        raise ProtocolError("a request names its incarnation")
    return Request(
        PeerID.parse(message.get("peer")),
        numbers["incarnation"],
        numbers["member_of"],
        numbers["version"],
        numbers["step"],
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_closed(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
