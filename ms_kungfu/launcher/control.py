"""Connections between the launchers of a job's hosts: the proof of the secret, who is let in.

Before anything else both ends prove that they know the job's secret, by the challenge of `broker_protocol`. Until
then a message may have few bytes, takes little time, and there is room for so many connections only. Where there is
no secret (-no-secret) its place is taken by an empty one, which everybody knows. In the clear, what comes after the
proof is neither signed nor hidden: who can change what others send on the network can change that.

With TLS the proof goes through it, too: both ends show a certificate that the CA has signed, and that of who is called
has to be for the name or address that was called.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import printable
from ms_kungfu.broker_protocol import new_nonce, proof_of
from ms_kungfu.launcher.channel import MAX_STRANGERS_BYTES, AnyChannel, Channel, LocalChannel
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu._core import TlsContext, TlsEnd

T = TypeVar("T")
_log = logging.getLogger(__name__)
_HANDSHAKE_S = 10.0
_MAX_UNPROVED = 128
_MAX_TOLD = 256  # of the sources of strangers
_ACCEPT_RETRY_S = 0.2
_CALL_RETRY_S = 0.2
# A packet that is thrown away on its way is never answered, and the caller has to say so; the kernel sends it three
# times within this.
_CONNECT_S = 5.0
_SOMEBODY = "who listens there"  # says too little to be a launcher


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
    answer = await channel.receive(m.PROOF, MAX_STRANGERS_BYTES)
    if isinstance(answer, m.Error):
        raise ProtocolError(printable(answer.error))
    if not hmac.compare_digest(answer.proof, proof_of(secret, "called", challenge, nonce)):
        raise ProtocolError("who answers there doesn't know the job's secret (KUNGFU_JOB_SECRET, -secret-file)")


async def _challenge(channel: Channel, secret: bytes) -> None:
    """The other end's."""
    nonce, challenge = await _nonce_on(channel), new_nonce()
    channel.send(m.Nonce(challenge, m.PROTOCOL))
    proof = await channel.receive(m.PROOF, MAX_STRANGERS_BYTES)
    if isinstance(proof, m.Error) or not hmac.compare_digest(proof.proof, proof_of(secret, "caller", challenge, nonce)):
        channel.send(m.Error("the launcher there has another secret (KUNGFU_JOB_SECRET, -secret-file, -no-secret)"))
        raise ProtocolError("it doesn't know the job's secret")
    channel.send(m.Proof(proof_of(secret, "called", challenge, nonce)))


async def _nonce_on(channel: Channel) -> str:
    """The other end's, or why it wants nothing of this one."""
    first = await channel.receive(m.NONCE, MAX_STRANGERS_BYTES)
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
