"""Exchange messages over connections: between launchers, within a launcher, and between an agent and its workers.

A message consists of a 4-byte big-endian length and that many bytes of JSON (`wire.messages`). If TLS is used
(``KUNGFU_TLS_CERT`` and related variables), the whole message is encrypted. The runtime calls OpenSSL for TLS
(`_core.TlsEnd`). If a connection is passed to an inter-host transport, its TLS state is passed on, too.

The end that opens the connection sends first. So each end learns from the first byte that it receives whether the other
end uses TLS. A TLS handshake begins with byte 22. An unencrypted message begins with byte 0, because its length is
small. If only one end uses TLS, the called end sends an unencrypted error message, and both ends report an error.

An unencrypted connection never reads ahead, because a new owner may take over the connection exactly after the last
message. If TLS has read ahead, the new owner gets the bytes that were read ahead together with the connection.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, Union

import msgspec

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import printable
from ms_kungfu.broker_protocol import MAX_FDS, check_same_user, close_all, receive_fds
from ms_kungfu.launcher.pacing import go_on_by_distance
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import Reads, encode
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu._core import TlsEnd

T = TypeVar("T")
_log = logging.getLogger(__name__)
MAX_STRANGERS_BYTES = 4 * 1024
_MAX_BYTES = 8 * 1024 * 1024  # large enough for an environment and a cluster of thousands of workers
_MAX_QUEUED_BYTES = 4 * _MAX_BYTES
# Time limit for an answer from the other host's kernel; a kernel answers even if all its processes are stopped.
_SILENT_S = 10
TCP_RTO_MAX_MS = 44  # a Linux option that the `socket` module doesn't define
_HEAR_OUT_S = 1.0  # time for a rejected client to read the reason
_PIECE_BYTES = 1 << 16
_TLS, _CLEAR = 22, 0  # the first byte of a connection
_SET_IT = "set KUNGFU_TLS_CERT, KUNGFU_TLS_KEY and KUNGFU_TLS_CA on all hosts, or on none"


class Stream:
    """One end of a message connection over a socket. It owns the socket. Call all methods in the event loop."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()  # when data was last received
        self._going = memoryview(b"")  # the bytes that are being sent; `_going_fds` are sent with their first byte
        self._going_fds: Sequence[int] = ()
        self._queue: collections.deque[tuple[memoryview, Sequence[int]]] = collections.deque()
        self._queued = 0
        self._ended = False

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without waiting.

        Messages arrive in the order in which this method was called, unless the connection ends. The connection ends if
        too much data waits because the other end doesn't read.
        """
        self._enqueue(encode(message))

    def _enqueue(self, body: bytes, fds: Sequence[int] = ()) -> None:
        if self._ended:
            close_all(fds)
            return
        self._queue.append((memoryview(struct.pack(">I", len(body)) + body), fds))
        self._queued += 4 + len(body)
        self._flush()

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            while self._has_more_to_send():
                self._going = self._going[self._send_some() :]
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            if self._queued + len(self._going) > _MAX_QUEUED_BYTES:
                self.end()
        except (OSError, ValueError):  # an error of the socket or of TLS
            self.end()
        except Exception as error:  # this is a callback of the event loop, where an exception would end the job
            _log.error(
                'internal error: where=sending error="%r". The launcher closes the connection', error, exc_info=error
            )
            self.end()

    def _has_more_to_send(self) -> bool:
        if not self._going and self._queue:
            self._going, self._going_fds = self._queue.popleft()
            self._queued -= len(self._going)
        return len(self._going) > 0

    def _send_some(self) -> int:
        return self._socket.send(self._going)

    def _is_idle(self) -> bool:
        """Return whether all data has been sent, or no data can be sent now."""
        return not self._going and not self._queue

    async def flushed(self) -> None:
        """Wait until the kernel has accepted all data, or until nothing can be sent any more."""
        while not self._is_idle() and self._socket.fileno() >= 0:
            await asyncio.sleep(0.005)

    async def hear_out(self) -> None:
        """Let the other end read why its connection was rejected, before the connection is closed.

        Without this wait, the reason could be lost: if a socket is closed while received bytes are unread, the kernel
        discards the data that was sent last.
        """
        if self._ended:
            return
        await self.flushed()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            await within(_HEAR_OUT_S, self._drop_all())

    async def _drop_all(self) -> None:
        while await self._loop.sock_recv(self._socket, _PIECE_BYTES):
            pass

    async def receive(self, reads: Reads[T], limit: int = _MAX_BYTES) -> T:
        """Return the next message.

        Raises:
            ConnectionError: the connection has ended.
            ProtocolError: `reads` doesn't accept the message.
        """
        (length,) = struct.unpack(">I", await self._exactly(4))
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes is over the limit of {limit}")
        return reads(await self._exactly(length))

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            data += await self._piece(min(count - len(data), _PIECE_BYTES))
        return bytes(data)

    async def _piece(self, most: int) -> bytes:
        """Receive at least 1 and at most `most` bytes. Raises ConnectionError if the connection has ended."""
        piece = await self._received(most)
        if not piece:
            raise ConnectionError("the connection was closed")
        self.heard = self._loop.time()
        return piece

    async def _received(self, most: int) -> bytes:
        return await self._loop.sock_recv(self._socket, most)

    def end(self) -> None:
        """End the connection, so that receivers on both ends notice."""
        self._ended = True
        for _, fds in self._queue:
            close_all(fds)
        close_all(self._going_fds)
        self._queue.clear()
        self._queued = 0
        self._going, self._going_fds = memoryview(b""), ()
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Call only if no task is receiving."""
        self.end()
        self._socket.close()


