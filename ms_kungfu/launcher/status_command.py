"""Show the status of this user's jobs as a table or as JSON (``kungfu-run status``)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu._flags import FlagParser, UsageError, failed, switch
from ms_kungfu._processes import printing
from ms_kungfu._words import counted, printable
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import LeadershipState, StoreUnreachableError, has_leadership, open_leadership, open_store
from ms_kungfu.config_server.secret_file import is_same_server
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.secret import SecretError, secret_for
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, how_it_has_ended
from ms_kungfu.launcher.state.policy import Standing
from ms_kungfu.launcher.state.progress import stall_of, training_of
from ms_kungfu.launcher.state.states import NodeState
from ms_kungfu.launcher.status_socket import jobs_of_this_user
from ms_kungfu.launcher.wire.documents import STATUS

_PROGRAM = "kungfu-run status"
ANSWER_S = 3.0
_Document = dict[str, Any]


def status(arguments: Sequence[str]) -> int:
    """Print the status of jobs.

    Exit status: 0 if every requested job is shown; 1 if a job doesn't answer, or if no job is found at the URL; 2 for a
    wrong command line.
    """
    parser = FlagParser(
        _PROGRAM,
        f"{_PROGRAM} [URL] [flags]",
        "Shows the job that has the config server at URL: its hosts, its workers and their steps, and its last changes "
        "with their reasons. Without URL, shows all jobs of this user on this machine.",
    )
    parser.flag("config-server", "the URL, as in other commands", metavar="URL")
    parser.flag("json", "print JSON: a list with one object for each job", type=switch, default=False)
    parser.flag("secret-file", "file with the job's secret, if the job was started on another machine", metavar="FILE")
    try:
        flags, words = parser.parse_among(arguments)
        if len(words) > 1:
            raise UsageError(f"unexpected argument {words[1]!r}; give one URL, or none")
        if words and flags.config_server is not None:
            raise UsageError(
                f"{words[0]!r} and -config-server {flags.config_server!r} both name a job; give only one of them"
            )
        url = words[0] if words else flags.config_server
        if url is not None:
            shown = [job_at(url, flags.secret_file)]
        elif flags.secret_file is not None:
            raise UsageError("-secret-file requires the URL of the job; give the URL, too")
        else:
            shown = _without_repeats(map(readable, jobs_of_this_user(ANSWER_S)))
    except UsageError as error:
        return failed(_PROGRAM, error, 2)
    except StoreUnreachableError as error:
        return failed(_PROGRAM, error.question, 1)
    except ConfigServerError as error:
        return failed(_PROGRAM, error, 1)
    with printing(_PROGRAM):
        _show(shown, flags.json)
    return 1 if any("error" in job for job in shown) else 0


def _show(jobs: Sequence[_Document], as_json: bool) -> None:
    if as_json:
        print(json.dumps(jobs, indent=2), flush=True)
    elif not jobs:
        print("no job of this user runs on this machine", flush=True)
    else:
        print("\n\n".join(as_text(printable_job(job), time.time()) for job in jobs), flush=True)


def printable_job(told: Any) -> Any:
    """Return a copy of a job's document in which no string contains characters that control a terminal."""
    if isinstance(told, str):
        return printable(told)
    if isinstance(told, dict):
        return {key: printable_job(value) for key, value in told.items()}
    return [printable_job(each) for each in told] if isinstance(told, list) else told


def job_at(url: str, secret_file: str | None) -> _Document:
    """Return the status of the job whose config server is at `url`. Raises ConfigServerError if there is none."""
    try:
        store = open_store(url)
        for job in jobs_of_this_user(ANSWER_S):
            if job.get("config_server") and is_same_server(url, job["config_server"]):
                return job
        secret = secret_for(os.environ, secret_file, url)
    except (SecretError, ValueError) as error:
        raise UsageError(str(error)) from None
    if secret is None and store.needs_secret:
        raise ConfigServerError(
            f"no job of this user on this machine has the config server {url}; for a job elsewhere, give its secret "
            f"with -secret-file or {env.JOB_SECRET.name}"
        )
    store = open_store(url, secret, timeout_s=ANSWER_S)
    found = store.status()
    if isinstance(found, dict):
        trouble = _trouble_with(found)
        if trouble:
            raise ConfigServerError(f"{url}: {trouble}")
        return found
    cluster = store.get()
    if cluster is None:
        raise ConfigServerError(f"{url} holds no cluster; is the job running?")
    # A job that was started on a single host writes no snapshot, so an existing snapshot belongs to an earlier job.
    leadership = (
        open_leadership(url, timeout_s=ANSWER_S).look()
        if has_leadership(url) and cluster.slots is not None
        else LeadershipState()
    )
    return _held(url, cluster, leadership)


