"""Connections between the launchers of a job's hosts: messages, the proof of the secret, who is let in.

A message is a 4-byte big-endian length and that many bytes of JSON (`wire.messages`). Before anything else both ends
prove that they know the job's secret, by the challenge of `broker_protocol`; until then a message may have few bytes,
takes little time, and there is room for so many connections only. Where there is no secret (-no-secret) its place is
taken by an empty one, which everybody knows. In the clear, what comes after the proof is neither signed nor hidden: who
can change what others send on the network can change that.

With TLS (``KUNGFU_TLS_CERT`` and its like) all of this goes through it, the proof, too: both ends show a certificate
that the CA has signed, and that of who is called has to be for the name or address that was called. TLS is OpenSSL's,
by way of the runtime (`_core.TlsEnd`), because a connection that becomes a link's takes its TLS along.

The caller has the first word, so that each end knows by the first byte it hears whether the other one speaks TLS: a
handshake of TLS begins with 22, a message in the clear with 0, the first byte of a short one's length. Where they don't
agree who is called says so in the clear, and both have a sentence.

In the clear nothing is read ahead: a connection may be handed over to somebody else, byte by byte where its messages
end. What TLS has read ahead goes with it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Callable, TypeVar, Union

import msgspec

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import printable
from ms_kungfu.broker_protocol import new_nonce, proof_of
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.pacing import go_on_by_distance
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import Reads, encode
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu._core import TlsContext, TlsEnd

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_STRANGERS_BYTES = 4 * 1024
_MAX_BYTES = 8 * 1024 * 1024  # an environment and a cluster of thousands fit
_MAX_QUEUED_BYTES = 4 * _MAX_BYTES
_HANDSHAKE_S = 10.0
_MAX_UNPROVED = 128
_MAX_TOLD = 256  # of the sources of strangers
_ACCEPT_RETRY_S = 0.2
_CALL_RETRY_S = 0.2
# A packet that is thrown away on its way is never answered, and the caller has to say so; the kernel sends it three
# times within this.
_CONNECT_S = 5.0
# A host that is switched off says nothing. Its system answers for as long as it lives, whatever its processes do.
_SILENT_S = 10
TCP_RTO_MAX_MS = 44  # of Linux, which `socket` has no name for
_HEAR_OUT_S = 1.0  # somebody who was refused
_PIECE_BYTES = 1 << 16
_TLS, _CLEAR = 22, 0  # what the first byte says
_SOMEBODY = "who listens there"  # says too little to be a launcher
_SET_IT = "set KUNGFU_TLS_CERT, KUNGFU_TLS_KEY and KUNGFU_TLS_CA on all hosts, or on none"


class RefusedError(Exception):
    """The other end has said why it wants nothing of this one, or isn't who it should be. A sentence for the user."""


class NoAnswerError(OSError):
    """Nobody there speaks as a launcher does. `why`: the last trouble that says more than that time was up."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(f"no answer from {host}:{port}: {why}")
        self.why = why


def reason_of(error: Exception, before: str = "") -> str:
    """Why a call was in vain, in few words. `before`: the same of the last one, which knows better where this one was
    cut short because the time was up."""
    number = getattr(error, "errno", None) or 0  # those of name servers are below 0
    return os.strerror(number) if number > 0 else str(error) or before or "it takes too long"


def remedy_for(why: str, port: int) -> str:
    """What is to be looked at where somebody who was called doesn't answer, and this is `why`."""
    if why.startswith(_SOMEBODY):
        return f"does another program have port {port} there? -port gives another one, the same on all hosts"
    return f"is {PROGRAM} started there, and port {port} open?"


