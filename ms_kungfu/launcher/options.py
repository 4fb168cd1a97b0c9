"""Check and convert the flags of kungfu-run. Each flag either has its effect or is rejected with a message."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Callable

from ms_kungfu import _cpu_isa, env
from ms_kungfu._flags import FlagParser, UsageError, duration, integer, switch
from ms_kungfu._tls import from_environment
from ms_kungfu._words import counted
from ms_kungfu.cluster import WORKER_PORTS
from ms_kungfu.launcher.affinity import core_count
from ms_kungfu.launcher.cpu_isa import AUTO, NATIVE
from ms_kungfu.launcher.engine_flags import ENGINE_FLAGS, EngineRequest, engine_request, settle_no_engine
from ms_kungfu.launcher.host_flags import HOST_FLAGS, NO_TORCHRUN_FLAGS, check_url, secret_of, settle_hosts
from ms_kungfu.launcher.msrun_flags import MSRUN_FLAGS, NO_MPIRUN_FLAGS, NO_MSRUN_FLAGS, settle_words, settle_world
from ms_kungfu.launcher.network import ADDRESS, known_address
from ms_kungfu.launcher.program_file import check_program
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts, parse_hosts, parse_ports
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.prefix import Prefix, prefix_of

PROGRAM = "kungfu-run"
_MAX_RESTARTS = 10
# Flags that kungfu-run doesn't support but users may expect, for example from KungFu, with the alternative to each.
_NO_FLAGS = {
    "P": "workers are named by -np, -H and -port-range: the first ports of the range on each host",
    "u": "kungfu-run doesn't log in to hosts; start it on each host, or on all with kungfu-distribute -u USER",
    **NO_TORCHRUN_FLAGS,
    **NO_MSRUN_FLAGS,
    **NO_MPIRUN_FLAGS,
    "debug-port": "there is no debug server: -logfile writes the launcher's log, a Monitor in the program serves "
    "metrics (KUNGFU_METRICS_PORT), and the config server returns the cluster",
    "k": "a job ends when its workers have ended; for another cluster, start kungfu-run again",
    "t0": "the job's start time isn't needed, because each log line has a time",
    "elastic-mode": "there is only one mode: with -w, workers that stay in the cluster keep their processes and their "
    'state (KungFu\'s "delta"); leave -elastic-mode out',
    "auto-recover": "give -w: the remaining workers then continue without a restart; add -recover replace to start a "
    "new worker for each failed one",
    "schedule": 'the program sets the schedule of sizes: KungFuElasticCallback("100:2,200:4"), or '
    "ElasticTraining(schedule=...); from outside, kungfu-run resize changes the size",
}
_OWN_FLAGS = {
    "q": "quiet",
    "v": "show_workers",
    "logdir": "logdir",
    "logfile": "logfile",
    "prefix": "prefix",
    "progress": "progress",
}  # the flags that a joining host sets itself
# Strategies for reductions between hosts. On one host they have no effect (`what_is_done_instead`).
_STRATEGIES_OF_HOSTS = (
    "STAR",
    "MULTI_STAR",
    "RING",
    "CLIQUE",
    "TREE",
    "BINARY_TREE",
    "BINARY_TREE_STAR",
    "MULTI_BINARY_TREE_STAR",
)


def known_strategy(name: str) -> str:
    """Return the name of a strategy in its usual spelling. Raises ArgumentTypeError if the strategy is unknown."""
    if name.upper() in ("AUTO", "SHM", *_STRATEGIES_OF_HOSTS):
        return name.upper()
    raise argparse.ArgumentTypeError(f"unknown strategy {name!r}; leave -strategy out or give AUTO")


def what_is_done_instead(strategy: str, is_several: bool) -> str:
    """Return a message if a KungFu strategy has no effect in this job, or "" if it has an effect."""
    if is_several or strategy not in _STRATEGIES_OF_HOSTS:
        return ""
    return (
        f"-strategy {strategy} has no effect on one host: its workers reduce in shared memory, which has no "
        "topology; the job runs as with -strategy AUTO"
    )


def _affinity(how: str) -> bool:
    if how not in ("auto", "none"):
        raise argparse.ArgumentTypeError(f"{how!r} is neither auto nor none")
    return how == "auto"


def known_isa(name: str) -> str:
    """Return the value of -cpu-isa in its usual spelling. Raises ArgumentTypeError if the value is unknown."""
    if name.lower() in (AUTO, NATIVE):
        return name.lower()
    level = _cpu_isa.level_named(name)
    if level is None:
        known = ", ".join(map(str.lower, _cpu_isa.names()))
        raise argparse.ArgumentTypeError(f"{name!r} is none of {AUTO}, {NATIVE}, {known}")
    return level


def _recover(how: str) -> Recover:
    try:
        return Recover(how)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{how!r} is none of {', '.join(r.value for r in Recover)}") from None


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _flag(
    name: str, help: str, *, metavar: str, type: Callable[[str], Any] = str, default: Any = None, optional: str = ""
) -> Any:
    """Define a field of `Options` that a flag sets."""
    what = {"name": name, "help": help, "type": type, "metavar": metavar, "optional": optional}
    return field(default=default, metadata=what)


def _switch(name: str, help: str, default: bool | None = False) -> Any:
    return _flag(name, help, metavar="", type=switch, default=default)


@dataclass(frozen=True)
class Options:
    """The options of a job. Times are in seconds; None means no limit."""

    command: tuple[str, ...]
    size: int = _flag("np", "number of workers (default 1)", type=integer(1), default=1, metavar="N")
    watch: bool = _switch("w", "follow the config server: start and end workers as the cluster changes")
    builtin_port: int | None = _flag(  # the port of the embedded config server, or None if there is none
        "builtin-config-port",
        "run a config server on this port while the job runs; 0 chooses a free port",
        type=integer(0, 65535),
        metavar="PORT",
    )
    config_server: str | None = _flag(  # the URL as the user has written it
        "config-server",
        "URL of the config server, e.g. http://127.0.0.1:9100/config, or of the job in etcd, etcd://HOST:2379/JOB",
        metavar="URL",
    )
    quiet: bool = _switch("q", "print only errors and the workers' output")
    show_workers: bool = _switch(
        "v", "show the workers' output (default; with -v=false it goes only to -logdir)", default=True
    )
    logdir: Path | None = _flag(
        "logdir",
        "folder for each worker's HOST.PORT.stdout.log and HOST.PORT.stderr.log, and for the event log, events.jsonl",
        type=_path,
        metavar="DIR",
    )
    logfile: Path | None = _flag(
        "logfile",
        "file for the launcher's own log; a relative path begins in -logdir, if that is given",
        type=_path,
        metavar="FILE",
    )
    dashboard: str | None = _flag(
        "dashboard",
        "serve a live page of the job, and print its URL, which contains a token; ADDR:PORT is an address of the "
        "controller's host (default 127.0.0.1:0, which means a free port)",
        type=known_address,
        metavar="[ADDR:PORT]",
        optional=ADDRESS,
    )
    prefix: Prefix | None = _flag(
        "prefix",
        "what is printed before each line of a worker's output: none, rank ([2]), host:rank, time, or two of them as "
        "in time,rank; add files, as in time,files, to write it to the files of -logdir, too (default: rank if several "
        "workers print to a terminal, else none)",
        type=prefix_of,
        metavar="WHAT",
    )
    progress: bool | None = _switch(
        "progress",
        "show the job's progress in one line at the bottom of the terminal (default on a terminal, without -q); if "
        "the output is a pipe, -progress logs it every 10 s",
        default=None,
    )
    hosts: Hosts = _flag(
        "H",
        "the hosts of the job, host:slots[:public address],...; slots is the maximum number of workers on the host; a "
        "larger cluster is an error (default 127.0.0.1 without a maximum)",
        type=parse_hosts,
        default=Hosts(),
        metavar="HOSTS",
    )
    ports: range = _flag(
        "port-range",
        "ports that name the workers (default 10000-11000)",
        type=parse_ports,
        default=WORKER_PORTS,
        metavar="A-B",
    )
    control_port: int = _flag(
        "port",
        "port on which the launchers listen if there are several hosts; it is part of the launchers' names (default "
        "38080)",
        type=integer(1, 65535),
        default=38080,
        metavar="PORT",
    )
    strategy: str = _flag(
        "strategy",
        "how data is reduced between hosts, by KungFu's names: AUTO (default), RING, STAR, MULTI_STAR, ...; on one "
        "host, workers always reduce in shared memory (SHM)",
        type=known_strategy,
        default="AUTO",
        metavar="NAME",
    )
    timeout_s: float | None = _flag(
        "timeout", "end the job after this time, e.g. 1h30m, with exit code 124", type=duration, metavar="TIME"
    )
    delay_s: float = _flag("delay", "wait before the job starts", type=duration, default=0.0, metavar="TIME")
    init_version: int | None = _flag(
        "init-version",
        "number of the first cluster version (default: one more than the config server's version, else 0); -1: wait "
        "until the config server has a cluster, and use that cluster",
        type=integer(-1, 2**40),
        metavar="N",
    )
    affinity: bool = _flag(
        "affinity",
        "auto (default): divide the cores among the workers; none: let each worker use all cores",
        type=_affinity,
        default=True,
        metavar="HOW",
    )
    cores_per_worker: int | None = _flag(
        "cores-per-worker",
        "give each worker exactly K cores at every cluster size; if there are too few cores, workers share them "
        "(default: divide all cores; if training has shards, 1 core for each worker)",
        type=integer(1),
        metavar="K",
    )
    cpu_isa: str = _flag(
        "cpu-isa",
        "the widest vector instructions that MindSpore's convolutions may use on all workers; auto (default): measure "
        "once whether AVX-512 makes convolutions much slower; native: no limit; or avx2, avx512_core, ...",
        type=known_isa,
        default=AUTO,
        metavar="ISA",
    )
    allow_nvlink: bool = _switch(
        "allow-nvlink",
        "let each worker see all GPUs of the job, so that NCCL finds NVLink; DEVICE_ID is the worker's own GPU",
    )
    leave_grace_s: float = _flag(
        "leave-grace",
        "how long a worker that has left the cluster may still run before the job reuses its slot, or ends without it "
        "(default 30s)",
        type=duration,
        default=30.0,
        metavar="TIME",
    )
    grace_period_s: float = _flag(
        "grace-period",
        "how long the workers may take to write a checkpoint and exit after the launcher has got a signal (default "
        "30s)",
        type=duration,
        default=30.0,
        metavar="TIME",
    )
    recover: Recover = _flag(
        "recover",
        "with -w: what happens if a worker fails; shrink (default): the other workers continue; replace: the other "
        "workers continue, and a new worker joins them; fail: the job ends (without -w, it always ends)",
        type=_recover,
        metavar="HOW",
    )
    min_size: int = _flag(
        "min-np", "with -w: end the job if fewer workers than N remain (default 1)", type=integer(1), metavar="N"
    )
    max_restarts: int = _flag(
        "max-restarts",
        "with -recover=replace or -standby: how many times in 5 minutes the worker in one slot, or a standby, may be "
        f"replaced (default {_MAX_RESTARTS})",
        type=integer(0),
        metavar="N",
    )
    standbys: int = _flag(
        "standby",
        "with -w: keep N standby processes ready, on the hosts that will get the next workers (default 0)",
        type=integer(0),
        default=0,
        metavar="N",
    )
    peer_timeout_s: float | None = _flag(
        "peer-timeout",
        "kill a worker that hangs for this time, e.g. because a signal has stopped it; 0: never (default "
        "$KUNGFU_PEER_TIMEOUT, else 30s)",
        type=duration,
        metavar="TIME",
    )
    host_timeout_s: float | None = _flag(
        "host-timeout",
        "with several hosts: if a host is silent, or unreachable for another host, for this time, the other hosts "
        "continue without it (or the job ends, without -w or with -recover fail); 0: wait until its connections end "
        "(default 10s)",
        type=duration,
        default=10.0,
        metavar="TIME",
    )
    msrun_size: int | None = _flag(
        "msrun-size",
        "with --msrun: the number of ranks that the program always sees, which is the maximum number of workers "
        "(default: the slots in -H, else -np)",
        type=integer(1),
        metavar="V",
    )
    # The secret with which several hosts authenticate each other; None for a single host or a trusted network.
    secret: str | None = field(default=None, repr=False)
    joins: bool = False  # whether this host joins a running job (-join)
    in_slurm: bool = False  # whether the hosts are the nodes of a Slurm step; then SIGUSR1 announces a loss of nodes

    def left_s(self, elapsed_s: float) -> float | None:
        """Return how many seconds are left until -timeout when the job has run for `elapsed_s` seconds.

        The result is always positive. It is None without -timeout.
        """
        return None if self.timeout_s is None else max(0.1, self.timeout_s - elapsed_s)

    @property
    def may_have_several_workers(self) -> bool:
        return self.size > 1 or self.watch or self.joins

    @property
    def host(self) -> Host:
        """Return this host."""
        return self.hosts.own


@dataclass(frozen=True)
class JoinRequest:
    """A request to let this host join a running job (`joining`).

    `own`: this host. If `own` is None, this host's name is the address of the network interface `interface`, or the
    address from which this host reaches the head node. `own_flags`: the fields of `Options` that each host sets
    itself.
    """

    url: str
    own: Host | None
    interface: str | None
    secret: str | None = field(repr=False)
    own_flags: dict[str, Any]


def parse_command_line(arguments: Sequence[str]) -> Options | JoinRequest | EngineRequest:
    """Return what a command line requests. Raises UsageError if the command line is invalid."""
    parser = FlagParser(
        PROGRAM,
        f"{PROGRAM} [flags] program [arguments]\n       {PROGRAM} -join URL [-self ADDRESS:SLOTS] [-secret-file FILE]\n"
        f"       {PROGRAM} resize SIZE [-config-server URL]\n"
        f"       {PROGRAM} evict RANK [-config-server URL]\n       {PROGRAM} status [URL]\n"
        f"       {PROGRAM} top [JOB]\n       {PROGRAM} explain LOGDIR\n       {PROGRAM} report LOGDIR\n"
        f"       {PROGRAM} trace DIR [-o FILE]",
        "Runs a program as the workers of a cluster, on this machine. Flags take one dash or two, -name value or "
        "-name=value.",
        _NO_FLAGS,
    )
    for each in fields(Options):
        if each.metadata:
            parser.flag(**each.metadata, dest=each.name, default=each.default)
    parser.set_defaults(size=None, in_slurm=False)
    for name, what in {**HOST_FLAGS, **ENGINE_FLAGS, **MSRUN_FLAGS}.items():
        parser.flag(name, **what)
    parser.flag(
        "msrun",
        "the program is written for MindSpore's msrun: it sees -msrun-size ranks in mindspore.communication, "
        "regardless of the cluster",
        type=switch,
        default=False,
    )
    flags, command = parser.parse(arguments)
    if flags.engine is not None:
        if command:
            check_program(command)
        _check_environment()
        return engine_request(flags, parser, command)
    settle_no_engine(flags, parser.given)
    if flags.join is not None and not flags.msrun:
        _check_environment()
        return _join_request(flags, parser.given, command)
    if not command:
        raise UsageError(f"no program to run; write it after the flags: {PROGRAM} -np 2 python train.py")
    check_program(command)
    _check_environment()
    embeds_somewhere = flags.builtin_port is not None  # `settle_hosts` resets the port unless this host runs the server
    settle_words(flags)
    settle_hosts(flags, parser.given)
    flags.size = flags.size or 1
    settle_world(flags)
    embedded = flags.builtin_port is not None or (flags.watch and flags.config_server is None)
    if flags.init_version == -1 and (embedded or embeds_somewhere or not flags.watch):
        raise UsageError(
            "-init-version -1 requires -w and a separate config server (-config-server, without "
            "-builtin-config-port), from which it gets the cluster"
        )
    if flags.config_server is not None:
        check_url(flags.config_server, flags.builtin_port, flags.hosts.is_several)
    if not flags.watch:
        for name, value in (("-min-np", flags.min_size), ("-standby", flags.standbys)):
            if value:
                raise UsageError(f"{name} requires -w: without -w the cluster doesn't change")
        if flags.recover not in (None, Recover.FAIL):
            raise UsageError(f"-recover {flags.recover.value} requires -w: without -w the job ends if a worker fails")
    # -max-restarts 0 is torchrun's default, and is accepted because kungfu-run never restarts all workers.
    if flags.max_restarts and flags.recover is not Recover.REPLACE and not flags.standbys:
        raise UsageError(
            "-max-restarts requires -recover=replace or -standby: -max-restarts limits how many times "
            "-recover=replace or -standby starts a worker again; unlike torchrun, kungfu-run never restarts all workers"
        )
    if flags.cores_per_worker is not None:
        if not flags.affinity:
            raise UsageError("-cores-per-worker assigns cores, but -affinity none doesn't; give only one of them")
        cores = core_count()
        if flags.cores_per_worker > cores:
            raise UsageError(
                f"-cores-per-worker {flags.cores_per_worker} is more than the {counted(cores, 'core')} that the job "
                "may use on this host"
            )
    if flags.min_size is not None and flags.size < flags.min_size:
        raise UsageError(f"-np {flags.size} is less than -min-np {flags.min_size}")
    peer_timeout_s = env.PEER_TIMEOUT.get() if flags.peer_timeout_s is None else flags.peer_timeout_s
    flags.logfile = flags.logfile and Path(flags.logdir or ".", flags.logfile)
    # With -w but without a config server, embed one on any free port. kungfu-run resize finds its URL.
    flags.builtin_port = (flags.builtin_port or 0) if embedded else None
    flags.timeout_s, flags.peer_timeout_s = flags.timeout_s or None, peer_timeout_s or None
    flags.host_timeout_s = flags.host_timeout_s or None
    flags.recover = flags.recover or (Recover.SHRINK if flags.watch else Recover.FAIL)
    flags.min_size = flags.min_size or 1
    flags.max_restarts = _MAX_RESTARTS if flags.max_restarts is None else flags.max_restarts
    options = Options(tuple(command), **vars(flags))
    try:
        options.hosts.first_cluster(options.size, options.ports, options.control_port, 0)
    except HostError as error:
        raise UsageError(str(error)) from None
    return options


def _join_request(flags: argparse.Namespace, given: set[str], command: Sequence[str]) -> JoinRequest:
    if command:
        raise UsageError(f"-join runs the program of the job; leave {' '.join(command)} out")
    others = sorted(given - {"join", "self", "nic", "secret-file", "no-secret", *_OWN_FLAGS})
    if others:
        raise UsageError(f"-{others[0]} comes from the head node of the joined job; leave it out if you give -join")
    if flags.self is not None and flags.nic is not None:
        raise UsageError("-self and -nic both set this host's address for the other hosts; give only one of them")
    own = None
    if flags.self is not None:
        try:
            own, *more = parse_hosts(flags.self)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"-self: {error}") from None
        if more or own.public:
            raise UsageError(f"-self {flags.self} is not one host with slots; write it like 10.0.0.3:4")
        if own.slots == 0:
            raise UsageError(f"-self {flags.self} has no slots; a joining host requires at least one")
    flags.logfile = flags.logfile and Path(flags.logdir or ".", flags.logfile)
    own_flags = {field: getattr(flags, field) for field in _OWN_FLAGS.values()}
    return JoinRequest(flags.join, own, flags.nic, secret_of(flags, is_several=True), own_flags)


def _check_environment() -> None:
    """Check the environment variables that users set. Raise UsageError if one of them is invalid.

    Without this check before the start, each worker would report the error.
    """
    for variable in env.VARIABLES:
        if "user" in variable.set_by:
            try:
                variable.get()
            except ValueError as error:
                raise UsageError(str(error)) from None
    try:
        from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