class Channel(Stream):
    """A TCP connection between launchers, with TLS if `tls` is given."""

    def __init__(self, connection: socket.socket, tls: TlsEnd | None = None, called: bool = False) -> None:
        """Take over a socket. `called`: true if the other end opened the connection."""
        super().__init__(connection)
        _notice_the_end(connection, _SILENT_S)
        self.tls = tls
        self._called = called
        self._has_heard = False
        if tls is not None and not called:
            tls.read(1)  # starts the handshake; no data can have arrived yet
            self._flush()

    @property
    def address(self) -> str:
        """Return this end's address, as the other end sees it."""
        return str(self._socket.getsockname()[0])

    def set_silence(self, seconds: float | None) -> None:
        """End the connection after `seconds` without an answer from the other host's kernel.

        If `seconds` is None, the kernel's defaults apply.
        """
        if self._socket.fileno() >= 0:
            _notice_the_end(self._socket, seconds)

    def _has_more_to_send(self) -> bool:
        if self._going or self.tls is None:
            return super()._has_more_to_send()
        if self._queue and self.tls.is_established:
            piece, _ = self._queue.popleft()
            self._queued -= len(piece)
            self.tls.write(bytes(piece))
        self._going = memoryview(self.tls.take())
        return len(self._going) > 0

    def _is_idle(self) -> bool:
        # No message can be sent before TLS is established, and TLS is only established while some task is receiving.
        stuck = self.tls is not None and not self.tls.is_established
        return not self._going and (stuck or not self._queue)

    async def _piece(self, most: int) -> bytes:
        return await (self._in_the_clear(most) if self.tls is None else self._decrypted(self.tls, most))

    async def _in_the_clear(self, most: int) -> bytes:
        piece = await super()._piece(most)
        if not self._has_heard:
            self._has_heard = True
            await self._check_first(piece)
        return piece

    async def _decrypted(self, tls: TlsEnd, most: int) -> bytes:
        while True:
            try:
                piece = tls.read(most)
            except ValueError as error:
                raise ProtocolError(str(error)) from None
            finally:
                self._flush()  # on failure this sends the TLS alert
            if piece:
                return piece
            tls.put(await self._in_the_clear(_PIECE_BYTES))

    async def _check_first(self, piece: bytes) -> None:
        if self.tls is None and piece[0] == _TLS:
            self.send(m.Error(f"the called launcher doesn't use TLS, but this host does; {_SET_IT}"))
            raise ProtocolError(f"the caller uses TLS, but this host doesn't; {_SET_IT}")
        if self.tls is not None and self._called and piece[0] != _TLS:
            self.tls = None
            self.send(m.Error(f"the called launcher uses TLS, but this host doesn't; {_SET_IT}"))
            raise ProtocolError(f"the caller doesn't use TLS, but this host does; {_SET_IT}")
        if self.tls is not None and not self._called and piece[0] == _CLEAR:
            said = bytearray(piece)
            while len(said) < 4 or len(said) < 4 + int.from_bytes(said[:4], "big") <= 4 + MAX_STRANGERS_BYTES:
                said += await super()._piece(MAX_STRANGERS_BYTES)
            why = f"the called launcher doesn't use TLS, but this host does; {_SET_IT}"
            with contextlib.suppress(ProtocolError):
                answer = m.PROOF(bytes(said[4:]))
                why = printable(answer.error) if isinstance(answer, m.Error) else why
            raise ProtocolError(why)

    def detach(self, silent_s: float | None) -> int:
        """Return the socket's descriptor. From now on, the caller owns the descriptor and `tls`.

        Call this only if no task is receiving, and no data is left to send. The connection ends if the other end
        accepts no data for `silent_s` seconds. The other end's transport thread reads all the time, so an end that
        accepts no data is stopped or unreachable.
        """
        self._loop.remove_writer(self._socket)
        _notice_the_end(self._socket, silent_s)
        go_on_by_distance(self._socket)
        return self._socket.detach()


