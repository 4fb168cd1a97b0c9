"""``kungfu-run resize`` and ``kungfu-run evict``: change a running job's cluster from another shell."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Callable

from ms_kungfu import env
from ms_kungfu._flags import FlagParser, UsageError, failed
from ms_kungfu._words import counted, printable
from ms_kungfu.cluster import WORKER_PORTS, WRITER_WHO_EVICTS, Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, StaleVersionError, StoreUnreachableError, open_store
from ms_kungfu.config_server.secret_file import is_same_server, servers_of_this_user
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.secret import SecretError, secret_for
from ms_kungfu.launcher.state.hosts import MANY_PER_CORE, parse_ports
from ms_kungfu.launcher.status_command import readable
from ms_kungfu.launcher.status_socket import jobs_by_launcher

_MAX_TRIES = 10
_LOOK_S = 2.0  # time limit for a job's answer


def resize(arguments: Sequence[str]) -> int:
    """Resize a running job.

    Exit status: 0 if the config server has the new size, 1 if the size couldn't be written, 2 for a wrong command
    line.
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
    """Write the size to the cluster store, as ``kungfu-run resize SIZE`` does. Return the message for the user.

    Raises ConfigServerError or ValueError.
    """
    return _write(store, lambda cluster: _resized(cluster, size, None))


def _resized(cluster: Cluster, size: int, given: range | None) -> Cluster | str:
    if cluster.size == size:
        return f"nothing to do: cluster version {cluster.version} has {counted(size, 'worker')} already"
    first = min(worker.port for worker in cluster.workers)
    if first in WORKER_PORTS:  # a port below `first` may be free, for example that of rank 0 with --msrun
        first = WORKER_PORTS[0]
    return cluster.resized(size, given or range(first, min(first + 1000, 65535) + 1))


def write_without(store: ClusterStore, rank: int, peer: str = "") -> str:
    """Write a cluster without the rank, as ``kungfu-run evict RANK`` does. Return the message for the user.

    `peer`: the peer ID that the worker with this rank must have. "" allows any worker.

    Raises ConfigServerError or ValueError.
    """
    return _write(store, _without(rank, peer))


