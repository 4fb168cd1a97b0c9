"""The broker protocol: framing and handshake for both ends, and the worker's requests.

A connection serves one request at a time. A message is a 4-byte big-endian length, followed by that many bytes of JSON.
`launcher.wire.messages` defines a class for each message. Workers use unvalidated dictionaries instead, so that they
needn't load msgspec. Unvalidated messages are safe, because the broker proves its identity: before the first request,
both ends prove that they know the job's secret, and check that the other end has the same user ID.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from ms_kungfu import env
from ms_kungfu._decoding import MalformedError, ProtocolError, decode_object
from ms_kungfu._proofs import is_proof, new_nonce, proof_of
from ms_kungfu._run_time import SLICE_S, run_time
from ms_kungfu._version import VERSION, mindspore_version
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.errors import CollectiveTimeoutError, KungFuError, PeerLostError, ResizeError
from ms_kungfu.launcher.wire import PROTOCOL

T = TypeVar("T")
MAX_MESSAGE_BYTES = 64 * 1024
_MAX_POSTED_BYTES = 16 * 1024
MAX_FDS = 4
_CROWDED_S = 60.0  # six times the broker's time limit for an unauthenticated client


@dataclass(frozen=True)
class Granted:
    """A slot in `cluster`, with descriptors that the caller must close.

    `fd` is the descriptor of the cluster version's shared-memory segment on this host. If the version has several
    hosts, `between_hosts` contains three more descriptors: the version's control block, the socket to this host's
    transport, and the socket to the transport for other hosts' models.
    """

    cluster: Cluster
    rank: int
    fd: int
    peer: PeerID
    incarnation: int
    between_hosts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Detached:
    """The committed cluster version doesn't contain the caller.

    `evicted`: whether a user or another worker requested that the caller be removed.
    """

    evicted: bool = False


@dataclass(frozen=True)
class Stay:
    """The agreed cluster version was abandoned before any worker switched to it. The workers keep their version."""


class BrokerClient:
    """The worker's end of the protocol, which keeps its connection open from one request to the next.

    Therefore a cluster change, for which all workers wait, needs no new connection and no new handshake.

    Only one thread at a time may use the connection. A forked child opens its own connection. Other threads may call
    :meth:`report` at any time, because a report has no answer. :meth:`request_leave`, :meth:`fix_cores`, :meth:`expect`
    and :meth:`exchange_store` use separate connections, and may be called from any thread.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._connection: Connection | None = None  # guarded by `_sending`, because other threads may call `report`
        self._owner = 0
        self._sending = threading.Lock()

    @classmethod
    def from_environment(cls) -> BrokerClient:
        """Return a client of the broker that the environment variables name.

        Raise ResizeError if kungfu-run hasn't started this process.
        """
        address, secret = env.BROKER.get(), env.JOB_SECRET.get()
        if address is None or secret is None:
            raise ResizeError("this process was not started by kungfu-run, so it can't join a cluster")
        return cls(address, bytes.fromhex(secret))

    def request_segment(
        self,
        peer: PeerID,
        incarnation: int,
        member_of: int | None,
        version: int | None,
        timeout: float | None,
        step: int | None = None,
    ) -> Granted | Detached | Stay:
        """Request a slot. Wait up to `timeout` seconds for the answer; None means no limit.

        A member of cluster version `member_of` requests a slot in the agreed cluster version `version`. A joining
        worker passes None for both, which also reports that it is ready. The launcher answers when a version that
        contains the worker is committed. The broker answers `Stay` only to members. `step` is the training step, for
        the launcher's log.

        Raises PeerLostError if the launcher has ended, CollectiveTimeoutError after `timeout`, and ResizeError if a
        member's request is rejected. Raises KungFuError if a joining worker's request is rejected, or if the other end
        doesn't know the job's secret.
        """
        wanted = "a cluster that contains it" if version is None else f"cluster version {version}"
        request = {
            "type": "slot_request", "peer": str(peer), "incarnation": incarnation, "member_of": member_of,
            "version": version, "step": step, "software": _software() if member_of is None else None,
        }  # fmt: skip
        answer = self._ask(request, str(peer), wanted, timeout)
        if isinstance(answer, str):
            raise ResizeError(answer) if member_of is not None else KungFuError(answer)
        return answer

    def request_identity(self, standby: int) -> Granted | Detached:
        """Report that standby `standby` is ready. Wait, without a time limit, for the standby's first slot."""
        request = {"type": "standby_request", "number": standby, "software": _software()}
        answer = self._ask(request, f"standby {standby}", "its slot", None)
        if not isinstance(answer, (Granted, Detached)):
            raise KungFuError(f"the broker rejected standby {standby}: {answer}")
        return answer

    def request_leave(self, peer: PeerID, timeout: float, terminated: bool = False) -> None:
        """Request that the cluster continue without `peer`. `terminated`: whether that worker has received SIGTERM.

        Return when the launcher has granted the request. A cluster version without `peer` follows later. If
        `terminated` is true and no worker may leave, the job ends instead.

        Raises PeerLostError if the launcher has ended, CollectiveTimeoutError after `timeout`, and ResizeError if the
        request is rejected.
        """
        with contextlib.closing(BrokerClient(self._address, self._secret)) as once:
            request = {"type": "leave_request", "peer": str(peer), "terminated": terminated}
            answer = once._ask(request, str(peer), "leaving", timeout)
        if isinstance(answer, str):
            raise ResizeError(answer)

    def fix_cores(self, each: int, timeout: float) -> int:
        """Make this host's launcher assign `each` cores to each worker from now on, at every cluster size.

        If an earlier call has already fixed another number, that number applies. Wait until this process has the fixed
        number of cores, and return the number. Return 0 if workers aren't pinned to cores.

        Raises KungFuError, CollectiveTimeoutError and PeerLostError like :meth:`request_segment`.
        """
        return int(self._tell({"type": "fix_cores", "each": each}, "its cores", timeout)["each"])

    def expect(self, version: int, joining: int, size: int, timeout: float) -> None:
        """Notify the launcher that the members of cluster version `version` will next request `size` workers.

        Of these workers, `joining` are new.

        Raises KungFuError, CollectiveTimeoutError and PeerLostError like :meth:`request_segment`.
        """
        request = {"type": "expect", "version": version, "joining": joining, "size": size}
        self._tell(request, "the next cluster", timeout)

    def report_program_end(self, peer: PeerID, incarnation: int, timeout: float) -> None:
        """Report that this process's program has ended. Raises the same errors as :meth:`request_segment`."""
        request = {"type": "program_ended", "peer": str(peer), "incarnation": incarnation}
        self._tell(request, "its program's end", timeout)

    def _tell(self, request: dict[str, Any], about: str, timeout: float) -> dict[str, Any]:
        """Send a request on a separate connection, and return the launcher's answer."""
        with _explained(f"process {os.getpid()}", about, timeout):
            with contextlib.closing(_connected(self._address, self._secret, timeout)) as connection:
                send(connection, request)
                answer, fds = _answer_on(connection, timeout)
                close_all(fds)
            if answer["type"] == "error":
                raise ProtocolError(str(answer.get("error")))
            return answer

    def exchange_store(
        self, request: dict[str, Any], timeout: float, fd: int | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request about a model store, together with the descriptor `fd`.

        Return the answer, and its descriptors, which the caller owns.

        Raises OSError and ProtocolError.
        """
        with contextlib.closing(_connected(self._address, self._secret, timeout)) as connection:
            send(connection, request, () if fd is None else (fd,))
            return receive_with_fds(connection)

    def report(self, report: dict[str, Any]) -> None:
        """Send a report, or drop it if there is no connection or if the launcher has too many unread reports."""
        body = json.dumps(report).encode()
        if self._owner != os.getpid():
            return
        with self._sending:
            if self._connection is not None:
                self._connection.post(body)

    def open_end_watch(self) -> EndWatch:
        """Return a connection on which the launcher announces the end of the job."""
        with _explained("this worker", "the job's end", None):
            connection = _connected(self._address, self._secret, None)
            send(connection, {"type": "await_end"})
            return EndWatch(connection)

    def close(self) -> None:
        if self._owner != os.getpid():  # a thread of the parent may have held the lock during the fork
            self._sending = threading.Lock()
        with self._sending:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self, timeout: float | None) -> Connection:
        """Return the open connection, or open one. In both cases set a new deadline."""
        if self._connection is not None and self._owner != os.getpid():
            self.close()
        if self._connection is None:
            self._connection = _connected(self._address, self._secret, timeout)
            self._owner = os.getpid()
        self._connection.extend(timeout)
        return self._connection

    def _ask(
        self, request: dict[str, Any], who: str, about: str, timeout: float | None
    ) -> Granted | Detached | Stay | str:
        """Return the answer, or an error message. If more requests may follow, keep the connection open."""
        kept = False
        try:
            with _explained(who, about, timeout):
                connection = self._open(timeout)
                with self._sending:
                    send(connection, request)
                answer, fds = _answer_on(connection, timeout)
                try:
                    found = _meant(answer, fds, request.get("peer"), who)
                    kept = isinstance(found, (Granted, Stay))
                    fds = [] if isinstance(found, Granted) else fds
                    return found
                finally:
                    close_all(fds)
        finally:
            if not kept:
                self.close()


class EndWatch:
    """The launcher's connection for announcing the job's end. It then waits until the worker closes the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> int:
        """Wait until the launcher announces the job's end. Return the signal that ends it, or 0 after `hang_up`."""
        with contextlib.suppress(OSError, ProtocolError):
            return int(receive_with_fds(self._connection)[0].get("number", 0))
        return 0

    def hang_up(self) -> None:
        """Close the connection, from any thread, even if a forked child has a copy of the descriptor."""
        with contextlib.suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._connection.close()


@contextlib.contextmanager
def _explained(who: str, about: str, timeout: float | None) -> Iterator[None]:
    """Convert failures in this block to exceptions of `ms_kungfu.errors`."""
    try:
        yield
    except socket.timeout:
        raise CollectiveTimeoutError(f"{who}: no answer from the launcher about {about} within {timeout:g} s") from None
    except OSError as error:
        raise PeerLostError(f"{who}: the launcher has ended ({error.strerror or error})") from None
    except (ProtocolError, ValueError) as error:
        raise KungFuError(f"{who}: {error}") from None


def _meant(
    answer: dict[str, Any], fds: Sequence[int], asked_as: str | None, who: str
) -> Granted | Detached | Stay | str:
    """Parse the broker's answer to a slot request or leave request. Return an error message as a str."""
    kind = answer["type"]
    if kind != "slot":
        if kind in ("detached", "leaving"):
            return Detached(answer.get("evicted") is True)
        return Stay() if kind == "stay" else str(answer.get("error", f"the broker answered {kind}"))
    cluster, rank = Cluster.from_json(answer.get("cluster")), answer.get("rank")
    peer, incarnation = PeerID.parse(answer.get("peer")), answer.get("incarnation")
    if len(fds) != descriptors_of(cluster):
        raise ProtocolError(f"the broker sent {len(fds)} descriptors with {cluster.dumps()} to {who}")
    if rank is None or rank != cluster.rank_of(peer) or asked_as not in (None, str(peer)):
        raise ProtocolError(f"the broker sent rank {rank!r} in {cluster.dumps()} and name {peer} to {who}")
    if not isinstance(incarnation, int):
        raise ProtocolError(f"the broker sent incarnation {incarnation!r} to {who}")
    return Granted(cluster, rank, fds[0], peer, incarnation, tuple(fds[1:]))


def send(connection: Connection, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a worker's message."""
    connection.send_bytes(json.dumps(message).encode(), fds)


def receive_with_fds(connection: Connection) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and the descriptors that were sent with it. The caller owns the descriptors."""
    body, fds = connection.receive_bytes()
    try:
        message = decode_object(body, MAX_MESSAGE_BYTES)
        if not isinstance(message.get("type"), str):
            raise MalformedError("it has no type")
    except MalformedError as error:
        close_all(fds)
        raise ProtocolError(f"a message is malformed: {error}") from None
    return message, fds


def _answer_on(connection: Connection, timeout: float | None) -> tuple[dict[str, Any], list[int]]:
    """Return the next message whose type isn't `waiting`, and its descriptors, which the caller owns."""
    while True:
        answer, fds = receive_with_fds(connection)
        if answer["type"] != "waiting":
            return answer, fds
        close_all(fds)
        connection.extend(timeout)


def _software() -> dict[str, str]:
    """Return a joining worker's software versions, which must be the same in all workers of a job."""
    return {"ms_kungfu": VERSION, "mindspore": mindspore_version()}


def descriptors_of(cluster: Cluster) -> int:
    """Return the number of descriptors that the broker sends when it assigns a slot in `cluster`.

    One descriptor is that of the segment. If the cluster has several hosts, there are three more: those of the control
    block, the transport and the transport for models.
    """
    return 1 if len(cluster.hosts) == 1 else 4


def _connected(address: str, secret: bytes, timeout: float | None) -> Connection:
    """Return a connection to the broker, after both ends have proved that they know the secret.

    If the broker has too many unauthenticated clients, it delays a connection, or closes the connection before the
    proof. The function then tries again. Only ECONNREFUSED means that the launcher has ended.
    """
    deadline = run_time() + (_CROWDED_S if timeout is None else min(timeout, _CROWDED_S))
    pause = 0.05
    while True:
        connection = Connection(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), timeout)
        try:
            connection.socket.settimeout(timeout)
            connection.socket.connect("\0" + address)
            prove(connection, secret)
            return connection
        except (BlockingIOError, ConnectionError) as error:
            connection.close()
            if isinstance(error, ConnectionRefusedError) or run_time() + pause > deadline:
                raise
        except BaseException:
            connection.close()
            raise
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


class Connection:
    """One end of a connection. One deadline, on the clock `run_time`, applies to all operations.

    The object owns the socket.
    """

    def __init__(self, connection: socket.socket, timeout: float | None) -> None:
        self.socket = connection
        self._rest = b""  # the unsent rest of a message that `post` has sent in part
        self.extend(timeout)

    def close(self) -> None:
        self.socket.close()

    def extend(self, timeout: float | None) -> None:
        """Set a new deadline, `timeout` seconds from now. None means no deadline."""
        self._deadline = None if timeout is None else run_time() + timeout

    def post(self, body: bytes) -> None:
        """Send a message if this is possible without waiting. If it isn't, drop the message.

        If the kernel accepts only the beginning of the message, the rest is sent before the next message. This method
        doesn't change the socket's timeout, because another thread may be receiving.
        """
        if len(body) > _MAX_POSTED_BYTES:
            return
        ready = select.poll()
        ready.register(self.socket, select.POLLOUT)
        with contextlib.suppress(OSError):  # if the connection is broken, the next request fails and reports it
            if not ready.poll(0):
                return
            data = self._rest + struct.pack(">I", len(body)) + body
            self._rest = data[os.write(self.socket.fileno(), data) :]

    def send_bytes(self, body: bytes, fds: tuple[int, ...] = ()) -> None:
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        data, self._rest = self._rest + struct.pack(">I", len(body)) + body, b""
        sent = self._in_slices(socket.send_fds, self.socket, [data], list(fds)) if fds else 0
        while sent < len(data):  # don't send zero bytes, because that fails if the other end has closed the connection
            sent += self._in_slices(self.socket.send, data[sent:])

    def receive_bytes(self) -> tuple[bytes, list[int]]:
        """Return the next message and its descriptors, which the caller owns."""
        fds: list[int] = []
        try:
            (length,) = struct.unpack(">I", self._exactly(4, fds))
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
            return self._exactly(length, fds), fds
        except BaseException:
            close_all(fds)
            raise

    def _exactly(self, count: int, fds: list[int]) -> bytes:
        data = b""
        while len(data) < count:
            piece, received = self._in_slices(receive_fds, self.socket, count - len(data))
            fds += received
            if not piece:
                raise ConnectionError("the connection was closed")
            data += piece
        return data

    def _in_slices(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking socket operation and return its result. Raise socket.timeout after the deadline."""
        if self._deadline is None:
            self.socket.settimeout(None)
            return call(*arguments)
        while True:
            left = self._deadline - run_time()
            if left <= 0:
                raise socket.timeout
            self.socket.settimeout(min(left, SLICE_S))
            with contextlib.suppress(socket.timeout):
                return call(*arguments)


def check_same_user(connection: socket.socket) -> int:
    """Return the PID of the process at the other end of a Unix socket.

    Raise ProtocolError unless that process belongs to this user.
    """
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ProtocolError(f"the other end belongs to user {uid}, not to {os.geteuid()}")
    return int(pid)


def receive_fds(connection: socket.socket, max_bytes: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return data, and the descriptors that came with it. The descriptors are closed on exec.

    `socket.recv_fds` isn't used, because it ignores `flags` in Python 3.11.
    """
    fds = array.array("i")
    room = socket.CMSG_LEN(MAX_FDS * fds.itemsize)
    data, ancillary, _, _ = connection.recvmsg(max_bytes, room, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def prove(connection: Connection, secret: bytes) -> None:
    """Perform the worker's part of the handshake. (`launcher.handshake` contains the broker's part.)

    Raise ProtocolError if the other end isn't the job's broker.
    """
    check_same_user(connection.socket)
    nonce = new_nonce()
    send(connection, {"type": "nonce", "nonce": nonce, "protocol": PROTOCOL})
    challenge = _heard(connection, "nonce")
    if challenge.get("protocol") != PROTOCOL:
        raise ProtocolError(
            f"the broker uses protocol {challenge.get('protocol')}, but this process uses {PROTOCOL}; install the "
            "same version of ms_kungfu for the whole job"
        )
    theirs = str(challenge.get("nonce"))
    send(connection, {"type": "proof", "proof": proof_of(secret, "worker", theirs, nonce)})
    if not is_proof(_heard(connection, "proof").get("proof"), secret, "broker", theirs, nonce):
        raise ProtocolError("the broker does not know the job's secret (KUNGFU_JOB_SECRET)")


def _heard(connection: Connection, kind: str) -> dict[str, Any]:
    """Return the next message. Raise ProtocolError if its type isn't `kind`."""
    message, fds = receive_with_fds(connection)
    close_all(fds)
    if message["type"] != kind:
        raise ProtocolError(str(message.get("error", f"expected a {kind} message, got a {message['type']!r}")))
    return message