def readable(document: _Document) -> _Document:
    """Return a launcher's answer, or {"error": ...} if the answer isn't the status of a job."""
    trouble = _trouble_with(document)
    return {"error": trouble} if trouble else document


def _trouble_with(document: _Document) -> str | None:
    try:
        STATUS.convert(document)
    except ProtocolError as error:
        return str(document.get("error", f"the answer isn't a job's status: {error}"))
    return None


def _held(url: str, cluster: Cluster, leadership: LeadershipState) -> _Document:
    """Return a status document made from a store's contents alone, because no launcher has answered.

    The document contains the cluster and, if the job's controller can move, the facts in the snapshot.
    """
    document: _Document = {
        "state": "unknown",
        "why": "the config server runs outside of the job and has only the desired cluster; run this command on "
        "a host of the job",
        "config_server": url,
        "hosts": [{"name": name, "lost": False} for name in cluster.hosts],
        "wanted": {"version": cluster.version, "size": cluster.size},
        "processes": [
            {"rank": rank, "host": worker.host, "peer": str(worker), "state": "wanted"}
            for rank, worker in enumerate(cluster.workers)
        ],
    }
    if leadership.snapshot is None:
        return document
    try:
        snapshot = LeaderSnapshot.from_json(leadership.snapshot)
    except ProtocolError as error:
        raise ConfigServerError(f"{url}: {error}") from None
    lost = snapshot.lost
    document["hosts"] = [
        {"name": host.name, "lost": host.name in lost, "state": "removed" if host.name in lost else "active"}
        for host in snapshot.hosts
    ]
    if snapshot.end is not None:
        why = how_it_has_ended(snapshot.end)
        document.update(state="ended", why=why, exit_code=snapshot.end[0], wanted=None, processes=[])
    else:
        document["why"] = _who_has_it(leadership.holder, snapshot)
    return document


def _who_has_it(holder: str, snapshot: LeaderSnapshot) -> str:
    """Return a text that names the host in control of a job that hasn't ended."""
    head = holder or snapshot.head
    others = [name for name in snapshot.present if name != head]
    if snapshot.versions.committed is None:
        others = []
    next_one = f"{' or '.join(others)} takes over"
    if holder:
        after = f"; if it has failed, {next_one} when its lease expires (-host-timeout)" if others else ""
        return f"{head} controls the job; {_PROGRAM} on that host shows more{after}"
    gone = f"the controller on {head} has failed"
    if not others:
        return f"{gone}, and the job has ended: no other host has its state"
    return (
        f"{gone}, and no host controls the job now; {next_one} within the time of a lease (-host-timeout), unless "
        f"{PROGRAM} has ended there, too"
    )


def _without_repeats(jobs: Any) -> list[_Document]:
    """Drop repeated answers of the same job.

    A job with several hosts has a launcher for each host, and one machine may have the addresses of several hosts.
    """
    found: dict[Any, _Document] = {}
    for number, job in enumerate(jobs):
        found.setdefault(job.get("job") or number, job)
    return list(found.values())


# ---- the table ----


