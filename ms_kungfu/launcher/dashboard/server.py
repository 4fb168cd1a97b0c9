"""The HTTP server of a job's live page, which uses aiohttp (docs/dashboard.md describes the server's endpoints).

1. The job never waits for the server, which has its own thread and event loop. The job's event loop only passes events
   and samples to the server, and runs the commands. If the server fails, it logs one line, and the job continues
   without the page. (`test_failed_server_costs_one_line`.)

2. The server keeps no data for a single client. For each client, it only remembers a position in the history, and it
   sends only the newest sample. All clients share each message, and asyncio copies only a short piece for a client that
   doesn't read. A client that doesn't read its messages within `_WRITE_S` is disconnected, and may reconnect.
   (`test_slow_client_is_dropped`, `test_long_messages_are_written_in_short_pieces`.)

3. Clients that read events use at most three quarters of the connections. The rest is for requests that end at once.
   (`test_idle_clients_leave_connections_for_others`.)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Protocol

from aiohttp import web

from ms_kungfu import job_events as e
from ms_kungfu._processes import connection_limit
from ms_kungfu.config_server.connections import Connection, Connections, sentence
from ms_kungfu.launcher.dashboard.history import History
from ms_kungfu.launcher.dashboard.metrics import JobMetrics
from ms_kungfu.launcher.dashboard.requests import (
    COMMANDS,
    HEADERS,
    MAX_BODY_BYTES,
    CommandRefused,
    Evict,
    Refused,
    Resize,
    Stop,
    check_source,
    check_token,
    read_command,
)
from ms_kungfu.launcher.network import is_loopback
from ms_kungfu.launcher.wire.codec import encode

_log = logging.getLogger(__name__)
_FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"),
          "/model.js": ("model.js", "text/javascript"), "/page.js": ("page.js", "text/javascript")}  # fmt: skip
_MAX_CONNECTIONS = 256
_MAX_OF_SOURCE = 16  # the maximum number of connections from one address, unless the address is a loopback address
_PAST = 600  # the number of past samples that a new client gets
_CHUNK = 64  # events per write
_WRITE_S = 10.0
_PIECE_BYTES = 64 * 1024
_UNANSWERED_MS = 30_000  # if a client answers no packet for this time, the kernel ends its connection
_QUIET_S = 15.0  # after this time without data, the server sends a comment, so that it notices a broken connection
_COMMAND_S = 30.0
_STATUS_S = 4.0  # below a connection's time limit, and below Prometheus's usual time limits
_RETRY_MS = 2000
_BACKLOG = 256
_STOP_S = 2.0
_STREAM_BUFFER_BYTES = 256 * 1024


class Job(Protocol):
    """The methods of a job that the server calls, in the job's event loop."""

    def status(self) -> dict[str, Any]:
        """Return the job's status document. Never raises."""
        ...

    async def obey(self, command: Resize | Evict | Stop) -> str:
        """Run a command, and return a message for the user. Raises `CommandRefused`."""
        ...


