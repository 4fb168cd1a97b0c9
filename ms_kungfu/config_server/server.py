"""Serve a ConfigStore over HTTP, with aiohttp.

- ``GET /config`` returns ``{"Runners": [...], "Workers": [...], "Version": n}``, or 404 if there is no cluster. With
  ``?newer_than=V&timeout=S``, the server answers as soon as there is a cluster version newer than V. After S seconds
  (at most 60), it answers with 304.
- ``PUT``, and ``POST`` with a body, store a cluster and return the stored cluster. ``DELETE``, and ``POST`` without a
  body, delete the cluster. If a write has the header ``Kungfu-Writer: <id>``, the answer to each read of the written
  version has this header.
- ``GET /config/status`` returns the job's status, or 404 if the server isn't embedded in a job.
- Reading the cluster needs no authentication. Reading the status, and writes, need ``Authorization: Bearer <secret>``.
  The answer is 401 if this header is missing, and 403 if the secret is wrong.
- 400 means that a document is invalid, 409 that its Version is stale, and 413 that it is too long. The body of the
  answer contains the reason. A rejected write changes nothing.

Any user of the machine may connect, so clients must not be able to disturb the job:

- The server has its own thread and event loop. If the loop fails, the server logs the error and restarts on the same
  port. The store belongs to the job's event loop, in which all writes run.
- The number of connections is limited (`connections`). Each connection serves one request within ten seconds. If a
  request waits for a newer version, the waiting time is added to the ten seconds.
- At most half of the connections may wait for a newer version. The server answers further requests immediately, as if
  their waiting time were over. `ClusterStore.watch` then returns early, and its caller must call `watch` again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import logging
import math
import re
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, TypeVar

from aiohttp import web

from ms_kungfu._decoding import MalformedError, decode
from ms_kungfu._processes import connection_limit
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import StaleVersionError
from ms_kungfu.cluster_store.http import WRITER_HEADER
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.config_server.connections import Connection, Connections, sentence

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 256 * 1024
_WRITER = re.compile(r"[0-9A-Za-z]{0,64}")
_MAX_WAIT_S = 60.0
_MAX_CONNECTIONS = 128
_BACKLOG = 1024
_RESTART_S = 1.0
_STOP_S = 2.0


@dataclass(eq=False, repr=False)
class ConfigServer:
    """Serve a store over HTTP.

    The store, `on_change` and all methods may be used only in the event loop in which `start` was called.

    Args:
        store: the store.
        secret: the secret required for writing.
        host: the address to listen on.
        port: the port to listen on; 0 for any free port.
        path: the path of the URL.
        tls: if this is set, the server uses https.
        on_change: called after each successful write, with the new cluster, or with None if it was deleted.
        on_status: returns the job's status. It never raises an exception.
    """

    store: ConfigStore
    secret: str
    host: str = "127.0.0.1"
    port: int = 0
    path: str = "/config"
    tls: ssl.SSLContext | None = None
    on_change: Callable[[Cluster | None], None] | None = None
    on_status: Callable[[], dict[str, Any]] | None = None
    _listeners: list[socket.socket] = field(default_factory=list, init=False)
    _owner: asyncio.AbstractEventLoop = field(init=False)
    _face: _Face | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}{self.path}"

    async def start(self) -> None:
        """Listen on the port, and serve. If the port is 0, listen on any free port, which `url` then contains.

        Raises:
            OSError: the port can't be used.
        """
        self._owner = asyncio.get_running_loop()
        for family, _, _, _, address in await self._owner.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                listener = socket.create_server((address[0], self.port), family=family, backlog=_BACKLOG)
            except OSError:
                self._close_listeners()
                raise
            listener.setblocking(False)
            self._listeners.append(listener)
            self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="kungfu-config-server", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        if self._face is not None:
            self._face.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            await self._owner.run_in_executor(None, thread.join, _STOP_S)
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def put(self, document: object, writer: str = "") -> Cluster:
        """Store a document that this process writes, as for a PUT request, and notify the waiting clients."""
        try:
            cluster = self.store.put(document, writer)
        except (ValueError, StaleVersionError):
            raise
        except Exception as error:  # an unexpected error: the document is rejected, and nothing has changed
            _log.error('internal error: where=config-server error="%r"', error, exc_info=error)
            raise ValueError(f"internal error: {error!r}") from error
        self._changed(cluster)
        return cluster

    def _clear(self) -> None:
        self.store.clear()
        self._changed(None)

    def _changed(self, cluster: Cluster | None) -> None:
        if self._face is not None:
            self._face.wake()
        if self.on_change is not None:
            self.on_change(cluster)

    # ---- the thread ----

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                self._face = _Face(self, self._listeners)
                asyncio.run(self._face.serve(self._stopping))
            except Exception as error:
                _log.error('config server failed: error="%s: %s" action=restart', type(error).__name__, error)
                self._stopping.wait(_RESTART_S)

    async def write(self, body: bytes, writer: str) -> Cluster:
        """Store the document that a client has sent."""
        try:
            document = decode(body, _MAX_BODY_BYTES)
        except MalformedError as error:
            raise ValueError(f"the body isn't a valid cluster: {error}") from None
        if not _WRITER.fullmatch(writer):
            raise ValueError(f"{WRITER_HEADER} must be at most 64 letters and digits")
        return await self._in_owner(lambda: self.put(document, writer))

    async def forget(self) -> None:
        await self._in_owner(self._clear)

    async def status(self) -> dict[str, Any] | None:
        return None if self.on_status is None else await self._in_owner(self.on_status)

    async def _in_owner(self, function: Callable[[], T]) -> T:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return  # the client has already closed the connection
            try:
                outcome.set_result(function())
            except (ValueError, StaleVersionError) as error:
                outcome.set_exception(error)
            except BaseException as error:
                outcome.set_exception(RuntimeError("internal error"))
                raise error  # a bug in the job's code: the job's event loop gets the error, too

        self._owner.call_soon_threadsafe(run)
        return await asyncio.wrap_future(outcome)

    def refuse_stranger(self, request: web.Request, what: str) -> web.Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            answer = sentence(401, f'{what} needs the header "Authorization: Bearer SECRET" with the job\'s secret')
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if not hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self.secret.encode()):
            return sentence(403, "this is not the secret of the job that this config server belongs to")
        return None


class _Face(Connections):
    """The part of a server that handles HTTP. All its methods except `wake` and `stop` run in the server's thread.

    It reads the store's cluster through a single reference. Another thread may replace the reference, but
    never modifies a cluster.
    """

    def __init__(self, server: ConfigServer, listeners: Sequence[socket.socket]) -> None:
        super().__init__("config-server", connection_limit(_MAX_CONNECTIONS), server.tls)
        self._server = server
        self._listeners = listeners
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event
        self._stopped: asyncio.Event
        self._waiting = 0

    def wake(self) -> None:
        """Wake the requests that wait for a newer version, because the store has changed."""
        self._call(self._wake)

    def stop(self) -> None:
        self._call(lambda: self._stopped.set())

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._loop.call_soon_threadsafe(function)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, stopping: threading.Event) -> None:
        """Serve until `stop` is called. If the server fails, raise the exception that caused the failure."""
        self._changed, self._stopped = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, what: self.tell_bug(what["message"], what.get("exception")))
        if stopping.is_set():  # `stop` was called before the loop existed
            return
        application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self.once])
        application.router.add_get(self._server.path, self._get)
        application.router.add_get(f"{self._server.path.rstrip('/')}/status", self._status)
        for method in ("PUT", "POST", "DELETE"):
            application.router.add_route(method, self._server.path, self._write)
        # A request that waits for a newer version must not delay the end of the job. The request also ends when its
        # client closes the connection.
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stopped.wait())]
        try:
            tasks += [asyncio.ensure_future(self.accept(listener, runner.server)) for listener in self._listeners]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        try:
            newer_than = int(request.query.get("newer_than", "-1"))
            wait_s = float(request.query.get("timeout", "0" if "newer_than" not in request.query else "30"))
            if not math.isfinite(wait_s):
                raise ValueError
        except ValueError:
            return sentence(400, "newer_than must be a version number, and timeout must be a number of seconds")
        cluster = self._server.store.cluster
        if "newer_than" in request.query:
            cluster = await self._newer(request, newer_than, min(max(wait_s, 0.0), _MAX_WAIT_S))
            if cluster is not None and cluster.version <= newer_than:
                return web.Response(status=304)
        return sentence(404, "there is no cluster yet") if cluster is None else _answer(cluster)

    async def _status(self, request: web.Request) -> web.Response:
        refused = self._server.refuse_stranger(request, "the job's status")
        if refused is not None:
            return refused
        document = await self._server.status()
        if document is None:
            return sentence(404, "no job has embedded this config server")
        return web.json_response(document)

    async def _newer(self, request: web.Request, newer_than: int, wait_s: float) -> Cluster | None:
        """Wait until the cluster is newer than `newer_than`, at most `wait_s` seconds. Return the current cluster."""
        if self._waiting >= self.limit // 2:
            wait_s = 0.0
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        assert isinstance(request.protocol, Connection)
        request.protocol.may_wait(wait_s)
        self._waiting += 1
        try:
            while True:
                changed = self._changed  # read this event before the cluster, so that a later change sets the event
                cluster = self._server.store.cluster
                left = deadline - loop.time()
                if (cluster is not None and cluster.version > newer_than) or left <= 0:
                    return cluster
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
        finally:
            self._waiting -= 1

    async def _write(self, request: web.Request) -> web.Response:
        refused = self._server.refuse_stranger(request, "writing")
        if refused is not None:
            return refused
        try:
            body = (
                b"" if request.method == "DELETE" else await request.read()
            )  # a body over client_max_size is answered with 413
        except web.RequestPayloadError:
            return sentence(400, "the body of the request doesn't match the header")
        try:
            if not body and request.method != "PUT":
                await self._server.forget()
                return web.json_response({})
            return _answer(await self._server.write(body, request.headers.get(WRITER_HEADER, "")))
        except ValueError as error:
            return sentence(400, str(error))
        except StaleVersionError as error:
            return sentence(409, str(error))


def _answer(cluster: Cluster) -> web.Response:
    return web.json_response(cluster.to_json(), headers={WRITER_HEADER: cluster.writer} if cluster.writer else None)
