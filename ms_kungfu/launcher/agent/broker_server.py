"""The broker's socket: who may speak to it, and a thread for each connection.

There are as many connections as workers, which keep theirs, and most of their life is waiting.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import Protocol, TypeVar

import msgspec

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.broker_protocol import Connection, close_all, is_proof, new_nonce, proof_of
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.agent.stores import Stores
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import Reads, encode

T = TypeVar("T")
_log = logging.getLogger(__name__)
_HANDSHAKE_TIMEOUT_S = 10.0
_ACCEPT_RETRY_S = 0.2
_MAX_CONNECTIONS = 1024
# Of them, those that have proved nothing yet: more than a host's workers, which may all connect in one moment.
_MAX_UNPROVED = 512
_SILENT_S = 1.0  # a worker proves itself within milliseconds; one that is taken for a stranger comes again


class Serves(Protocol):
    """A broker, or who passes on to one."""

    stores: Stores

    def serve(self, connection: Asking, asked: m.ToHeadsBroker, pid: int) -> bool:
        """Answers one request of process `pid`. Whether there was an answer."""
        ...

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether the process has ended, or has no place any more."""
        ...


class Asking(Connection):
    """A worker's connection, at the broker's end."""

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        self.send_bytes(encode(message), fds)

    def receive_with_fds(self, reads: Reads[T]) -> tuple[T, list[int]]:
        """The next message and the descriptors that came with it, which the caller owns."""
        body, fds = self.receive_bytes()
        try:
            return reads(body), fds
        except ProtocolError:
            close_all(fds)
            raise


class BrokerServer:
    """Listens on an abstract Unix socket, `address`, from construction to `close`. Thread-safe."""

    def __init__(self, broker: Serves, secret: bytes) -> None:
        self._broker = broker
        self._secret = secret
        self._closing = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._connections: set[socket.socket] = set()
        self._unproved: dict[socket.socket, float] = {}  # of these, oldest first: when they were accepted

        self.address = f"kungfu-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kungfu-broker", daemon=True).start()

    def connections(self) -> int:
        """How many processes have come; each keeps its connection."""
        with self._lock:
            return len(self._connections) - len(self._unproved)

    def close(self) -> None:
        """Ends every connection. Workers that are waiting see a closed one."""
        with self._lock:
            self._closing.set()
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close() alone does not
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        trouble = ""
        while True:
            try:
                connection, _ = self._listener.accept()
                trouble = ""
            except OSError as error:
                if self._closing.is_set():
                    return
                # Without descriptors or memory, most likely: whoever connects waits in the backlog meanwhile.
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("a worker can't be heard for now: %s", error)
                with self._lock:
                    self._send_strangers_away()
                self._closing.wait(_ACCEPT_RETRY_S)
                continue
            if not self._take(connection):
                connection.close()

    def _take(self, connection: socket.socket) -> bool:
        """Whether the connection is served from now on."""
        with contextlib.suppress(OSError, ProtocolError, RuntimeError):  # the last: no thread can be started
            Connection(connection, None).check_same_user()  # before it costs a thread
            with self._lock:
                if self._closing.is_set() or len(self._connections) >= _MAX_CONNECTIONS:
                    return False
                if len(self._unproved) >= _MAX_UNPROVED:
                    self._send_strangers_away()
                self._connections.add(connection)
                self._unproved[connection] = time.monotonic()
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kungfu-broker", daemon=True).start()
                return True
            except BaseException as error:
                self._forget(connection)
                if isinstance(error, RuntimeError):
                    _log.warning(
                        "a worker can't be heard, and goes on asking: %s (a limit on memory or threads?)", error
                    )
                raise
        return False

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._unproved.pop(connection, None)

    def _send_strangers_away(self) -> None:
        """Makes room: ends the connections that have proved nothing for long, the oldest in any case. Their threads
        close them. Called with the lock held."""
        now = time.monotonic()
        strangers = [c for n, (c, since) in enumerate(self._unproved.items()) if n == 0 or now - since > _SILENT_S]
        for connection in strangers:
            del self._unproved[connection]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, accepted: socket.socket) -> None:
        connection = Asking(accepted, _HANDSHAKE_TIMEOUT_S)
        try:
            with contextlib.suppress(OSError, ProtocolError):
                pid = self._authenticate(connection)
                with self._lock:
                    self._unproved.pop(accepted, None)
                while self._answer(connection, pid):
                    connection.extend(None)  # the next one may come after hours of training
        except Exception as error:  # ends this connection, never the job
            _log.error("internal error: connection of a worker: %r; the launcher closes it", error, exc_info=error)
        finally:
            # In this order: who sees no connections any more counts on their descriptors being closed.
            connection.close()
            self._forget(accepted)

    def _answer(self, connection: Asking, pid: int) -> bool:
        try:
            asked, fds = connection.receive_with_fds(m.TO_BROKER)
        except ProtocolError as error:
            connection.send(m.Error(str(error)))
            return False
        if isinstance(asked, (m.PutStore, m.GetStore)):
            self._broker.stores.serve(connection, asked, fds, self._broker.is_out)
            return True
        close_all(fds)
        return self._broker.serve(connection, asked, pid)

    def _authenticate(self, connection: Asking) -> int:
        """The broker's end of the handshake (broker_protocol.prove has the other): the process ID at the other end."""
        pid, _ = connection.peer_credentials()
        challenge = new_nonce()
        connection.send(m.Nonce(challenge, m.PROTOCOL))
        reply, fds = connection.receive_with_fds(m.WORKER_PROOF)
        close_all(fds)
        if not is_proof(reply.proof, self._secret, "worker", challenge, reply.nonce):
            # Said, lest it be taken for a crowded broker. It tells nothing that the end of the connection doesn't.
            connection.send(m.Error("the job's broker has another secret (KUNGFU_JOB_SECRET)"))
            raise ProtocolError("wrong proof")
        connection.send(m.Proof(proof_of(self._secret, "broker", challenge, reply.nonce)))
        return pid
