"""The broker hands each worker the shared memory of the cluster version that it belongs to, and nobody else.

What a request is answered is decided by :class:`Membership`, which is pure; the broker adds the socket, the proof of
the secret and the waiting. A thread for each connection: there are as many as workers, which keep theirs, and most of
their life is waiting.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

from ms_kungfu.elastic.cluster import Cluster, PeerID
from ms_kungfu.elastic.rendezvous import Channel, ProtocolError, new_nonce, proof_of, text_field
from ms_kungfu.launcher.stores import Stores

_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 1024


class Segment(Protocol):
    """The shared memory of a cluster version, as the launcher holds it."""

    fd: int

    def mark_lost(self, rank: int, reason: str, recover: bool) -> None: ...

    def heartbeat(self, rank: int) -> int: ...

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

    def mark_lost(self, rank: int, reason: str, recover: bool) -> None:
        self._control.mark_lost(rank, reason, recover)

    def heartbeat(self, rank: int) -> int:
        return int(self._control.heartbeat(rank))

    def announce(self, version: int) -> None:
        self._control.announce(version)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Request:
    """What a worker asks: a member names the version it comes from and the agreed one, a newcomer neither."""

    peer: PeerID
    incarnation: int
    member_of: int | None
    version: int | None


@dataclass(frozen=True)
class StandbyRequest:
    """A spare process is ready to become whoever is needed. `number` is its name at the launcher."""

    number: int


@dataclass(frozen=True)
class LeaveRequest:
    """A worker asks that the cluster go on without `peer`, itself perhaps."""

    peer: PeerID


@dataclass(frozen=True)
class Grant:
    cluster: Cluster
    rank: int


@dataclass(frozen=True)
class Detach:
    pass


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
    """

    clusters: dict[int, Cluster] = field(default_factory=dict)
    chosen: int | None = None
    refused: dict[int, str] = field(default_factory=dict)  # versions that the launcher can't run, and why
    # Chosen versions that did not contain the peer: its processes that were started before are out for good.
    excluded: dict[PeerID, list[int]] = field(default_factory=dict)
    # Peers whose process has ended, with the newest version that means that process by the peer ID.
    ended: dict[PeerID, int] = field(default_factory=dict)
    # Processes that have come and wait for their first version.
    ready: set[tuple[PeerID, int]] = field(default_factory=set)

    @property
    def current(self) -> Cluster | None:
        return None if self.chosen is None else self.clusters[self.chosen]

    @property
    def newest(self) -> Cluster | None:
        return self.clusters[max(self.clusters)] if self.clusters else None

    def admit(self, cluster: Cluster) -> None:
        """A version is known from now on. A version is never redefined."""
        newest = self.newest
        if newest is not None and cluster.version <= newest.version:
            return
        if newest is not None:
            # Whoever wrote it may not have heard of a process's end: a peer that is still listed is the one that ended.
            # One that a version has left out and that is listed again is a newcomer.
            for peer in set(cluster.workers) & set(self.ended_in(newest)):
                self.ended[peer] = cluster.version
        self.clusters[cluster.version] = cluster

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
            self.ended[peer] = newest.version

    def ended_in(self, cluster: Cluster) -> list[PeerID]:
        """The workers of `cluster` whose processes have ended."""
        return [peer for peer in cluster.workers if cluster.version <= self.ended.get(peer, -1)]

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether a chosen version has excluded this process, or it has ended. It can't come back."""
        return incarnation <= max(self.excluded.get(peer, [-1])[-1], self.ended.get(peer, -1))

    def belongs(self, peer: PeerID, incarnation: int, version: int) -> bool:
        """Whether the process is the one that `version` means by its peer ID, and not an earlier or later one."""
        return (
            incarnation <= version
            and not any(incarnation <= v <= version for v in self.excluded.get(peer, []))
            and not incarnation <= self.ended.get(peer, -1) < version
        )

    def announceable(self) -> int | None:
        """The newest version that its members could go over to at once: all its newcomers are ready.

        Whoever has ended holds up nobody: such a version has a dead rank until the next one. But where nobody who has
        the state would be left, the next one has to be waited for.
        """
        for version in sorted(self.clusters, reverse=True):
            if self.chosen is not None and version <= self.chosen:
                return self.chosen
            if self._keeps_the_state(self.clusters[version]) and all(
                self._is_here(peer, version) for peer in self.clusters[version].workers
            ):
                return version
        return None

    def _keeps_the_state(self, cluster: Cluster) -> bool:
        current = self.current
        return current is None or any(
            peer in cluster.workers and current.version > self.ended.get(peer, -1) for peer in current.workers
        )

    def _is_here(self, peer: PeerID, version: int) -> bool:
        ended, current = self.ended.get(peer, -1), self.current
        if version <= ended or (current is not None and peer in current.workers and current.version > ended):
            return True
        return any(who == peer and self.belongs(who, incarnation, version) for who, incarnation in self.ready)

    def answer(self, request: Request) -> Grant | Detach | Refuse | Wait:
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
            if request.version not in self.clusters:
                return Wait(unknown=request.version)
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


