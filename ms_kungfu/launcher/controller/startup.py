"""Prepare a job before its first worker starts: the secret, the first cluster, and the store for the desired one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import ssl
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Callable, Optional
from urllib.parse import urlsplit

from msgspec import Struct

from ms_kungfu import env
from ms_kungfu._tls import from_environment
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import (
    ClusterStore,
    LeadershipLostError,
    StaleVersionError,
    StoreUnreachableError,
    open_store,
)
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.config_server.secret_file import SecretFile, SecretFileError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hosts import HostError
from ms_kungfu.launcher.state.start_error import StartError

if TYPE_CHECKING:
    from ms_kungfu.config_server.server import ConfigServer

OnChange = Callable[[Optional[Cluster]], None]
MayWrite = Callable[[], Awaitable[bool]]
_log = logging.getLogger(__name__)
CONFIG_SERVER_START_S = 10.0
_RETRY_S = 0.2


class JobStart(Struct):
    """What a job begins with.

    Clients request another cluster through the config server in this process (`server`), or through another `store`.
    A job whose cluster can't change has neither. `attempts`: a controller numbers its attempts to create the shared
    memory of cluster versions. This controller's numbers are higher than `attempts`, because earlier controllers have
    used the lower numbers. `cpu_isa`: the limit on the vector instructions of all workers. `cores`: the
    number of cores of the only host; None if there are or may be several hosts. The last two are known when the hosts
    have registered.
    """

    join_timeout_s: float
    secret: str
    first: Cluster
    writer: str  # the name under which the launcher writes clusters
    url: str | None = None
    server: ConfigServer | None = None
    store: ClusterStore | None = None
    attempts: int = 0
    cpu_isa: str | None = None
    cores: int | None = None


async def prepare(
    options: Options,
    machine: Machine,
    closers: contextlib.AsyncExitStack,
    check: Callable[[Cluster], None],
    on_change: OnChange,
    on_status: Callable[[], dict[str, Any]],
    on_secret_left: Callable[[SecretFile], None],
    before_first: Callable[[str, ClusterStore, Callable[[], Cluster]], Awaitable[MayWrite]],
) -> JobStart:
    """Prepare a job. Closing `closers` ends everything that this function starts.

    An embedded config server calls `check` before it accepts a cluster, and `on_change` afterwards. `on_status`, which
    never raises, returns the job's status.

    If the job uses another store, the launcher calls `before_first(writer, store, first cluster)` before it writes to
    that store. `before_first` may raise StartError, and returns a function. If the store later rejects a write because
    of the lease, that function returns whether to retry the write.

    `on_secret_left` is called with the file that contains the job's secret.
    """
    if machine.environ.get(env.COMPILE_CACHE) == "1":
        _log.warning(
            'compile cache: off in workers setting="%s=1" reason="ranks share it and it ignores batch shapes"',
            env.COMPILE_CACHE,
        )
    if options.delay_s:
        _log.info("start delayed: seconds=%g flag=-delay", options.delay_s)
        await asyncio.sleep(options.delay_s)
    try:
        join_timeout_s, secret = (
            env.JOIN_TIMEOUT.get(machine.environ),
            options.secret or env.JOB_SECRET.get(machine.environ),
        )
    except ValueError as error:
        raise StartError(str(error)) from None
    writer = secrets.token_hex(8)
    url = options.config_server
    if options.builtin_port is None and url is not None:
        secret = secret or (_secret_of(url, machine) if open_store(url).needs_secret else secrets.token_hex(32))
        store = machine.open_store(url, secret, writer=writer)
        may_write = await before_first(writer, store, lambda: _first_cluster(options, 0))
        first = await _first_from(options, machine, store, may_write)
        _log.info("config server: url=%s followed=%s", url, "yes" if options.watch else "no")
        return JobStart(join_timeout_s, secret, first, writer, url, store=store)
    first = _first_cluster(options, max(options.init_version or 0, 0))
    start = JobStart(join_timeout_s, secret or secrets.token_hex(32), first, writer)
    if options.builtin_port is not None:
        start.server = await _embed(options, machine, ConfigStore(first, check), start.secret, on_change, on_status)
        start.url = start.server.url
        closers.push_async_callback(start.server.stop)
        try:
            file = machine.leave_secret(start.url, start.secret)
            on_secret_left(file)
            closers.callback(file.remove)
        except SecretFileError as error:
            _log.warning('secret unavailable: error="%s". kungfu-run resize needs KUNGFU_JOB_SECRET', error)
        _log.info("config server: url=%s", start.url)
    return start


async def _embed(
    options: Options,
    machine: Machine,
    store: ConfigStore,
    secret: str,
    on_change: OnChange,
    on_status: Callable[[], dict[str, Any]],
) -> ConfigServer:
    parts = urlsplit(options.config_server or "http://127.0.0.1/config")
    host = "127.0.0.1" if parts.hostname in (None, "localhost") else str(parts.hostname)
    path = parts.path if parts.path not in ("", "/") else "/config"
    port = options.builtin_port or 0
    server = machine.make_config_server(
        store, secret, host=host, port=port, path=path, on_change=on_change, on_status=on_status,
        tls=_tls_of(parts.scheme, machine),
    )  # fmt: skip
    try:
        await server.start()
    except OSError as error:
        taken = "is taken" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror}"
        remedy = "give another port, or 0 for any free port"
        if options.hosts.is_several:
            remedy = "give another port (the same port on all hosts)"
        raise StartError(f"port {port} (-builtin-config-port) on {host} {taken}; {remedy}") from None
    return server


def _tls_of(scheme: str, machine: Machine) -> ssl.SSLContext | None:
    """Return the TLS settings for a URL with this scheme (`host_flags.check_url`)."""
    try:
        wanted = from_environment(machine.environ) if scheme == "https" else None
        return None if wanted is None else wanted.context(called=True)
    except ValueError as error:
        raise StartError(str(error)) from None


def _secret_of(url: str, machine: Machine) -> str:
    """Return the secret of a config server that runs independently of the job."""
    secret = machine.secret_of(url)
    if secret is None:
        raise StartError(
            f"no secret for {url}: no config server of this user on this machine has written a secret; start a config "
            "server first (kungfu-config-server), embed one in the job (-builtin-config-port), or set "
            "KUNGFU_JOB_SECRET to the secret of a config server on another machine"
        )
    try:
        bytes.fromhex(secret)
    except ValueError:
        raise StartError(f"the secret of {url} does not consist of hexadecimal digits") from None
    return secret


async def _first_from(options: Options, machine: Machine, store: ClusterStore, may_write: MayWrite) -> Cluster:
    """Wait until the store contains the first cluster, and return it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONFIG_SERVER_START_S
    is_logged = False
    while True:
        try:
            first = await machine.in_thread(lambda: _first_of(options, store))
            if first is not None:
                return first
            if not is_logged:
                is_logged = True
                _log.info("waiting for a cluster: url=%s flag=-init-version", store.url)
        except StoreUnreachableError as error:
            if loop.time() > deadline:
                instead = " -builtin-config-port runs one with the job" if store.needs_secret else ""
                raise StartError(f"{error.question}{instead}") from None
        except StaleVersionError:
            continue
        except LeadershipLostError as error:
            if not await may_write():
                raise StartError(str(error)) from None
        except (ConfigServerError, HostError) as error:
            raise StartError(str(error)) from None
        await asyncio.sleep(_RETRY_S)


def _first_of(options: Options, store: ClusterStore) -> Cluster | None:
    """Return the first cluster if the store contains it, or None if the job has to wait for it."""
    held = store.get()
    wanted = options.init_version
    if wanted == -1:
        if held is not None:
            options.hosts.check(held, ())
        return held
    # The version of a deleted cluster counts, too: the server rejects a lower version with status 409.
    version = held.version + 1 if held is not None else 0
    if wanted is not None:
        if held is not None and wanted < version:
            raise HostError(
                f"-init-version {wanted}: {store.url} is already at version {held.version}; leave the flag out"
            )
        if held is not None and wanted > version:
            store.delete()
        version = wanted
    return store.put(_first_cluster(options, version))


def _first_cluster(options: Options, version: int) -> Cluster:
    return options.hosts.first_cluster(options.size, options.ports, options.control_port, version)
