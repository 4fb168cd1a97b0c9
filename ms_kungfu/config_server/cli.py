"""Implement kungfu-config-server, which runs a config server that outlives the jobs that use it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from ms_kungfu._decoding import decode
from ms_kungfu._flags import FlagParser, UsageError, duration, failed, integer
from ms_kungfu._processes import raise_descriptor_limit
from ms_kungfu._run_loop import run
from ms_kungfu._tls import from_environment
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.config_server.secret_file import SecretFile, SecretFileError, read_secret, write_secret
from ms_kungfu.config_server.server import ConfigServer

PROGRAM = "kungfu-config-server"
_MAX_BYTES = 1024 * 1024  # the largest file that -init accepts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal or -ttl stops it.

    Return the exit status: 0 if the server was stopped, 1 if it can't serve, 2 if the command line is invalid.
    """
    parser = FlagParser(PROGRAM, f"{PROGRAM} [flags]", "Stores the desired cluster of an elastic job.")
    parser.flag("port", "port to listen on; 0 = any free port", type=integer(0, 65535), default=9100, metavar="PORT")
    parser.flag(
        "host",
        "address to listen on; any host that can reach this address may read the cluster",
        default="127.0.0.1",
        metavar="HOST",
    )
    parser.flag("init", "JSON file with the first cluster", metavar="FILE")
    parser.flag("endpoint", "path of the URL", default="/config", metavar="PATH")
    parser.flag("ttl", "stop after this time, e.g. 10m; 0 = never", type=duration, default=0.0, metavar="TIME")
    try:
        flags, rest = parser.parse(sys.argv[1:] if arguments is None else arguments)
        if rest:
            raise UsageError(f"unexpected argument {rest[0]!r}; {PROGRAM} takes flags only")
        if not flags.endpoint.startswith("/"):
            raise UsageError(f"-endpoint: {flags.endpoint!r} must begin with '/'")
        cluster = _read_cluster(Path(flags.init)) if flags.init else None
        tls = _tls_of(flags.host)
        raise_descriptor_limit()
        return run(_serve(flags.host, flags.port, flags.endpoint, cluster, flags.ttl or None, tls))
    except UsageError as error:
        return failed(PROGRAM, error, 2)


def _tls_of(host: str) -> ssl.SSLContext | None:
    try:
        wanted = from_environment()
        if wanted is None:
            return None
        wanted.check("" if host in ("0.0.0.0", "::", "") else host)
        return wanted.context(called=True)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _read_cluster(path: Path) -> Cluster:
    try:
        return Cluster.from_json(decode(path.read_bytes(), _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(f"-init: {path}: {error.strerror if isinstance(error, OSError) else error}") from None


async def _serve(
    host: str, port: int, path: str, cluster: Cluster | None, ttl_s: float | None, tls: ssl.SSLContext | None
) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    given = os.environ.get("KUNGFU_JOB_SECRET")
    # If an earlier server was killed, its secret file still exists. A job may be waiting until a server with the same
    # secret starts.
    server = ConfigServer(ConfigStore(cluster), "", host=host, port=port, path=path, tls=tls)
    left = read_secret(server.url) if port else None
    secret = server.secret = given or left or secrets.token_hex(32)
    try:
        await server.start()
    except OSError as error:
        text = f"can't listen on {host}:{port}: {error.strerror or error}; use another -port, or 0 for any free port"
        return failed(PROGRAM, text, 1)
    file: SecretFile | None = None
    try:
        try:
            file = write_secret(server.url, secret)
        except SecretFileError as error:
            if not given:
                return failed(PROGRAM, f"{error}; set KUNGFU_JOB_SECRET instead", 1)
            print(f"{PROGRAM}: {error}; writing requires the secret in KUNGFU_JOB_SECRET", file=sys.stderr)
        where = f"; the secret for writing is in {file.path}" if file else ""
        print(f"{PROGRAM}: serving {server.url}{where}", flush=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), ttl_s)
        return 0
    finally:
        if file is not None:
            file.remove()
        with contextlib.suppress(Exception):
            await server.stop()