@dataclass(eq=False, repr=False)
class DashboardServer:
    """Serve the page of a job. Call all methods in the event loop in which `start` is called.

    `names`: the DNS names of this machine, which requests may use if the server isn't on loopback. `first_event`: one
    less than the number of the first event, and greater than all event numbers of an earlier server on this port.
    """

    job: Job
    host: str = "127.0.0.1"
    port: int = 0
    names: tuple[str, ...] = ()
    first_event: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    files: Path = Path(__file__).parent
    num_streams: int = field(default=0, init=False)  # written by the server's thread
    is_bound: threading.Event = field(default_factory=threading.Event, init=False)
    _face: _Face | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Return the URL without the token."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def bind(self) -> socket.socket:
        """Return a listening socket. Call this in the server's thread. Raise OSError if the address can't be used."""
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((address[0], self.port), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self.host, self.port = str(address[0]), listener.getsockname()[1]
        return listener

    def start(self) -> None:
        """Serve in another thread. That thread logs the URL, or why the address can't be used.

        Raise OSError or RuntimeError if the system has no descriptor or no thread left.
        """
        face = _Face(self, asyncio.get_running_loop())
        thread = threading.Thread(target=face.run, name="kungfu-dashboard", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            face.close()
            raise
        self._face, self._thread = face, thread

    def add(self, event: e.Event) -> None:
        """Pass an event of the job to the server's thread."""
        if self._face is not None:
            self._face.call(lambda face: face.add(event))

    def sample(self, now: dict[str, Any]) -> None:
        """Pass a sample of what the ranks are doing now to the server's thread.

        `now`: an object with `time` and `ranks`, and also with `status` if there is a client (`has_clients`).
        """
        if self._face is not None:
            self._face.call(lambda face: face.sample(now))

    @property
    def most_streams(self) -> int:
        """Return how many clients may read the events at the same time."""
        return connection_limit(_MAX_CONNECTIONS) * 3 // 4

    @property
    def has_clients(self) -> bool:
        return self.num_streams > 0

    async def stop(self) -> None:
        """Send the last events, and stop the server."""
        face, self._face = self._face, None
        if face is not None and self._thread is not None:
            face.call(lambda face: face.stop())
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, _STOP_S)


class _Face(Connections):
    """The part of the server that runs in its own thread. Other threads call only `call`."""

    def __init__(self, server: DashboardServer, owner: asyncio.AbstractEventLoop) -> None:
        super().__init__("dashboard", connection_limit(_MAX_CONNECTIONS), limit_of=_limit_of)
        self._server, self._owner = server, owner
        self._loop = asyncio.new_event_loop()
        self._history = History(server.first_event)
        self._metrics = JobMetrics()
        self._name: str | None = None  # the name of the job
        self._now: bytes = b""  # the newest sample as a message, if it has a status
        self._now_number = 0
        self._past: collections.deque[bytes] = collections.deque(maxlen=_PAST)
        self._news: asyncio.Event
        self._stopped: asyncio.Event

    def call(self, function: Callable[[_Face], None]) -> None:
        """Make the server's thread call `function`. Return without waiting for the call."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(function, self)

    def close(self) -> None:
        """Release what `run` would release. Call this if the thread hasn't started."""
        self._loop.close()

    # ---- the thread ----

    def run(self) -> None:
        server = self._server
        asyncio.set_event_loop(self._loop)
        # Create the events here, because Python 3.9 binds an event to the loop of the thread that creates it. `_serve`
        # would be too late, because the first calls of `add` run before it.
        self._news, self._stopped = asyncio.Event(), asyncio.Event()
        try:
            with server.bind() as listener:
                _log.info("dashboard: url=%s#token=%s", server.url, server.token)
                if not is_loopback(server.host):
                    _log.warning(
                        "dashboard: address=%s is not a loopback address. Each host that reaches it can read the job's "
                        "events, and the connection isn't encrypted", server.host,
                    )  # fmt: skip
                server.is_bound.set()
                self._loop.run_until_complete(self._serve(listener))
        except Exception as error:
            number = getattr(error, "errno", None) or 0  # `errno` may be None
            _log.warning(
                'dashboard failed: address=%s:%d error="%s". The job goes on without it',
                server.host, server.port, os.strerror(number) if number > 0 else error,
            )  # fmt: skip
        finally:
            self._loop.close()
            server.num_streams = 0

    async def _serve(self, listener: socket.socket) -> None:
        self._loop.set_exception_handler(lambda _, what: self.tell_bug(what["message"], what.get("exception")))
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.once, self._checked])
        for path in _FILES:
            application.router.add_get(path, self._file)
        application.router.add_get("/events", self._events, allow_head=False)
        application.router.add_get("/metrics", self._show_metrics)
        for name in COMMANDS:
            application.router.add_post(f"/{name}", self._command)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        accepting = asyncio.ensure_future(self.accept(listener, runner.server))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            ended, _ = await asyncio.wait([accepting, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            deadline = self._loop.time() + _STOP_S / 4
            while self._server.num_streams and self._loop.time() < deadline:
                await asyncio.sleep(0.01)
        finally:
            accepting.cancel()
            stopped.cancel()
            await runner.cleanup()

    def stop(self) -> None:
        self._stopped.set()
        self._wake()

    def add(self, event: e.Event) -> None:
        if isinstance(event, e.LogBegan):
            self._name = event.job
        self._history.add(event)
        self._metrics.add(event)
        self._wake()

    def sample(self, now: dict[str, Any]) -> None:
        lanes = [[rank["state"], rank["step"]] for rank in now["ranks"]]
        self._past.append(json.dumps({"time": now["time"], "ranks": lanes}).encode())
        # A sample without a status also replaces `_now`, so that the next client doesn't get an old sample.
        self._now = _message("now", json.dumps(now)) if "status" in now else b""
        self._now_number += 1
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ---- requests ----

    @web.middleware
    async def _checked(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        server = self._server
        try:
            check_source(request.headers, server.host, server.names, request.method == "GET" and request.path == "/")
            answer: web.StreamResponse = await handler(request)
        except Refused as refusal:
            answer = sentence(refusal.status, str(refusal))
            if refusal.status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
        except web.HTTPException as error:
            answer = sentence(error.status, error.reason)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = _FILES[request.path]
        try:
            text = (self._server.files / name).read_text(encoding="utf-8")
        except OSError:
            return sentence(404, f"this installation of ms_kungfu has no {name}")
        return web.Response(text=text, content_type=kind, charset="utf-8")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        status = await self._in_owner(self._status(), _STATUS_S)
        try:
            body, kind = self._metrics.render(status)
        except ImportError as error:
            return sentence(501, str(error))
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _status(self) -> dict[str, Any]:
        return self._server.job.status()

    async def _command(self, request: web.Request) -> web.Response:
        check_token(request.headers, self._server.token)
        try:
            body = await request.read()
        except web.RequestPayloadError:
            raise Refused(400, "the request's body doesn't match its headers") from None
        command = read_command(request.path[1:], request.content_type, body)
        assert isinstance(request.protocol, Connection)
        request.protocol.may_wait(_COMMAND_S)
        # Log the command first, because the job may run the command even if the client disconnects before the answer.
        _log.info(
            "dashboard command: command=%s from=%s request=%s",
            request.path[1:], request.remote, encode(command).decode(),
        )  # fmt: skip
        try:
            message = await self._in_owner(self._server.job.obey(command), _COMMAND_S)
        except CommandRefused as error:
            return sentence(409, str(error))
        return web.json_response({"accepted": True, "message": message}, status=202)

    async def _in_owner(self, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """Await `work` in the job's event loop, at most `limit_s` seconds. Raise `Refused` after that."""
        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._owner)), limit_s
            )
        except asyncio.TimeoutError:
            pass
        except RuntimeError:  # the job's event loop is closed
            work.close()
        raise Refused(503, "the job doesn't answer; it may be just ending")

    # ---- streams ----

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._server.num_streams >= self._server.most_streams:
            answer = sentence(503, f"{self._server.num_streams} clients read the events; try again later")
            answer.headers["Retry-After"] = "10"
            return answer
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        connection = request.protocol
        assert isinstance(connection, Connection)
        self._server.num_streams += 1
        try:
            response.force_close()
            await response.prepare(request)
            connection.may_wait(None)
            _limit_buffers(request.transport)
            await self._stream(response, _number(request.headers.get("Last-Event-ID")))
        except (ConnectionError, asyncio.TimeoutError):
            connection.abort()
        finally:
            self._server.num_streams -= 1
        return response

    async def _stream(self, response: web.StreamResponse, last: int | None) -> None:
        history = self._history
        items, place = history.items, 0
        resumes = last is not None and history.knows(last)
        if resumes and last is not None:
            place = history.place_after(last)
        first = items[place].number if place < len(items) else history.last + 1
        hello = {"job": self._name, "version": e.VERSION, "first": first, "resumes": resumes}
        await _write(response, [b"retry: %d\n" % _RETRY_MS, _message("hello", json.dumps(hello))])
        past = [part for sample in self._past for part in (b",", sample)]
        await _write(response, [b"event: past\ndata: [", *past[1:], b"]\n\n"])
        sent_now = 0
        while True:
            news, is_last = self._news, self._stopped.is_set()
            if place < len(items):
                chunk = items[place : place + _CHUNK]
                place += len(chunk)
                last = chunk[-1].number
                await _write(response, [item.message for item in chunk])
            elif items is not history.items:  # the history has been thinned in the meantime
                items = history.items
                place = 0 if last is None else history.place_after(last)
            elif is_last:
                return
            elif self._now and self._now_number > sent_now:
                sent_now = self._now_number
                await _write(response, [self._now])
            else:
                try:
                    await asyncio.wait_for(news.wait(), _QUIET_S)
                except asyncio.TimeoutError:
                    await _write(response, [b":\n\n"])


async def _write(response: web.StreamResponse, parts: Sequence[bytes]) -> None:
    """Write the parts in pieces. Write the next piece only when most of the earlier bytes have been sent."""

    async def write() -> None:
        piece = bytearray()
        for part in parts:
            piece += part
            if len(piece) >= _PIECE_BYTES:
                await response.write(bytes(piece))
                piece.clear()
        if piece:
            await response.write(bytes(piece))

    await asyncio.wait_for(write(), _WRITE_S)


def _message(event: str, data: str) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data.encode())


def _limit_of(address: str) -> int | None:
    return None if is_loopback(address) else _MAX_OF_SOURCE


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None


def _limit_buffers(transport: asyncio.Transport | None) -> None:
    """Limit how much data the kernel buffers for a client, and for how long it waits for a client's acknowledgement."""
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_BUFFER_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
