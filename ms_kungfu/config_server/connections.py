"""The connections of an aiohttp server to which each user of the machine may connect.

Clients must not be able to disturb the job:

- The number of connections is limited, also to a quarter of the process's file descriptors. Each connection serves one
  request, by default within ten seconds. At the limit, a new connection closes the connection that has waited longest
  without a request. So a client that sends its request at once, as ms_kungfu does, is served even if many others are
  silent or slow. A client in the TLS handshake counts too, and is closed first.
- A server may also limit the connections from each address. It closes connections beyond that limit.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import traceback
from pathlib import Path
from typing import Any, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_log = logging.getLogger(__name__)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_MAX_MESSAGE = 500
_REQUEST_S = 10.0  # limit from the connection to the end of the answer
_PAUSE_S = 0.1  # after the system had no descriptor or memory for a connection


class Connection(web.RequestHandler):
    """One client's connection, for one request."""

    __slots__ = ("_owner", "source", "timer", "is_served")

    def __init__(self, owner: Connections, source: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner, self.source = owner, source
        self.is_served = False  # whether its request has arrived and isn't answered yet
        self.timer: asyncio.TimerHandle | None = self._loop.call_later(_REQUEST_S, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.connections[self] = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.connections.pop(self, None)
        self.may_wait(None)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an exception that a handler has raised.

        An invalid request, or a request whose body doesn't match its header, is the client's fault and is answered
        with 400. A client that closes before the answer is also at fault.
        """
        if not isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)):
            self._owner.tell_bug(args[0] % args[1:], kw.get("exc_info"))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that aiohttp itself rejects, with a message that doesn't repeat the request."""
        if status == 500:
            return super().handle_error(request, status, exc, message)
        super().handle_error(request, status, exc, "")  # records the error
        answer = sentence(status, "this is not a valid HTTP request")
        answer.force_close()
        return answer

    def may_wait(self, seconds: float | None) -> None:
        """Extend the request's time limit. None: no limit; the handler then limits each write."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if seconds is None else self._loop.call_later(seconds + _REQUEST_S, self.abort)

    def abort(self) -> None:
        self._owner.connections.pop(self, None)
        if self.transport is not None:
            self.transport.abort()  # send nothing more: a slow reader would delay the end again


def _has_come_here(error: BaseException) -> bool:
    """Return whether an exception passed through code of this package."""
    return any(frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in traceback.walk_tb(error.__traceback__))


class Connections:
    """Accept at most `limit` connections. All methods run in the event loop of the server's thread.

    `where` names the server in log lines. `limit_of`: returns the limit for an address, or None.
    """

    def __init__(
        self,
        where: str,
        limit: int,
        tls: ssl.SSLContext | None = None,
        limit_of: Callable[[str], int | None] = lambda address: None,
    ) -> None:
        self.limit = limit
        self._where, self._tls, self._limit_of = where, tls, limit_of
        self._told: set[str] = set()
        self.connections: dict[Connection, None] = {}  # in order of arrival
        # TLS handshakes in order of arrival, not yet among the connections
        self._meeting: dict[asyncio.Future[None], None] = {}

    def tell_bug(self, message: str, error: BaseException | None) -> None:
        """Log a bug in the server only once, because clients could repeat it at will.

        The bug may also be in aiohttp, which returns 500 before it calls the server if it can't quote a client's
        Expect header.
        """
        if isinstance(error, UnicodeEncodeError) and not _has_come_here(error):
            return
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.error('internal error: where=%s error="%s"', self._where, message, exc_info=error)

    async def accept(self, listener: socket.socket, manager: web.Server | None) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:  # no descriptor or no memory is left, or the client closed first
                self._make_room()
                await asyncio.sleep(_PAUSE_S)
                continue
            if self._is_too_many(address[0]):
                connection.close()
                continue
            while len(self.connections) + len(self._meeting) >= self.limit:
                if not self._make_room():
                    await asyncio.sleep(_PAUSE_S)
            if self._tls is None:
                await self._meet(connection, address[0], manager)
                continue
            meeting = asyncio.ensure_future(self._meet(connection, address[0], manager))
            self._meeting[meeting] = None
            meeting.add_done_callback(lambda done: self._meeting.pop(done, None))

    def _is_too_many(self, source: str) -> bool:
        limit = self._limit_of(source)
        return limit is not None and sum(each.source == source for each in self.connections) >= limit

    async def _meet(self, connection: socket.socket, source: str, manager: web.Server | None) -> None:
        loop, tls = asyncio.get_running_loop(), self._tls
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(self, source, manager, loop=loop, access_log=None), connection, ssl=tls,
                ssl_handshake_timeout=None if tls is None else _REQUEST_S,
            )  # fmt: skip
        except OSError:  # for example a client without TLS or without a certificate
            connection.close()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest without having sent a request."""
        for meeting in self._meeting:
            del self._meeting[meeting]
            meeting.cancel()
            return True
        for connection in self.connections:
            if not connection.is_served:
                connection.abort()
                return True
        return False

    @web.middleware
    async def once(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        assert isinstance(request.protocol, Connection)
        request.protocol.is_served = True
        try:
            response: web.StreamResponse = await handler(request)
        finally:
            request.protocol.is_served = False
        response.force_close()  # otherwise an unauthenticated client could keep the connection open
        return response


def sentence(status: int, text: str) -> web.Response:
    """Return an answer with a message for the user."""
    # The message may quote the input; a limit keeps the answer to invalid input short.
    shown = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
    return web.json_response({"error": shown}, status=status)
