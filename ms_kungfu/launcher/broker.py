"""The broker hands each worker the shared memory of the cluster version that it belongs to, and nobody else.

What a request is answered is decided by :class:`Membership`, which is pure; the broker adds the socket, the proof of
the secret and the waiting. A thread for each connection: there are as many as workers, and most of their life is
waiting.
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

    def mark_lost(self, rank: int, reason: str) -> None: ...

    def announce(self, version: int) -> None: ...

    def close(self) -> None: ...


class CoreSegment:
    """A segment of the runtime. Closes its descriptor; the mapping goes with the object."""

    def __init__(self, size: int, cluster_version: int, cores: int) -> None:
        # Not at the top: a job whose workers never ask for a segment starts without loading the runtime.
        import ms_kungfu._core as _core

        self.fd: int = _core.create_segment(size, cluster_version, cores)
        try:
            self._control: Any = _core.SegmentControl(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def mark_lost(self, rank: int, reason: str) -> None:
        self._control.mark_lost(rank, reason)

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
    """Which cluster versions are known, which one is chosen, and who is out. Pure.

    A process is named by its peer ID and its incarnation, the version it was started for: a peer that left and came
    back is another process, and the old one must not get the place of the new one.
    """

    clusters: dict[int, Cluster] = field(default_factory=dict)
    chosen: int | None = None
    refused: dict[int, str] = field(default_factory=dict)  # versions that the launcher can't run, and why
    # Chosen versions that did not contain the peer: its processes that were started before are out for good.
    excluded: dict[PeerID, list[int]] = field(default_factory=dict)

    @property
    def current(self) -> Cluster | None:
        return None if self.chosen is None else self.clusters[self.chosen]

    def admit(self, cluster: Cluster) -> None:
        """A version is known from now on. A version is never redefined."""
        if self.chosen is not None and cluster.version <= self.chosen:
            return
        self.clusters.setdefault(cluster.version, cluster)

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

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether a chosen version has excluded this process. It can't come back."""
        return incarnation <= self.excluded.get(peer, [-1])[-1]

    def belongs(self, peer: PeerID, incarnation: int, version: int) -> bool:
        """Whether the process is the one that `version` means by its peer ID, and not an earlier or later one."""
        return incarnation <= version and not any(incarnation <= v <= version for v in self.excluded.get(peer, []))

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


class Broker:
    """Listens on an abstract Unix socket, `address`, from construction to `close`. Every method is thread-safe.

    `on_unknown_version` is called when a member asks for a version that has not been admitted, `on_chosen` when a
    version has become the chosen one by a member's request; both from the broker's threads, without its lock.
    """

    def __init__(
        self,
        secret: bytes,
        cores: int,
        *,
        make_segment: Callable[[int, int, int], Segment] = CoreSegment,
        on_unknown_version: Callable[[int], None] | None = None,
        on_chosen: Callable[[Cluster], None] | None = None,
    ) -> None:
        self._secret = secret
        self._cores = cores
        self._make_segment = make_segment
        self._on_unknown_version = on_unknown_version
        self._on_chosen = on_chosen
        self._stores = Stores()
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._membership = Membership()
        self._segments: dict[int, Segment] = {}
        self._lost: dict[int, dict[int, str]] = {}  # version -> rank -> reason
        self._announced = -1
        self._holders: dict[tuple[PeerID, int], int] = {}  # process -> process ID that came with its name
        self._connections: set[socket.socket] = set()
        self._closed = False

        self.address = f"kungfu-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kungfu-broker", daemon=True).start()

    def admit(self, cluster: Cluster) -> None:
        """A version is known: members may choose it, and those of the chosen version are told that it is wanted."""
        with self._changed:
            self._membership.admit(cluster)
            self._announced = max(self._announced, cluster.version)
            for segment in self._segments.values():
                segment.announce(self._announced)
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

    def current(self) -> Cluster | None:
        """The chosen cluster."""
        with self._changed:
            return self._membership.current

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether a chosen version has excluded the process of `peer` that was started for version `incarnation`."""
        with self._changed:
            return self._membership.is_out(peer, incarnation)

    def mark_lost(self, peer: PeerID, reason: str, incarnation: int | None = None) -> None:
        """Tells the members of every known version that the process belongs to that it is gone."""
        self._stores.drop(lambda who, started: who == peer and incarnation in (None, started))
        with self._changed:
            for version, cluster in self._membership.clusters.items():
                rank = cluster.rank_of(peer)
                if rank is None:
                    continue
                if incarnation is not None and not self._membership.belongs(peer, incarnation, version):
                    continue
                self._lost.setdefault(version, {})[rank] = reason
                if version in self._segments:
                    self._segments[version].mark_lost(rank, reason)

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
                try:
                    message = channel.receive()
                    if "store" in message:
                        self._stores.serve(channel, message, self.is_out)
                        return
                    request = _request_from(message)
                except (ProtocolError, ValueError) as error:
                    channel.send({"error": str(error)})
                    return
                self._answer(channel, request, pid)
        finally:
            with self._changed:
                self._connections.discard(connection)
            channel.close()

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

    def _answer(self, channel: Channel, request: Request, pid: int) -> None:
        asked_for: int | None = None
        channel.extend(_HANDSHAKE_TIMEOUT_S)
        while True:
            unknown: int | None = None
            with self._changed:
                if self._closed:
                    return
                before = self._membership.chosen
                answer = self._refusal_of(request, pid) or self._membership.answer(request)
                chosen = self._membership.current if self._membership.chosen != before else None
                if chosen is not None:
                    self._after_choice()
                if isinstance(answer, Grant):
                    # Sent under the lock: mark_lost and the next choice must not close the descriptor meanwhile.
                    channel.extend(_HANDSHAKE_TIMEOUT_S)
                    self._grant(channel, request, answer, pid)
                elif isinstance(answer, Wait):
                    if answer.unknown is not None and answer.unknown != asked_for:
                        unknown = asked_for = answer.unknown
                    else:
                        # Woken by every change; now and then to see whether the worker has given up.
                        self._changed.wait(1.0)
                        if _is_closed(channel.socket):
                            return
            if chosen is not None and self._on_chosen is not None:
                self._on_chosen(chosen)
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

    # ---- with the lock held ----

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
                segment = self._make_segment(grant.cluster.size, version, self._cores)
            except Exception as error:  # whatever the runtime or the kernel has against it, the worker must hear of it
                channel.send({"error": f"the launcher can't make the shared memory of version {version}: {error}"})
                return
            self._segments[version] = segment
            segment.announce(max(self._announced, version))
            for rank, reason in self._lost.get(version, {}).items():
                segment.mark_lost(rank, reason)
        self._holders[(request.peer, request.incarnation)] = pid
        channel.send({"cluster": grant.cluster.to_json(), "rank": grant.rank}, (segment.fd,))

    def _after_choice(self) -> None:
        for version in set(self._segments) - set(self._membership.clusters):
            self._segments.pop(version).close()
        for version in set(self._lost) - set(self._membership.clusters):
            del self._lost[version]
        self._holders = {who: pid for who, pid in self._holders.items() if not self._membership.is_out(*who)}
        self._stores.drop(self._membership.is_out)
        self._changed.notify_all()


def _request_from(message: dict[str, Any]) -> Request:
    numbers: dict[str, int | None] = {}
    for name in ("incarnation", "member_of", "version"):
        value = message.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ProtocolError(f"{name} must be a number or null, got {value!r}")
        numbers[name] = value
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