class Channel:
    """One end of a connection. It owns the socket. All methods but `send` belong to the event loop."""

    def __init__(self, connection: socket.socket, tls: TlsEnd | None = None, called: bool = False) -> None:
        """`called`: by the other end."""
        connection.setblocking(False)
        _notice_the_end(connection, _SILENT_S)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()  # when something came last
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self.tls = tls
        self._called = called
        self._has_heard = False
        self._going = memoryview(b"")  # what the socket is given
        # Guarded by _lock:
        self._queue: collections.deque[memoryview] = collections.deque()
        self._queued = 0
        self._ended = False
        if tls is not None and not called:
            tls.read(1)  # which begins, for nothing can have come
            self._flush()

    @property
    def address(self) -> str:
        """This end's, as the other one sees it."""
        return str(self._socket.getsockname()[0])

    def set_silence(self, seconds: float | None) -> None:
        """How long the other end's system may give no answer; None: for as long as it is usual."""
        if self._socket.fileno() >= 0:
            _notice_the_end(self._socket, seconds)

    def send(self, message: msgspec.Struct) -> None:
        """From any thread, and never waits. What is sent arrives in the order of these calls, or the connection ends:
        also where the other end doesn't read for too long."""
        body = encode(message)
        with self._lock:
            if self._ended:
                return
            self._queue.append(memoryview(struct.pack(">I", len(body)) + body))
            self._queued += 4 + len(body)
        if threading.get_ident() == self._thread:
            self._flush()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            while self._has_more_to_send():
                self._going = self._going[self._socket.send(self._going) :]
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            if self._queued + len(self._going) > _MAX_QUEUED_BYTES:
                self.end()
        except (OSError, ValueError):  # the socket, TLS
            self.end()
        except Exception as error:  # this is a callback of the loop's, where it would end the job
            _log.error("internal error: sending: %r; the launcher closes the connection", error, exc_info=error)
            self.end()

    def _has_more_to_send(self) -> bool:
        if not self._going and self.tls is not None:
            with self._lock:
                if self._queue and self.tls.is_established:
                    piece = self._queue.popleft()
                    self._queued -= len(piece)
                    self.tls.write(bytes(piece))
            self._going = memoryview(self.tls.take())
        elif not self._going:
            with self._lock:
                if self._queue:
                    self._going = self._queue.popleft()
                    self._queued -= len(self._going)
        return len(self._going) > 0

    async def flushed(self) -> None:
        """All has been handed to the kernel, or nothing will be any more."""
        while (self._going or self._queue) and self._socket.fileno() >= 0:
            if not self._going and self.tls is not None and not self.tls.is_established:
                return  # and won't be, for nobody receives
            await asyncio.sleep(0.005)

    async def hear_out(self) -> None:
        """Before the end of a connection that was refused: the kernel of an end that closes with bytes unread takes
        back what that has said last, which is why."""
        await self.flushed()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            await within(_HEAR_OUT_S, self._drop_all())

    async def _drop_all(self) -> None:
        while await self._loop.sock_recv(self._socket, _PIECE_BYTES):
            pass

    async def receive(self, reads: Reads[T], limit: int = _MAX_BYTES) -> T:
        """The next message. ConnectionError if there is none any more; ProtocolError unless `reads` accepts it."""
        (length,) = struct.unpack(">I", await self._exactly(4))
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes is over the limit of {limit}")
        return reads(await self._exactly(length))

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            most = min(count - len(data), _PIECE_BYTES)
            data += await (self._received(most) if self.tls is None else self._decrypted(self.tls, most))
        return bytes(data)

    async def _received(self, most: int) -> bytes:
        piece = await self._loop.sock_recv(self._socket, most)
        if not piece:
            raise ConnectionError("the connection was closed")
        self.heard = self._loop.time()
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
                self._flush()  # also why not
            if piece:
                return piece
            tls.put(await self._received(_PIECE_BYTES))

    async def _check_first(self, piece: bytes) -> None:
        if self.tls is None and piece[0] == _TLS:
            self.send(m.Error(f"the launcher there speaks no TLS, and this host does; {_SET_IT}"))
            raise ProtocolError(f"it speaks TLS, and this host doesn't; {_SET_IT}")
        if self.tls is not None and self._called and piece[0] != _TLS:
            self.tls = None
            self.send(m.Error(f"the launcher there speaks TLS, and this host doesn't; {_SET_IT}"))
            raise ProtocolError(f"it speaks no TLS, and this host does; {_SET_IT}")
        if self.tls is not None and not self._called and piece[0] == _CLEAR:
            said = bytearray(piece)
            while len(said) < 4 or len(said) < 4 + int.from_bytes(said[:4], "big") <= 4 + _MAX_STRANGERS_BYTES:
                said += await self._received(_MAX_STRANGERS_BYTES)
            why = f"it speaks no TLS, and this host does; {_SET_IT}"
            with contextlib.suppress(ProtocolError):
                told = m.PROOF(bytes(said[4:]))
                why = printable(told.error) if isinstance(told, m.Error) else why
            raise ProtocolError(why)

    def end(self) -> None:
        """Whoever receives, here or there, sees the end."""
        with self._lock:
            self._ended = True
            self._queue.clear()
            self._queued = 0
            self._going = memoryview(b"")
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody may be receiving."""
        self.end()
        self._socket.close()

    def detach(self, silent_s: float | None) -> int:
        """The descriptor, which is the caller's from now on, as is `tls`. Nobody may be receiving, nor anything be left
        to send.

        A link's thread reads all that comes: whoever lets data wait for `silent_s` stands still or can't be reached.
        """
        self._loop.remove_writer(self._socket)
        _notice_the_end(self._socket, silent_s)
        go_on_by_distance(self._socket)
        return self._socket.detach()


class LocalChannel:
    """One end of a connection within this process, which nothing cuts off, and which needs no proof. What is sent is
    copied, as between hosts."""

    tls = None
    address = "this host"

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.heard = self._loop.time()
        self._other: LocalChannel = self
        self._waiting: asyncio.Future[None] | None = None  # who receives
        self._inbox: collections.deque[bytes] = collections.deque()
        self._ended = False

    @staticmethod
    def pair() -> tuple[LocalChannel, LocalChannel]:
        one, other = LocalChannel(), LocalChannel()
        one._other, other._other = other, one
        return one, other

    def set_silence(self, seconds: float | None) -> None:
        """Of a process that hears itself."""

    def send(self, message: msgspec.Struct) -> None:
        """From any thread, and never waits. What is sent arrives in the order of these calls, until the end."""
        if self._ended:
            return
        self._other._inbox.append(encode(message))
        if threading.get_ident() == self._thread:
            self._other._wake()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._other._wake)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def flushed(self) -> None:
        """All has arrived."""

    async def hear_out(self) -> None:
        """Nothing of it gets lost."""

    async def receive(self, reads: Reads[T], limit: int = 0) -> T:
        """The next message. ConnectionError if there is none any more; ProtocolError unless `reads` accepts it."""
        while not self._inbox:
            if self._ended:
                raise ConnectionError("the connection was closed")
            self._waiting = self._loop.create_future()
            await self._waiting
        self.heard = self._loop.time()
        return reads(self._inbox.popleft())

    def end(self) -> None:
        """Whoever receives, here or there, sees the end, behind what was sent before."""
        for each in (self, self._other):
            each._ended = True
            each._wake()

    close = end


def _notice_the_end(connection: socket.socket, seconds: float | None) -> None:
    """Where the other end's system gives no answer for so long; an outage that is shorter by a second ends nothing.

    The kernel looks at the time since the last answer only as it is about to ask again. So it has to ask often: once a
    second, also where what was sent got no answer, after which TCP asks again only when as much time has passed once
    more (but for Linux 6.15 and newer, that can be told).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0 if seconds is None else 1)
    limit_s = 0.0 if seconds is None else seconds + 1  # the last answer may be older than the outage by so much
    for option, value in (
        (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_USER_TIMEOUT, min(int(1000 * limit_s), 2**31 - 1)),
    ):  # fmt: skip
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)  # the least that there is


