"""Accept the connections of an aiohttp server to which any user of the machine may connect.

Clients must not be able to disturb the job:

- The number of connections is limited, and is at most a quarter of the process's descriptor limit. Each connection
  serves one request, by default within ten seconds. If a new connection exceeds the limit, the server closes the
  connection that has been open longest without a complete request. So a client that sends its request immediately, as
  ms_kungfu does, is served even if many other clients are silent or slow. Connections that are still in the TLS
  handshake count, too, and are closed first.
- A server may also limit the number of connections from each address, and closes connections above that limit.
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
_REQUEST_S = 10.0  # time limit from the beginning of a connection to the end of the answer
_PAUSE_S = 0.1  # time until the server tries again if the system has no descriptor or memory for a connection


class Connection(web.RequestHandler):
    """A client's connection, which serves one request."""

    __slots__ = ("_owner", "source", "timer", "is_served")

    def __init__(self, owner: Connections, source: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner, self.source = owner, source
        self.is_served = False  # whether the request has arrived and isn't answered yet
        self.timer: asyncio.TimerHandle | None = self._loop.call_later(_REQUEST_S, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.connections[self] = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.connections.pop(self, None)
        self.may_wait(None)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an exception that a handler has raised, unless the client has caused it.

        A client causes an exception if its request is invalid, or if the request's body doesn't match the header; the
        answer is then 400. A client also causes an exception if it closes the connection before the answer.
        """
        if not isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)):
            self._owner.tell_bug(args[0] % args[1:], kw.get("exc_info"))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that aiohttp itself rejects. The message doesn't contain parts of the request."""
        if status == 500:
            return super().handle_error(request, status, exc, message)
        super().handle_error(request, status, exc, "")  # only records the error
        answer = sentence(status, "this is not a valid HTTP request")
        answer.force_close()
        return answer

    def may_wait(self, seconds: float | None) -> None:
        """Extend the time limit of the request by this number of seconds.

        With None there is no limit, so the handler must limit the time of each write.
        """
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if seconds is None else self._loop.call_later(seconds + _REQUEST_S, self.abort)

    def abort(self) -> None:
        self._owner.connections.pop(self, None)
        if self.transport is not None:
            self.transport.abort()  # drops unsent data, because a slow reader would delay the end


def _has_come_here(error: BaseException) -> bool:
    """Return whether the exception was raised in, or passed through, code of this package."""
    return any(frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in traceback.walk_tb(error.__traceback__))


class Connections:
    """Accept connections. All methods run in the event loop of the server's thread.

    Args:
        where: the server's name in log lines.
        limit: the maximum number of connections.
        tls: the SSL context; None for no TLS.
        limit_of: returns the maximum number of connections from an address; None if there is no such limit.
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
        self.connections: dict[Connection, None] = {}  # sorted by arrival
        # TLS handshakes in progress, sorted by arrival. Their connections aren't in `connections` yet.
        self._meeting: dict[asyncio.Future[None], None] = {}

    def tell_bug(self, message: str, error: BaseException | None) -> None:
        """Log a bug in the server only once, because clients could cause it repeatedly.

        One known bug in aiohttp isn't logged: if aiohttp can't quote a client's Expect header, it answers with 500
        before this package's code is called.
        """
        if isinstance(error, UnicodeEncodeError) and not _has_come_here(error):
            return
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.error('internal error: where=%s error="%s"', self._where, message, exc_info=error)

    async def accept(self, listener: socket.socket, manager: web.Server | None) -> None:
        """Accept connections until the task is cancelled."""
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
        """Close the oldest TLS handshake or, if there is none, the oldest connection without a complete request.

        Return whether a handshake or connection was closed.
        """
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
        response.force_close()  # so that an unauthenticated client can't keep the connection open
        return response


def sentence(status: int, text: str) -> web.Response:
    """Return an answer with an error message for the user."""
    # The message may quote the client's input, which may be long.
    shown = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
    return web.json_response({"error": shown}, status=status)