def as_text(job: Mapping[str, Any], now: float) -> str:
    """Return one status document as text. `now`: the time in seconds since 1970."""
    if "error" in job:
        return str(job["error"])
    lines = []
    if "launcher" in job:
        launcher = job["launcher"]
        lines.append(
            f"job of process {launcher['pid']} on {launcher['host']}, since {clock(job['started_at'])} "
            f"({span(now - job['started_at'])}): {' '.join(job['command'])}"
        )
    else:
        lines.append(f"config server {job['config_server']}")
    lines.append(f"  {states_of(job)}")
    if "launcher" in job and job["config_server"]:
        follows = "" if job["follows_changes"] else ", which it doesn't follow (-w)"
        lines.append(f"  config server {job['config_server']}{follows}")
    if len(job["hosts"]) > 1:
        hosts = (_host(host) for host in job["hosts"])
        lines.append(f"  hosts: {', '.join(hosts)}")
    if job.get("training"):
        lines.append(f"  {', '.join(training_of(job['training']))}")
    lines += [f"  {stall_of(stall)}" for stall in job.get("stalls", ())]
    if job["processes"]:
        version = None if job.get("cluster") is None else job["cluster"]["version"]
        lines += ["", *_table(job["processes"], version)]
    if job.get("changes"):
        lines += ["", "  last changes:", *(f"    {change_of(change)}" for change in job["changes"])]
    return "\n".join(lines)


def _host(host: Mapping[str, Any]) -> str:
    state = host.get("state", NodeState.ACTIVE.value)
    return str(host["name"]) + ("" if state == NodeState.ACTIVE.value else f" ({state})")


def states_of(job: Mapping[str, Any]) -> str:
    """Return the state of a job and its cluster versions."""
    cluster, wanted = job.get("cluster"), job.get("wanted")
    parts = [str(job["state"])]
    if cluster:
        parts.append(f"cluster version {cluster['version']} of {counted(cluster['size'], 'worker')}")
    if wanted:
        parts.append(f"version {wanted['version']} of {counted(wanted['size'], 'worker')} is desired")
    return ", ".join(parts) + (f": {job['why']}" if job["why"] else "")


COLUMNS = ("rank", "host", "name", "pid", "device", "step", "step time", "ended", "state")


def row_of(p: Mapping[str, Any], version: int | None) -> list[str]:
    """Return the values of the `COLUMNS` for a process. `version`: the committed cluster version."""
    return [
        _text(p.get("rank")), p["host"], _text(p.get("peer")), _text(p.get("pid")), _text(p.get("device")),
        _text(p.get("step")), _seconds(p.get("step_s")), _ago(p.get("step_ended_s_ago")), _state(p, version),
    ]  # fmt: skip


def _table(processes: Sequence[Mapping[str, Any]], version: int | None) -> list[str]:
    columns = list(COLUMNS)
    rows = [row_of(p, version) for p in processes]
    if all(row[4] == "-" for row in rows):
        columns.pop(4)
        for row in rows:
            row.pop(4)
    table = [columns, *rows]
    widths = [max(len(row[c]) for row in table) for c in range(len(columns))]
    return ["  " + "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in table]


def _state(process: Mapping[str, Any], version: int | None) -> str:
    """Return a worker's state as text. `version`: the committed cluster version.

    The rank of a joining worker is its rank in the version that it joins. In `version`, another worker may have the
    same rank.
    """
    state, rank, joins_with = str(process["state"]), process.get("rank"), process.get("joined_with")
    state += f": {process['why']}" if process.get("why") else ""
    joins = process.get("standing") == Standing.JOINING.value and version is not None and joins_with != version
    return f"{state}, as rank {rank} of version {joins_with}" if joins else state


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """Return a duration as text in whole seconds, minutes or hours."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def clock(moment: float) -> str:
    """Return a moment as a time of day. Include the date if the moment isn't today."""
    then = time.localtime(moment)
    same_day = time.strftime("%Y%j", then) == time.strftime("%Y%j")
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def change_of(change: Mapping[str, Any]) -> str:
    """Return one change of the cluster with its outcome and reason."""
    before = change["size_before"]
    sizes = counted(change["size"], "worker") if before is None else f"{before} -> {counted(change['size'], 'worker')}"
    if change["refused"] is not None:
        outcome = f", rejected: {change['refused']}"
    elif change["chosen_at"] is None:
        outcome = f", {change['state']}"
    elif change["after_step"] is not None:
        outcome = f", after step {change['after_step']}"
    else:
        outcome = ""
    return f"{clock(change['wanted_at'])} version {change['version']}: {sizes}{outcome}; {change['why']}"