AnyChannel = Union[Channel, LocalChannel]


async def addresses_of(machine: Machine, host: str, port: int) -> list[tuple[int, Any]]:
    """Family and address of each; OSError where there is none."""

    def look_up(flags: int = 0) -> list[tuple[int, Any]]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]

    try:
        return look_up(socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await machine.in_thread(look_up)


def _ignore(why: str) -> None:
    pass


async def call(
    machine: Machine,
    own: str,
    host: str,
    port: int,
    secret: bytes,
    timeout_s: float,
    on_trouble: Callable[[str], None] = _ignore,
) -> Channel:
    """A connection from this host, `own`, to the launcher of another one. Both ends have proved who they are.

    Tried again for `timeout_s` where nobody answers, or somebody does who is crowded; `on_trouble` hears each time why
    it has failed. NoAnswerError then; RefusedError where the other end has another secret.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    why = ""
    while True:
        try:
            return await within(max(0.1, deadline - loop.time()), call_once(machine, own, host, port, secret))
        except ProtocolError as error:
            raise RefusedError(f"{host}:{port}: {error}") from None
        except (OSError, asyncio.TimeoutError) as error:
            why = reason_of(error, why)
            if loop.time() + _CALL_RETRY_S >= deadline:
                raise NoAnswerError(host, port, why) from None
            on_trouble(why)
        await asyncio.sleep(_CALL_RETRY_S)


async def call_once(machine: Machine, own: str, host: str, port: int, secret: bytes) -> Channel:
    """The same, tried once. OSError, or ProtocolError where the other end has another secret."""
    trouble: OSError = OSError(f"{host} has no address")
    sources = dict(await addresses_of(machine, own, 0))  # one a family
    for family, address in await addresses_of(machine, host, port):
        connection = machine.make_socket(family)
        connection.setblocking(False)
        try:
            if family in sources:  # by the network that the job is to use, and by the name that the others know
                connection.bind(sources[family])
            await within(_CONNECT_S, asyncio.get_running_loop().sock_connect(connection, address))
        except asyncio.TimeoutError:
            connection.close()
            trouble = OSError(f"nothing comes back within {_CONNECT_S:g} s")
            continue
        except OSError as error:
            connection.close()
            trouble = error
            continue
        except BaseException:
            connection.close()
            raise
        # A link's address may have the interface behind it.
        channel = Channel(connection, _tls_end(machine.tls, False, host.partition("%")[0]))
        try:
            await within(_HANDSHAKE_S, _prove(channel, secret))
            return channel
        except asyncio.TimeoutError:
            channel.close()
            raise OSError(f"{_SOMEBODY} says nothing for {_HANDSHAKE_S:g} s") from None
        except ConnectionError:
            channel.close()
            raise OSError(f"{_SOMEBODY} hangs up") from None
        except (OSError, ProtocolError):
            channel.close()
            raise
        except Exception as error:  # whatever the other end has said: it is refused, as what isn't understood is
            channel.close()
            _log.error(
                "internal error: call to %s:%d: %r; the launcher closes the connection",
                host,
                port,
                error,
                exc_info=error,
            )
            raise ProtocolError(f"internal error: {error!r}") from error
        except BaseException:
            channel.close()
            raise
    raise trouble


def _tls_end(context: TlsContext | None, called: bool, name: str) -> TlsEnd | None:
    if context is None:
        return None
    from ms_kungfu import _core

    return _core.TlsEnd(context, called, name)


async def _prove(channel: Channel, secret: bytes) -> None:
    """The caller's end of the handshake."""
    nonce = new_nonce()
    channel.send(m.Nonce(nonce, m.PROTOCOL))
    challenge = await _nonce_on(channel)
    channel.send(m.Proof(proof_of(secret, "caller", challenge, nonce)))
    answer = await channel.receive(m.PROOF, _MAX_STRANGERS_BYTES)
    if isinstance(answer, m.Error):
        raise ProtocolError(printable(answer.error))
    if not hmac.compare_digest(answer.proof, proof_of(secret, "called", challenge, nonce)):
        raise ProtocolError("who answers there doesn't know the job's secret (KUNGFU_JOB_SECRET, -secret-file)")


async def _challenge(channel: Channel, secret: bytes) -> None:
    """The other end's."""
    nonce, challenge = await _nonce_on(channel), new_nonce()
    channel.send(m.Nonce(challenge, m.PROTOCOL))
    proof = await channel.receive(m.PROOF, _MAX_STRANGERS_BYTES)
    if isinstance(proof, m.Error) or not hmac.compare_digest(proof.proof, proof_of(secret, "caller", challenge, nonce)):
        channel.send(m.Error("the launcher there has another secret (KUNGFU_JOB_SECRET, -secret-file, -no-secret)"))
        raise ProtocolError("it doesn't know the job's secret")
    channel.send(m.Proof(proof_of(secret, "called", challenge, nonce)))


async def _nonce_on(channel: Channel) -> str:
    """The other end's, or why it wants nothing of this one."""
    first = await channel.receive(m.NONCE, _MAX_STRANGERS_BYTES)
    if isinstance(first, m.Error):
        raise ProtocolError(printable(first.error))
    if first.protocol != m.PROTOCOL:
        why = f"it speaks protocol {first.protocol}, this host {m.PROTOCOL}; install the same ms_kungfu on all hosts"
        channel.send(m.Error(why))
        raise ProtocolError(why)
    return first.nonce


class ControlServer:
    """Listens on this host's address from `start` to `close`; `serve` gets each connection that has proved itself, and
    those within this process. It returns whether that is somebody else's now; otherwise it is closed then."""

    def __init__(
        self,
        machine: Machine,
        secret: bytes,
        serve: Callable[[AnyChannel], Awaitable[bool]],
        then: Callable[[], str] = str,
    ) -> None:
        """`then`: what is done after a stranger was refused, for the line that tells of it."""
        self._then = then
        self._machine = machine
        self._tls: TlsContext | None = None
        self._secret = secret
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._unproved: dict[asyncio.Task[None], Channel] = {}  # oldest first
        self._proved: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()  # sources of strangers
        self._trouble = ""

    async def start(self, host: str, port: int) -> None:
        """OSError where that can't be bound, ValueError where TLS can't be had."""
        self._tls = self._machine.tls
        family, address = (await addresses_of(self._machine, host, port))[0]
        listener = self._machine.make_socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_MAX_UNPROVED)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        """Ends what is served."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in (*self._unproved, *self._proved):
            task.cancel()
        await asyncio.gather(*self._unproved, *self._proved, return_exceptions=True)

    def call_itself(self) -> LocalChannel:
        """A connection within this process, by no address of its system, which may lose that."""
        ours, theirs = LocalChannel.pair()
        task = asyncio.ensure_future(self._serve_proved(theirs, "this host"))
        self._proved.add(task)
        task.add_done_callback(self._forget)
        return ours

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, source = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptors, most likely: whoever calls waits in the backlog
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("the other hosts can't be heard for now: %s", error)
            self._send_the_oldest_away()
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_RETRY_S, self._listen_again)
            return
        self._trouble = ""
        if len(self._unproved) >= _MAX_UNPROVED:
            self._send_the_oldest_away()
        try:
            channel = Channel(accepted, _tls_end(self._tls, True, ""), called=True)
        except Exception as error:  # it has gone already, or there is no memory
            accepted.close()
            self._refuse(str(source[0]), error)
            return
        task = asyncio.ensure_future(self._meet(channel, str(source[0])))
        self._unproved[task] = channel
        task.add_done_callback(self._forget)

    def _listen_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _send_the_oldest_away(self) -> None:
        if self._unproved:
            task, channel = next(iter(self._unproved.items()))
            del self._unproved[task]
            self._proved.add(task)  # until it is over
            channel.end()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproved.pop(task, None)
        self._proved.discard(task)

    def _refuse(self, source: str, error: Exception) -> None:
        """Log why, once a source."""
        if source in self._told or len(self._told) >= _MAX_TOLD:
            return
        self._told.add(source)
        why = f"internal error: {error!r}"
        if isinstance(error, ProtocolError):
            why = str(error)
        elif isinstance(error, (OSError, asyncio.TimeoutError)):
            why = "it didn't say who it is"
        else:
            _log.error("internal error: connection from %s: %r; the launcher closes it", source, error, exc_info=error)
        _log.warning(
            "a connection from %s has been refused: %s; others from there are, too%s", source, why, self._then()
        )

    async def _meet(self, channel: Channel, source: str) -> None:
        """Serve one connection. No exception leaves it (the loop's exception handler ends the job):

        1. Before the proof, all of them are a refusal.
        2. After it, the connection ends. What `serve` has begun for this host it ends itself (`RemoteSite.listen`).
        """
        has_proved = False
        try:
            await within(_HANDSHAKE_S, _challenge(channel, self._secret))
            has_proved = True
        except Exception as error:
            self._refuse(source, error)
            await channel.hear_out()
            return
        finally:
            if not has_proved:
                channel.close()
        task = asyncio.current_task()
        assert task is not None
        self._unproved.pop(task, None)
        self._proved.add(task)
        await self._serve_proved(channel, source)

    async def _serve_proved(self, channel: AnyChannel, source: str) -> None:
        given_away = False
        try:
            given_away = await self._serve(channel)
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            _log.warning("a connection from %s has ended: %s", source, error)
        except Exception as error:
            _log.error("internal error: connection from %s: %r; the launcher closes it", source, error, exc_info=error)
        finally:
            if not given_away:
                channel.close()
