"""``kungfu-run resize``: changes the size of a running job from another shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ms_kungfu import env
from ms_kungfu._flags import FlagParser, UsageError
from ms_kungfu.config_server.client import ConfigClient, StaleConfigError
from ms_kungfu.config_server.secret_file import secret_from
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.hosts import PortRange

_PROGRAM = "kungfu-run resize"
_MAX_TRIES = 10


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 when the config server has the new size, 1 when it can't be had, 2 for a wrong command line."""
    parser = FlagParser(_PROGRAM, f"{_PROGRAM} SIZE [flags]", "Changes the number of workers of a running job (-w).")
    parser.flag("config-server", "URL of the job's config server (default $KUNGFU_CONFIG_SERVER)", metavar="URL")
    parser.flag("port-range", "ports for new workers (default: from the first worker's on)", type=_ports, metavar="A-B")
    try:
        flags, words = parser.parse(arguments)
        if words:  # flags may stand behind the size as well
            more, rest = parser.parse(words[1:])
            flags.h, flags.help = flags.h or more.h, flags.help or more.help
            flags.config_server = more.config_server or flags.config_server
            flags.port_range = more.port_range or flags.port_range
            words = words[:1] + rest
        if flags.h or flags.help:
            print(parser.format_help(), end="")
            return 0
        if len(words) != 1 or not words[0].isascii() or not words[0].isdigit() or int(words[0]) < 1:
            raise UsageError(
                f"give one size, at least 1, e.g. {_PROGRAM} 3 -config-server http://127.0.0.1:9100/config"
            )
        url = flags.config_server or os.environ.get(env.CONFIG_SERVER.name)
        if not url:
            raise UsageError("-config-server is missing; kungfu-run prints the URL when the job starts")
        try:
            secret = secret_from(os.environ, url)
            client = ConfigClient(url, secret)
        except ValueError as error:
            raise UsageError(f"-config-server: {error}") from None
        if secret is None:
            raise UsageError(
                f"no secret for {url} was left by a config server of this user on this machine; set KUNGFU_JOB_SECRET"
            )
        print(_resize(client, int(words[0]), flags.port_range))
        return 0
    except UsageError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except (ConfigServerError, ValueError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1


def _ports(text: str) -> PortRange:
    return PortRange.parse(text)


def _resize(client: ConfigClient, size: int, given: PortRange | None) -> str:
    for _ in range(_MAX_TRIES):
        cluster = client.get()
        if cluster is None:
            raise ValueError(f"{client.url} holds no cluster; is the job running?")
        if cluster.size == size:
            return f"nothing to do: cluster version {cluster.version} has {size} workers already"
        first = min(worker.port for worker in cluster.workers)
        ports = (given or PortRange(first, min(first + 1000, 65535))).ports()
        try:
            written = client.put(cluster.resized(size, ports))
        except StaleConfigError:
            continue  # the job, or somebody else, was faster
        return f"cluster version {written.version}: {cluster.size} -> {size} workers; the job follows at its next step"
    raise ValueError(f"{client.url} changed {_MAX_TRIES} times while it was asked; try again")