class Broker:
    """Listens on an abstract Unix socket, `address`, from construction to `close`. Every method is thread-safe.

    `on_unknown_version` is called when a member asks for a version that has not been admitted, `on_chosen` when a
    version has become the chosen one by a member's request, `on_leave` when a worker asks that a peer of the newest
    version leave it, `on_ready` when a newcomer or a standby (its number) is ready to join; all from the broker's
    threads, without its lock. `recovers`: members go on without those who die.
    """

    def __init__(
        self,
        secret: bytes,
        cores: int,
        *,
        recovers: bool = False,
        make_segment: Callable[[int, int, int, bool], Segment] = CoreSegment,
        on_unknown_version: Callable[[int], None] | None = None,
        on_chosen: Callable[[Cluster], None] | None = None,
        on_leave: Callable[[PeerID], None] | None = None,
        on_ready: Callable[[PeerID | int], None] | None = None,
    ) -> None:
        self._secret = secret
        self._cores = cores
        self._recovers = recovers
        self._make_segment = make_segment
        self._on_unknown_version = on_unknown_version
        self._on_chosen = on_chosen
        self._on_leave = on_leave
        self._on_ready = on_ready
        self._stores = Stores()
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._membership = Membership()
        self._segments: dict[int, Segment] = {}
        self._losses: list[_Loss] = []
        self._announced = -1
        self._holders: dict[tuple[PeerID, int], int] = {}  # process -> process ID that came with its name
        self._ready_standbys: set[int] = set()
        self._identities: dict[int, tuple[PeerID, int]] = {}  # of standbys that are needed
        self._connections: set[socket.socket] = set()
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
            self._announce()
            self._changed.notify_all()

    def refuse(self, version: int, reason: str) -> None:
        """A version that this host can't run: members who ask for it are told why instead of waiting for it."""
        with self._changed:
            self._membership.refused[version] = reason
            self._changed.notify_all()

    def choose(self, version: int) -> None:
        """The launcher's own choice: the initial version. It must have been admitted."""
        with self._changed:
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

    def ready_standbys(self) -> set[int]:
        with self._changed:
            return set(self._ready_standbys)

    def assign(self, standby: int, peer: PeerID, incarnation: int) -> None:
        """The standby is this peer from now on."""
        with self._changed:
            self._identities[standby] = (peer, incarnation)
            self._changed.notify_all()

    def mark_lost(self, peer: PeerID, reason: str, incarnation: int, recover: bool = False) -> None:
        """A process has ended: tells the members of every version that it belongs to, also of those to come.

        With `recover` they go on without it. It must have been reaped.
        """
        with self._changed:
            self._membership.bury(peer, incarnation)
            self._stores.drop(self._membership.is_out)
            loss = _Loss(peer, incarnation, reason, recover and self._recovers)
            self._losses.append(loss)
            for version, segment in self._segments.items():
                self._tell(segment, self._membership.clusters[version], loss)
            self._announce()  # a version may have waited for it alone
            self._changed.notify_all()

    def heartbeat(self, peer: PeerID, incarnation: int) -> tuple[int, ...]:
        """Counts that move for as long as the process runs; none before it has begun to count."""
        with self._changed:
            beats = []
            for version, segment in self._segments.items():
                rank = self._membership.clusters[version].rank_of(peer)
                if rank is not None and self._membership.belongs(peer, incarnation, version):
                    beats.append(segment.heartbeat(rank))
            return tuple(beats) if any(beats) else ()

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
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if self._closed or len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kungfu-broker", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, _HANDSHAKE_TIMEOUT_S)
        try:
            with contextlib.suppress(OSError, ProtocolError):
                pid = self._authenticate(channel)
                while self._serve_one(channel, pid):
                    channel.extend(None)  # the next one may come after hours of training
        finally:
            # In this order: who sees no connections any more counts on their descriptors being closed.
            channel.close()
            with self._changed:
                self._connections.discard(connection)

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
            refusal = self._let_leave(request.peer)
            channel.send({"error": refusal} if refusal else {"leaving": True})
        else:
            self._answer(channel, request, pid)
        return True

    def _authenticate(self, channel: Channel) -> int:
        channel.check_same_user()
        pid, _ = channel.peer_credentials()
        challenge = new_nonce()
        channel.send({"nonce": challenge})
        reply = channel.receive()
        nonce, proof = text_field(reply, "nonce"), text_field(reply, "proof")
        if not hmac.compare_digest(proof.encode(), proof_of(self._secret, "worker", challenge, nonce).encode()):
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
                    answer: Grant | Detach | Refuse | Wait = Wait()
                else:
                    before = self._membership.chosen
                    answer = self._refusal_of(request, pid) or self._membership.answer(request)
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
                self._on_chosen(chosen)
            if news and self._on_ready is not None:
                self._on_ready(asked.number if isinstance(asked, StandbyRequest) else asked.peer)
            if isinstance(answer, Wait):
                if unknown is not None and self._on_unknown_version is not None:
                    self._on_unknown_version(unknown)
                continue
            channel.extend(_HANDSHAKE_TIMEOUT_S)
            if isinstance(answer, Detach):
                channel.send({"detached": True})
            elif isinstance(answer, Refuse):
                channel.send({"error": answer.reason})
            return

    def _let_leave(self, peer: PeerID) -> str:
        """Passes the wish on; the reason where it can't be granted."""
        with self._changed:
            newest = self._membership.newest
            if self._ending or newest is None:
                return "the job is ending"
            if peer not in newest.workers:
                return ""  # it is leaving already
            if len(newest.workers) - len(self._membership.ended_in(newest)) <= 1:
                return f"{peer} is the last worker"
        if self._on_leave is None:
            return "this launcher does not follow changes of the cluster (-w)"
        self._on_leave(peer)
        return ""

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
        version = self._membership.announceable()
        if version is not None and version > self._announced:
            self._announced = version
            chosen = -1 if self._membership.chosen is None else self._membership.chosen
            segment = self._segments.get(chosen)
            if segment is not None and version > chosen:
                if version not in self._segments:
                    with contextlib.suppress(Exception):  # tried again, and told, when somebody asks for it
                        self._make(self._membership.clusters[version])
                segment.announce(version)

    def _make(self, cluster: Cluster) -> Segment:
        """The segment of a version. Made before the members hear of it, so that they needn't wait for it."""
        segment = self._make_segment(cluster.size, cluster.version, self._cores, self._recovers)
        self._segments[cluster.version] = segment
        segment.announce(max(self._announced, cluster.version))
        for loss in self._losses:
            self._tell(segment, cluster, loss)
        return segment

    def _tell(self, segment: Segment, cluster: Cluster, loss: _Loss) -> None:
        rank = cluster.rank_of(loss.peer)
        if rank is not None and self._membership.belongs(loss.peer, loss.incarnation, cluster.version):
            segment.mark_lost(rank, loss.reason, loss.recover)

    def _refusal_of(self, request: Request, pid: int) -> Refuse | None:
        """A forked child has its parent's name and secret, but not its place."""
        holder = self._holders.get((request.peer, request.incarnation))
        if holder is None or holder == pid or not _is_alive(holder):
            return None
        return Refuse(f"the place of {request.peer} belongs to process {holder}; process {pid} has no place of its own")

    def _grant(self, channel: Channel, request: Request, grant: Grant, pid: int) -> None:
        version = grant.cluster.version
        segment = self._segments.get(version)
        if segment is None:
            try:
                segment = self._make(grant.cluster)
            except Exception as error:  # whatever the runtime or the kernel has against it, the worker must hear of it
                channel.send({"error": f"the launcher can't make the shared memory of version {version}: {error}"})
                return
        self._holders[(request.peer, request.incarnation)] = pid
        message = {
            "cluster": grant.cluster.to_json(),
            "rank": grant.rank,
            "peer": str(request.peer),
            "incarnation": request.incarnation,
        }
        channel.send(message, (segment.fd,))

    def _after_choice(self) -> None:
        known = self._membership.clusters
        for version in set(self._segments) - set(known):
            self._segments.pop(version).close()
        belongs = self._membership.belongs
        self._losses = [
            loss
            for loss in self._losses
            if any(belongs(loss.peer, loss.incarnation, v) for v, c in known.items() if loss.peer in c.workers)
        ]
        self._holders = {who: pid for who, pid in self._holders.items() if not self._membership.is_out(*who)}
        # What was ready to be gone over to from the version before need not be so from this one: a peer in it may have
        # been a member that this choice has excluded, and is another process from now on.
        self._announced = -1
        self._announce()
        self._stores.drop(self._membership.is_out)
        self._changed.notify_all()


def _request_from(message: dict[str, Any]) -> Request | StandbyRequest | LeaveRequest:
    if "leave" in message:
        return LeaveRequest(PeerID.parse(message["leave"]))
    numbers: dict[str, int | None] = {}
    for name in ("incarnation", "member_of", "version", "standby"):
        value = message.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ProtocolError(f"{name} must be a number or null, got {value!r}")
        numbers[name] = value
    if numbers["standby"] is not None:
        return StandbyRequest(numbers["standby"])
    if numbers["incarnation"] is None:
        raise ProtocolError("a request names its incarnation")
    return Request(PeerID.parse(message.get("peer")), numbers["incarnation"], numbers["member_of"], numbers["version"])


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
