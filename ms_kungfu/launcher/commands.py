"""``kungfu-run resize`` and ``kungfu-run evict``: change a running job's cluster from another shell."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Callable

from ms_kungfu import env
from ms_kungfu._flags import FlagParser, UsageError, failed
from ms_kungfu._words import counted
from ms_kungfu.cluster import WORKER_PORTS, WRITER_WHO_EVICTS, Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, StaleVersionError, StoreUnreachableError, open_store
from ms_kungfu.config_server.secret_file import servers_of_this_user
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.secret import SecretError, secret_for
from ms_kungfu.launcher.state.hosts import MANY_PER_CORE, parse_ports

_MAX_TRIES = 10
_LOOK_S = 2.0  # how long to wait for the answer of a job


def resize(arguments: Sequence[str]) -> int:
    """Resize a running job.

    Exit status: 0 if the config server has the new size, 1 if the write fails, 2 for a wrong command line.
    """

    return _main(
        "resize",
        "SIZE",
        "Changes the number of workers of a running job (-w).",
        1,
        lambda size, given: lambda cluster: _resized(cluster, size, given),
        arguments,
    )


def write_size(store: ClusterStore, size: int) -> str:
    """Write the size to the cluster store, as ``kungfu-run resize SIZE`` does, and return the message for the user.

    Raises ConfigServerError or ValueError.
    """
    return _write(store, lambda cluster: _resized(cluster, size, None))


def _resized(cluster: Cluster, size: int, given: range | None) -> Cluster | str:
    if cluster.size == size:
        return f"nothing to do: cluster version {cluster.version} has {counted(size, 'worker')} already"
    first = min(worker.port for worker in cluster.workers)
    if first in WORKER_PORTS:  # an earlier slot may be free, e.g. the slot of rank 0 with --msrun
        first = WORKER_PORTS[0]
    return cluster.resized(size, given or range(first, min(first + 1000, 65535) + 1))


def write_without(store: ClusterStore, rank: int, peer: str = "") -> str:
    """Write a cluster without the rank, as ``kungfu-run evict RANK`` does, and return the message for the user.

    `peer`: the worker that must have this rank; "" for any worker.

    Raises ConfigServerError or ValueError.
    """
    return _write(store, _without(rank, peer))


def _without(rank: int, peer: str = "") -> Callable[[Cluster], Cluster | str]:
    """Return a function that returns the next cluster.

    The first cluster decides which worker leaves. If another client writes a version in between, the rank may be that
    of another worker. (`test_evicted_worker_stays_the_same_if_ranks_shift`.)
    """
    leaver: PeerID | None = None

    def next_cluster(cluster: Cluster) -> Cluster | str:
        nonlocal leaver
        if leaver is None:
            if rank >= cluster.size:
                raise ValueError(
                    f"there is no rank {rank}: cluster version {cluster.version} has {counted(cluster.size, 'worker')}"
                )
            leaver = cluster.workers[rank]
            if peer not in ("", str(leaver)):
                raise ValueError(
                    f"rank {rank} is worker {leaver} in cluster version {cluster.version}, not {peer}; "
                    "look up the rank again"
                )
        if leaver not in cluster.workers:
            return f"nothing to do: worker {leaver} has left before cluster version {cluster.version}"
        return replace(cluster.without([leaver]), writer=WRITER_WHO_EVICTS)

    return next_cluster


def evict(arguments: Sequence[str]) -> int:
    """Evict a rank from a running job.

    Exit status: 0 if the config server has a cluster without the rank, otherwise 1 or 2 as for `resize`.
    """
    return _main(
        "evict",
        "RANK",
        "Removes a worker from a running job (-w); the other workers continue.",
        0,
        lambda rank, given: _without(rank),
        arguments,
    )


def _main(
    command: str,
    what: str,
    description: str,
    least: int,
    change: Callable[[int, range | None], Callable[[Cluster], Cluster | str]],
    arguments: Sequence[str],
) -> int:
    """Run a command.

    `change(the command's number, -port-range)` returns a function of the present cluster. That function returns the
    cluster to write, or a message why there is nothing to do.
    """
    program = f"kungfu-run {command}"
    parser = FlagParser(program, f"{program} {what} [flags]", description)
    parser.flag(
        "config-server",
        "URL of the job's config server (default: $KUNGFU_CONFIG_SERVER, else that of your only job here)",
        metavar="URL",
    )
    parser.flag("secret-file", "file with the job's secret, if the job was started on another machine", metavar="FILE")
    if command == "resize":
        parser.flag(
            "port-range",
            "ports for new workers (default: kungfu-run's range, or the ports from the first worker's port on)",
            type=parse_ports,
            metavar="A-B",
        )
    try:
        flags, words = parser.parse(arguments)
        if words:  # flags may follow the number
            flags, rest = parser.parse(words[1:], flags)
            words = words[:1] + rest
        if len(words) != 1 or not words[0].isascii() or not words[0].isdigit() or int(words[0]) < least:
            raise UsageError(
                f"give one {what.lower()}, at least {least}, e.g. {program} 3 "
                "-config-server http://127.0.0.1:9100/config"
            )
        url = flags.config_server or os.environ.get(env.CONFIG_SERVER.name) or _only_job(program)
        try:
            secret = secret_for(os.environ, flags.secret_file, url)
            store = open_store(url, secret)
        except SecretError as error:
            raise UsageError(str(error)) from None
        except ValueError as error:
            raise UsageError(f"-config-server: {error}") from None
        if secret is None and store.needs_secret:
            raise UsageError(
                f"no secret for {url}: no config server of this user has left one here; is the job running? "
                "For a job of another user or machine give -secret-file or set KUNGFU_JOB_SECRET"
            )
        number, ports = int(words[0]), getattr(flags, "port_range", None)
        hosts: set[str] = set()
        next_cluster = change(number, ports)

        def following(cluster: Cluster) -> Cluster | str:
            hosts.update(peer.host for peer in cluster.runners + cluster.workers)
            return next_cluster(cluster)

        print(_write(store, following))
        cores = len(os.sched_getaffinity(0))
        if command == "resize" and number > MANY_PER_CORE * cores and len(hosts) == 1:
            print(
                f"{program}: {number} workers are far more than the {counted(cores, 'core')} of this machine; if that "
                "was a mistake, resize to another size now",
                file=sys.stderr,
            )
        return 0
    except UsageError as error:
        return failed(program, error, 2)
    except StoreUnreachableError as error:
        return failed(program, error.question, 1)
    except (ConfigServerError, ValueError) as error:
        return failed(program, error, 1)


def _only_job(program: str) -> str:
    """Return the config server URL of the user's only job on this machine."""
    found, silent, unreachable = [], [], None
    for url in servers_of_this_user():
        try:
            cluster = open_store(url, timeout_s=_LOOK_S).get()
        except ConfigServerError as error:  # the server was killed, and its secret file remains
            why = error.__context__
            if isinstance(why, (TimeoutError, socket.timeout)):
                silent.append(url)
            elif isinstance(why, OSError) and why.errno == errno.ENETUNREACH:  # if `lo` is down
                unreachable = error
            continue
        if cluster is not None:
            found.append((url, cluster.size))
    if not found and silent:
        raise ConfigServerError(
            f"the job of {' and that of '.join(silent)} doesn't answer within {_LOOK_S:g} s: its launcher is stopped "
            "or overloaded"
        )
    if not found and unreachable is not None:
        raise unreachable
    if not found:
        raise UsageError(
            f"no job of this user that can change runs here; start one with {PROGRAM} -w, or give the URL of its "
            "config server with -config-server"
        )
    if len(found) > 1:
        jobs = ", ".join(f"{url} ({counted(size, 'worker')})" for url, size in found)
        raise UsageError(f"{len(found)} jobs of this user run here; choose one with -config-server: {jobs}")
    url = found[0][0]
    print(f"{program}: {url}", file=sys.stderr)
    return url


def _write(store: ClusterStore, next_cluster: Callable[[Cluster], Cluster | str]) -> str:
    for _ in range(_MAX_TRIES):
        cluster = store.get()
        if cluster is None:
            raise ValueError(f"{store.url} holds no cluster; is the job running?")
        wanted = next_cluster(cluster)
        if isinstance(wanted, str):
            return wanted
        try:
            written = store.put(wanted)
        except StaleVersionError:
            continue  # the job or another client has changed the store first
        change = f"{cluster.size} -> {counted(written.size, 'worker')}"
        joining = [str(worker) for worker in written.workers if worker not in cluster.workers]
        leavers = [str(worker) for worker in cluster.workers if worker not in written.workers]
        follows = "as soon as the new workers are ready" if joining else "at its next step"
        leaving = f" without {', '.join(leavers)}" if leavers and not joining else ""
        return f"cluster version {written.version}: {change}{leaving}; the job follows {follows}"
    raise ValueError(f"{store.url} changed in each of {_MAX_TRIES} attempts to write to it; try again")
