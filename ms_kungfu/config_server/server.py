"""The HTTP face of a ConfigStore, on aiohttp.

``GET /config`` answers ``{"Runners": [...], "Workers": [...], "Version": n}``, 404 where there is no cluster, and with
``?newer_than=V&timeout=S`` as soon as there is a newer version than V (304 after S seconds, at most 60). ``PUT``, and
``POST`` with a body, store a cluster and answer it as stored; ``DELETE``, and ``POST`` without a body, forget it.
Reading is free; writing needs ``Authorization: Bearer <secret>``: 401 without, 403 with a wrong one. 400 says what is
wrong with a document, 409 that its Version is stale, 413 that it is too long. A write that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
from typing import Callable

from aiohttp import web

from ms_kungfu.config_server.store import ConfigStore, StaleVersionError, parse_document
from ms_kungfu.elastic.cluster import Cluster

_MAX_BODY_BYTES = 256 * 1024
_MAX_WAIT_S = 60.0
_MAX_MESSAGE = 500


class ConfigServer:
    """Serves a store on the running event loop. Not thread-safe: everything on that loop.

    `on_change` is called after each write that succeeded, with the new cluster or None.
    """

    def __init__(
        self,
        store: ConfigStore,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str = "/config",
        on_change: Callable[[Cluster | None], None] | None = None,
    ) -> None:
        self._store = store
        self._secret = secret.encode()
        self._host, self._port, self._path = host, port, path
        self._on_change = on_change
        self._changed = asyncio.Event()
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_get(path, self._get)
        application.router.add_put(path, self._put)
        application.router.add_post(path, self._put)
        application.router.add_delete(path, self._delete)
        # A long poll must not hold up the end of the job.
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}{self._path}"

    @property
    def version(self) -> int:
        """The last version that was in use, -1 before the first."""
        return self._store.version

    async def start(self) -> None:
        """Binds and serves. OSError where the port is taken; port 0 takes a free one, see `url`."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self._wake()
        await self._runner.cleanup()

    def put(self, document: object) -> Cluster:
        """Stores on behalf of this process, as a PUT does, and tells everyone who waits."""
        cluster = self._store.put(document)
        self._wake()
        if self._on_change is not None:
            self._on_change(cluster)
        return cluster

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _get(self, request: web.Request) -> web.Response:
        try:
            newer_than = int(request.query.get("newer_than", "-1"))
            wait_s = float(request.query.get("timeout", "0" if "newer_than" not in request.query else "30"))
            if not math.isfinite(wait_s):
                raise ValueError
        except ValueError:
            return _sentence(400, "newer_than must be a version and timeout a number of seconds")
        if "newer_than" in request.query:
            deadline = asyncio.get_running_loop().time() + min(max(wait_s, 0.0), _MAX_WAIT_S)
            while self._store.cluster is None or self._store.version <= newer_than:
                changed = self._changed
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return _none() if self._store.cluster is None else web.Response(status=304)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
        return _none() if self._store.cluster is None else web.json_response(self._store.cluster.to_json())

    async def _put(self, request: web.Request) -> web.Response:
        refused = self._refuse_stranger(request)
        if refused is not None:
            return refused
        body = await request.read()  # more than client_max_size is answered by 413
        if not body and request.method == "POST":
            return self._forget()
        try:
            return web.json_response(self.put(parse_document(body)).to_json())
        except ValueError as error:
            return _sentence(400, str(error))
        except StaleVersionError as error:
            return _sentence(409, str(error))

    async def _delete(self, request: web.Request) -> web.Response:
        return self._refuse_stranger(request) or self._forget()

    def _forget(self) -> web.Response:
        self._store.clear()
        if self._on_change is not None:
            self._on_change(None)
        return web.json_response({})

    def _refuse_stranger(self, request: web.Request) -> web.Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            answer = _sentence(401, "writing needs the job's secret: Authorization: Bearer <secret>")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if not hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self._secret):
            return _sentence(403, "this is not the secret of the job that this config server belongs to")
        return None


def _sentence(status: int, text: str) -> web.Response:
    # The text may quote the input; a limit keeps the answer to bad input short.
    shown = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
    return web.json_response({"error": shown}, status=status)


def _none() -> web.Response:
    return _sentence(404, "there is no cluster yet")


async def serve_until(server: ConfigServer, stop: asyncio.Event, timeout_s: float | None = None) -> None:
    """Waits for `stop` (or the time limit) and closes the server, which must have been started."""
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), timeout_s)
    finally:
        await server.stop()