def _without(rank: int, peer: str = "") -> Callable[[Cluster], Cluster | str]:
    """Return a function that takes the current cluster and returns the next one.

    The function may be called again if another client has written a cluster first. It then removes the worker that had
    the rank in the first call, even if another worker has the rank by now.
    (`test_evicted_worker_stays_the_same_if_ranks_shift`.)
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

    `change(number, port_range)` returns a function that takes the current cluster. That function returns the cluster to
    write, or a message that says why there is nothing to do.
    """
    program = f"kungfu-run {command}"
    parser = FlagParser(
        program,
        f"{program} {what} [JOB] [flags]",
        f"{description} JOB is the process ID of a kungfu-run on this machine or the URL of a config "
        "server; by default your only job on this machine.",
    )
    parser.flag(
        "config-server",
        "URL of the job's config server (default: $KUNGFU_CONFIG_SERVER, else the server of your only job "
        "on this machine)",
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
        flags, words = parser.parse_among(arguments)
        if len(words) not in (1, 2) or not words[0].isascii() or not words[0].isdigit() or int(words[0]) < least:
            raise UsageError(
                f"give one {what.lower()}, at least {least}, e.g. {program} 3 "
                "-config-server http://127.0.0.1:9100/config"
            )
        job = words[1] if len(words) == 2 else None
        if job is not None and flags.config_server is not None:
            raise UsageError(
                f"{job!r} and -config-server {flags.config_server!r} both name a job; give only one of them"
            )
        if job is not None and "://" not in job and not (job.isascii() and job.isdigit()):
            raise UsageError(f"{job!r} is neither a process ID nor a URL; kungfu-run status lists the jobs")
        url = flags.config_server
        if job is not None and not job.isdigit():
            url = job
        elif url is None and job is None:
            url = os.environ.get(env.CONFIG_SERVER.name)
        if url is None:
            url = _url_of_job(program, None if job is None else int(job))
        try:
            secret = secret_for(os.environ, flags.secret_file, url)
            store = open_store(url, secret)
        except SecretError as error:
            raise UsageError(str(error)) from None
        except ValueError as error:
            raise UsageError(f"-config-server: {error}") from None
        if secret is None and store.needs_secret:
            raise UsageError(
                f"no secret for {url}: no config server of this user has written one here; is the job running? "
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


def _url_of_job(program: str, pid: int | None) -> str:
    """Return the URL of a job's config server.

    The job is the one that launcher `pid` runs. If `pid` is None, it is the user's only job on this machine. If the
    user has several jobs, raise UsageError, even if only one of them can be resized: the user may mean another job.
    """
    jobs = _jobs_of_this_user(pid)
    if not jobs:
        raise UsageError(
            f"no job of this user runs here; start one with {PROGRAM} -w, or give the URL of its config server"
            if pid is None
            else f"process {pid} isn't a {PROGRAM} of this user on this machine; kungfu-run status lists the jobs"
        )
    if len(jobs) > 1:
        listed = "".join(f"\n  {_listed(each, job)}" for each, job in jobs)
        raise UsageError(
            f"{len(jobs)} jobs of this user run here; give the process ID or the URL, e.g. {program} NUMBER "
            f"{jobs[0][0] or jobs[0][1]['config_server']}:{listed}"
        )
    ((found, job),) = jobs
    if "error" in job:
        raise ConfigServerError(job["error"])
    if found is not None and not job["follows_changes"]:
        raise UsageError(f"{_listed(found, job)} was started without -w, so its size can't change; use {PROGRAM} -w")
    if job["config_server"] is None:
        raise ConfigServerError(f"the job of process {found} is still starting; try again when it trains")
    print(f"{program}: {_listed(found, job)}", file=sys.stderr)
    return str(job["config_server"])


def _listed(pid: int | None, job: Mapping[str, Any]) -> str:
    """Return one line for a job: its process ID, its command and its URL."""
    if "error" in job:
        return printable(job["error"])
    command = "" if pid is None else f"{pid}  {shlex.join(job['command'])}  "
    return printable(f"{command}{job['config_server'] or '(without -w)'}")


def _jobs_of_this_user(pid: int | None) -> list[tuple[int | None, dict[str, Any]]]:
    """Return, for each job of this user on this machine, the launcher's process ID and the job's status.

    The process ID is None if only the job's config server runs here, but no launcher.
    """
    found: dict[Any, tuple[int | None, dict[str, Any]]] = {}
    for each, answer in jobs_by_launcher(_LOOK_S, pid):
        document = readable(answer)
        found.setdefault(document.get("job") or each, (each, document))  # several launchers may belong to one job
    if pid is None:
        known = [job["config_server"] for _, job in found.values() if job.get("config_server")]
        have_answered = all("error" not in job for _, job in found.values())
        for url in servers_of_this_user() if have_answered else ():
            with contextlib.suppress(ConfigServerError):  # the server was killed and has left its secret file
                if not any(is_same_server(url, own) for own in known) and open_store(url, timeout_s=_LOOK_S).get():
                    found[url] = None, {"config_server": url}
    return list(found.values())


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
            continue  # the job or another client has written a cluster in the meantime
        change = f"{cluster.size} -> {counted(written.size, 'worker')}"
        joining = [str(worker) for worker in written.workers if worker not in cluster.workers]
        leavers = [str(worker) for worker in cluster.workers if worker not in written.workers]
        follows = "as soon as the new workers are ready" if joining else "at its next step"
        leaving = f" without {', '.join(leavers)}" if leavers and not joining else ""
        return f"cluster version {written.version}: {change}{leaving}; the job follows {follows}"
    raise ValueError(f"{store.url} changed in each of {_MAX_TRIES} attempts to write to it; try again")
