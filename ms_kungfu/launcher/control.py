"""Connect the launchers of a job's hosts: call another launcher, and serve calls from other launchers.

On each connection, both ends first prove that they know the job's secret (`handshake`). If TLS is used, this happens
inside the encrypted connection. For TLS, each end presents a certificate that the CA has signed. The certificate of the
called end must match the name or address that was called.
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
_MAX_TOLD = 256  # the maximum number of addresses for which rejected connections are logged
_CALL_RETRY_S = 0.2
# A call without any answer fails after this time. The kernel sends the first packet 3 times in this time.
_CONNECT_S = 5.0
_SOMEBODY = "another listener"  # a program that isn't a launcher


class RefusedError(Exception):
    """The other end has rejected this host, or isn't the launcher that is expected. The message is for the user."""


class NoAnswerError(OSError):
    """No launcher answers at the address. `why`: the last error other than a timeout."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(f"no answer from {host}:{port}: {why}")
        self.why = why


def reason_of(error: Exception, before: str = "") -> str:
    """Return a short reason for the failure of a call.

    `before`: why the previous call failed. Return `before` if this call exceeded a time limit, because that explains
    less.
    """
    number = getattr(error, "errno", None) or 0  # error codes of name resolution are negative
    return os.strerror(number) if number > 0 else str(error) or before or "timed out"


def remedy_for(why: str, port: int) -> str:
    """Return what the user should check if a host doesn't answer a call. `why`: the reason from `reason_of`."""
    if why.startswith(_SOMEBODY):
        return f"does another program use port {port} there? -port sets another port, the same on all hosts"
    return f"is {PROGRAM} running there, and is port {port} open?"


async def addresses_of(machine: Machine, host: str, port: int) -> list[tuple[int, Any]]:
    """Return all addresses of `host`, each with its address family. Raises OSError if there is none."""

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
    """Connect this host, `own`, to another host's launcher.

    When this function returns, both ends have proved that they know the secret. If no launcher answers, or the launcher
    is overloaded, this function retries for `timeout_s` seconds, and passes the reason for each failure to
    `on_trouble`.

    Raises:
        NoAnswerError: no launcher has answered within `timeout_s`.
        RefusedError: the other end has another secret.
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
    """Try once to connect as `call` does. Raises OSError, or ProtocolError if the other end has another secret."""
    trouble: OSError = OSError(f"{host} has no address")
    sources = dict(await addresses_of(machine, own, 0))  # this host's address for each address family
    for family, address in await addresses_of(machine, host, port):
        connection = machine.make_socket(family)
        connection.setblocking(False)
        try:
            if family in sources:  # connect from the address that the other hosts know
                connection.bind(sources[family])
            await within(_CONNECT_S, asyncio.get_running_loop().sock_connect(connection, address))
        except asyncio.TimeoutError:
            connection.close()
            trouble = OSError(f"no reply within {_CONNECT_S:g} s")
            continue
        except OSError as error:
            connection.close()
            trouble = error
            continue
        except BaseException:
            connection.close()
            raise
        # A link-local address may contain the name of an interface after "%".
        channel = Channel(connection, _tls_end(machine.tls, False, host.partition("%")[0]))
        try:
            await within(HANDSHAKE_S, prove(channel, secret))
            return channel
        except asyncio.TimeoutError:
            channel.close()
            raise OSError(f"{_SOMEBODY} sent nothing for {HANDSHAKE_S:g} s") from None
        except ConnectionError:
            channel.close()
            raise OSError(f"{_SOMEBODY} closed the connection") from None
        except (OSError, ProtocolError):
            channel.close()
            raise
        # A message has caused an unexpected error. Reject the connection, as after a malformed message.
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
    """Listen on this host's address from `start` to `close`.

    `serve` is called with each authenticated connection, and with each connection within this process. `serve` returns
    whether another owner has taken the connection over.
    """

    def __init__(
        self,
        machine: Machine,
        secret: bytes,
        serve: Callable[[AnyChannel], Awaitable[bool]],
        then: Callable[[], str] = str,
    ) -> None:
        """Create the server. `then()` returns what happens after a connection was rejected, as text for a log line."""
        super().__init__(secret, BETWEEN_HOSTS)
        self._machine, self._serve_one, self._then = machine, serve, then
        self._tls: TlsContext | None = None
        self._logged: set[str] = set()  # sources of rejected connections

    async def start(self, host: str, port: int) -> None:
        """Start listening. Raises OSError if the address can't be used, and ValueError if TLS isn't possible."""
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
        """Return a connection from this launcher to itself. It stays within the process and uses no network."""
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
        """Log why a connection was rejected, once per source address."""
        if source in self._logged or len(self._logged) >= _MAX_TOLD:
            return
        self._logged.add(source)
        why = f"internal error: {error!r}"
        if isinstance(error, ProtocolError):
            why = str(error)
        elif isinstance(error, (OSError, asyncio.TimeoutError)):
            why = "the connection ended before the client had proved that it knows the job's secret"
        _log.warning(
            'connection rejected: from=%s reason="%s". Further rejections from there are not logged%s',
            source,
            why,
            self._then(),
        )