class WorkerChannel(Stream):
    """A connection between a host's agent and one of its workers over a Unix socket.

    Messages can carry file descriptors. `pid`: the ID of the process at the other end. Raises ProtocolError if that
    process belongs to another user.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid = check_same_user(connection)
        super().__init__(connection)
        self._fds: list[int] = []  # the descriptors that have arrived with the bytes of the current message

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message with file descriptors. The caller still owns `fds`."""
        own: list[int] = []
        try:
            own.extend(map(os.dup, fds))
        except OSError:
            close_all(own)
            raise
        self._enqueue(encode(message), own)

    def remind(self, message: msgspec.Struct) -> None:
        """Send a message if the other end has read all earlier messages."""
        if self._is_idle():
            self.send(message)

    def _send_some(self) -> int:
        fds = self._going_fds
        if not fds:
            return self._socket.send(self._going)
        sent = socket.send_fds(self._socket, [self._going], list(fds))
        self._going_fds = ()
        close_all(fds)
        return sent

    async def receive_with_fds(self, reads: Reads[T], limit: int) -> tuple[T, list[int]]:
        """Return the next message and the descriptors that it carries. The caller then owns the descriptors."""
        try:
            message = await self.receive(reads, limit)
        except BaseException:
            close_all(self._fds)
            self._fds = []
            raise
        fds, self._fds = self._fds, []
        return message, fds

    async def _received(self, most: int) -> bytes:
        while True:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                data, fds = receive_fds(self._socket, most)
                self._fds += fds
                if len(self._fds) > MAX_FDS:
                    raise ProtocolError(f"a message carries more than {MAX_FDS} descriptors")
                return data
            await self._readable()

    async def _readable(self) -> None:
        readable = self._loop.create_future()
        self._loop.add_reader(self._socket, _resolve, readable)
        try:
            await readable
        finally:
            if self._socket.fileno() >= 0:
                self._loop.remove_reader(self._socket)

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
        super().close()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class LocalChannel:
    """One end of a connection within this process. The connection can't break, and needs no authentication.

    Both ends have their own copies of a message, as they do between hosts.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self._other: LocalChannel = self
        self._waiting: asyncio.Future[None] | None = None  # wakes the task that waits for a message
        self._inbox: collections.deque[bytes] = collections.deque()
        self._ended = False

    @staticmethod
    def pair() -> tuple[LocalChannel, LocalChannel]:
        one, other = LocalChannel(), LocalChannel()
        one._other, other._other = other, one
        return one, other

    def set_silence(self, seconds: float | None) -> None:
        """Do nothing, because a process can always reach itself."""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without waiting.

        Until the connection ends, messages arrive in the order in which this method was called.
        """
        if not self._ended:
            self._other._inbox.append(encode(message))
            self._other._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def flushed(self) -> None:
        """Do nothing, because all messages have already arrived."""

    async def receive(self, reads: Reads[T]) -> T:
        """Return the next message.

        Raises:
            ConnectionError: the connection has ended.
            ProtocolError: `reads` doesn't accept the message.
        """
        while not self._inbox:
            if self._ended:
                raise ConnectionError("the connection was closed")
            self._waiting = self._loop.create_future()
            await self._waiting
        self.heard = self._loop.time()
        return reads(self._inbox.popleft())

    def end(self) -> None:
        """End the connection. Receivers on both ends first get the messages that were sent before, then an error."""
        for each in (self, self._other):
            each._ended = True
            each._wake()

    close = end


def _notice_the_end(connection: socket.socket, seconds: float | None) -> None:
    """Make the kernel end a connection if the other host's kernel doesn't answer for `seconds`.

    An outage that is at least one second shorter than `seconds` doesn't end the connection.

    The kernel checks the time since the last answer only before it sends another probe. So the kernel must send a probe
    once per second, even if data is unacknowledged. For unacknowledged data, TCP doubles the time between probes. Linux
    6.15 and newer can limit that time.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0 if seconds is None else 1)
    limit_s = 0.0 if seconds is None else seconds + 1  # an outage may begin up to a second after the last answer
    for option, value in (
        (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_USER_TIMEOUT, min(int(1000 * limit_s), 2**31 - 1)),
    ):  # fmt: skip
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)  # Linux allows no smaller value


AnyChannel = Union[Channel, LocalChannel]
