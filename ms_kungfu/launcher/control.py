"""Connections between the launchers of a job's hosts: how one calls another, and serves its calls.

First both ends prove that they know the job's secret (`handshake`). With TLS they do so inside it: both ends show a
certificate that the CA has signed. That of the called end has to be for the name or address that was called.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.launcher.channel import AnyChannel, Channel, LocalChannel
from ms_kungfu.launcher.handshake import BETWEEN_HOSTS, prove
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.server import HANDSHAKE_S, Server
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu._core import TlsContext, TlsEnd

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_TOLD = 256  # sources of unauthenticated clients
_CALL_RETRY_S = 0.2
# A dropped packet is never answered, and the caller has to report that; the kernel sends it three times within this.
_CONNECT_S = 5.0
_SOMEBODY = "another listener"  # says too little to be a launcher


class RefusedError(Exception):
    """The other end has said why it rejects this one, or isn't the expected one. A sentence for the user."""


class NoAnswerError(OSError):
    """No launcher answers there. `why`: the last error that says more than that time was up."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(f"no answer from {host}:{port}: {why}")
        self.why = why


def reason_of(error: Exception, before: str = "") -> str:
    """Return why a call failed, in few words.

    `before`: the reason of the last call, which says more if the time limit cut this one short.
    """
    number = getattr(error, "errno", None) or 0  # codes of name servers are below 0
    return os.strerror(number) if number > 0 else str(error) or before or "it takes too long"


def remedy_for(why: str, port: int) -> str:
    """Return what to examine if a called host doesn't answer because of `why`."""
    if why.startswith(_SOMEBODY):
        return f"does another program have port {port} there? -port gives another one, the same on all hosts"
    return f"is {PROGRAM} started there, and port {port} open?"


async def addresses_of(machine: Machine, host: str, port: int) -> list[tuple[int, Any]]:
    """Return family and address of each; OSError if there is none."""

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
    """Connect from this host, `own`, to another one's launcher. Both ends have proved that they know the secret.

    It retries for `timeout_s` if no launcher answers, or an overloaded one does; `on_trouble` gets each reason.
    NoAnswerError after that; RefusedError if the other end has another secret.
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
    """Try the same once. OSError, or ProtocolError if the other end has another secret."""
    trouble: OSError = OSError(f"{host} has no address")
    sources = dict(await addresses_of(machine, own, 0))  # one a family
    for family, address in await addresses_of(machine, host, port):
        connection = machine.make_socket(family)
        connection.setblocking(False)
        try:
            if family in sources:  # from the network that the job uses, and the name that the others know
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
        # A link-local address may be followed by the interface.
        channel = Channel(connection, _tls_end(machine.tls, False, host.partition("%")[0]))
        try:
            await within(HANDSHAKE_S, prove(channel, secret))
            return channel
        except asyncio.TimeoutError:
            channel.close()
            raise OSError(f"{_SOMEBODY} says nothing for {HANDSHAKE_S:g} s") from None
        except ConnectionError:
            channel.close()
            raise OSError(f"{_SOMEBODY} hangs up") from None
        except (OSError, ProtocolError):
            channel.close()
            raise
        # the other end has sent anything else: it is rejected, as a message that isn't understood
        except Exception as error:
            channel.close()
            _log.error(
                'internal error: where=call to=%s:%d error="%r". The launcher closes the connection',
                host, port, error, exc_info=error,
            )  # fmt: skip
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


class ControlServer(Server[AnyChannel]):
    """Listens on this host's address from `start` to `close`.

    `serve` gets each connection that has proved itself, and those within this process. It returns whether the
    connection belongs to another owner now.
    """

    def __init__(
        self,
        machine: Machine,
        secret: bytes,
        serve: Callable[[AnyChannel], Awaitable[bool]],
        then: Callable[[], str] = str,
    ) -> None:
        """`then`: what follows a rejected connection, for its log line."""
        super().__init__(secret, BETWEEN_HOSTS)
        self._machine, self._serve_one, self._then = machine, serve, then
        self._tls: TlsContext | None = None
        self._logged: set[str] = set()  # sources of rejected connections

    async def start(self, host: str, port: int) -> None:
        """Listen. OSError if the address can't be bound, ValueError if TLS isn't possible."""
        self._tls = self._machine.tls
        family, address = (await addresses_of(self._machine, host, port))[0]
        listening = self._machine.make_socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(self.most_unproved)
        except BaseException:
            listening.close()
            raise
        self.listen(listening)

    def call_itself(self) -> LocalChannel:
        """Return a connection within this process, without an address of its system, which may lose that."""
        ours, theirs = LocalChannel.pair()
        self.serve_within(theirs, "this host")
        return ours

    def _open(self, connection: socket.socket) -> AnyChannel:
        return Channel(connection, _tls_end(self._tls, True, ""), called=True)

    async def _serve(self, channel: AnyChannel) -> bool:
        return await self._serve_one(channel)

    def _troubled(self, error: OSError) -> None:
        _log.warning('accept failed: from=hosts error="%s"', error)

    def _ended(self, source: str, error: Exception) -> None:
        _log.warning('connection ended: from=%s error="%s"', source, error)

    def _rejected(self, source: str, error: Exception) -> None:
        """Log why, once a source."""
        if source in self._logged or len(self._logged) >= _MAX_TOLD:
            return
        self._logged.add(source)
        why = f"internal error: {error!r}"
        if isinstance(error, ProtocolError):
            why = str(error)
        elif isinstance(error, (OSError, asyncio.TimeoutError)):
            why = "it didn't prove its identity"
        _log.warning(
            'connection rejected: from=%s reason="%s". Others from there are rejected, too%s', source, why, self._then()
        )
