"""Process the flags that select a job's hosts, identify this host, and configure what the hosts share."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from ms_kungfu import env
from ms_kungfu._flags import UsageError, integer, switch
from ms_kungfu._tls import from_environment
from ms_kungfu._words import counted
from ms_kungfu.cluster import EVEN, FILL, PLACEMENTS
from ms_kungfu.cluster_store import open_store
from ms_kungfu.devices.rank_table import RankTableError
from ms_kungfu.launcher import devices, network, slurm
from ms_kungfu.launcher.affinity import core_count
from ms_kungfu.launcher.secret import MAKE_ONE, SLURM_MAKES_ONE, SecretError, given_secret
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts, identify, of_interface, parse_hosts, read_hostfile

_SECRET_DIGITS = 32  # 128 bits can't be guessed over a network
# Flags of torchrun that kungfu-run doesn't support, with the equivalent of each.
_HOW_HOSTS_MEET = "hosts find each other by -port and the same -H on each host; with -w also by -config-server URL"
NO_TORCHRUN_FLAGS = {
    **{f"rdzv{dash}{what}": _HOW_HOSTS_MEET for what in ("backend", "endpoint", "id", "conf") for dash in "-_"},
    **{f"master-{what}": _HOW_HOSTS_MEET for what in ("addr", "port")},  # msrun has these flags with "_"
    **{f"node{dash}rank": "hosts are ordered as in -H; -self or -nic says which of them is this host" for dash in "-_"},
}
_NO_RESTARTS = (
    "torchrun restarts all workers after a failure; kungfu-run doesn't: the other workers continue. -max-restarts "
    "limits how many times -recover=replace or -standby starts a worker again"
)
_KINDS_OF_EACH = ("auto", "cpu", "gpu")  # torchrun's values for --nproc-per-node that aren't numbers


def _placement(how: str) -> str:
    if how not in PLACEMENTS:
        raise argparse.ArgumentTypeError(f"{how!r} is not a placement; give {' or '.join(PLACEMENTS)}")
    return how


def _nodes(text: str) -> tuple[int, int]:
    """Parse torchrun's ``--nnodes``: N or MIN:MAX."""
    low, _, high = text.partition(":")
    try:
        least, most = integer(1)(low), integer(1)(high or low)
    except argparse.ArgumentTypeError:
        least, most = 1, 0
    if least > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts; write it like 2, or 1:4 for 1 to 4")
    return least, most


def _each(text: str) -> int | str:
    """Parse torchrun's ``--nproc-per-node``."""
    return text if text in _KINDS_OF_EACH else integer(1)(text)


def _no_restarts(text: str) -> int:
    """Parse torchrun's spelling of -max-restarts. Only 0, torchrun's default, is valid here."""
    if integer(0)(text):
        raise argparse.ArgumentTypeError(_NO_RESTARTS)
    return 0


# `Options` doesn't have a field for each of these flags. `settle_hosts` combines them into a few fields.
HOST_FLAGS: dict[str, dict[str, Any]] = {
    "hostfile": {
        "help": "the hosts from a file instead of -H, one per line: ADDRESS slots=N [public_addr=ADDRESS]",
        "type": read_hostfile,
        "metavar": "FILE",
    },
    "self": {
        "help": "which host in -H this one is (default: the host that has an address of this machine); with -join, "
        "this host's address and its number of slots: ADDRESS:SLOTS (default: 1 slot)",
        "metavar": "ADDRESS",
    },
    "nic": {
        "help": "a network interface of this machine; this host is the host in -H that has the interface's address",
        "metavar": "NAME",
    },
    "placement": {
        "help": "with several hosts: even (default) assigns the next worker to the host with the fewest workers among "
        "those with a free slot; fill assigns it to the first host in -H with a free slot, as KungFu does at the start",
        "type": _placement,
        "metavar": "HOW",
    },
    "secret-file": {
        "help": "file with the secret that all hosts share, in hexadecimal digits (or set $KUNGFU_JOB_SECRET)",
        "metavar": "FILE",
    },
    "no-secret": {
        "help": "accept every host that reaches -port, without a secret; use this only in a trusted network",
        "type": switch,
        "default": False,
    },
    "join": {
        "help": "let this host join the job whose config server is at this URL; that job must run with -w on several "
        "hosts, or with -joinable. All flags but -self ADDRESS:SLOTS, -nic, the secret, -logdir, -logfile, -prefix, "
        "-progress, -q and -v come from that job",
        "metavar": "URL",
    },
    "joinable": {
        "help": "with -w and -H: let other hosts join (-join) even if -H names only one host; if -H names several "
        "hosts, others can always join",
        "type": switch,
        "default": False,
    },
    "nnodes": {
        "help": "torchrun's: the number of hosts in -H; MIN:MAX sets -w, and sets -min-np to the number of workers on "
        "MIN hosts",
        "type": _nodes,
        "metavar": "N",
    },
    "nproc-per-node": {
        "help": "torchrun's: the number of workers on each host; cpu: the number of this host's cores; gpu: the number "
        "of its GPUs; auto: the number of its devices, or of its cores if it has no device; must be equal on all hosts",
        "type": _each,
        "metavar": "K",
    },
    "nproc_per_node": {"help": argparse.SUPPRESS, "type": _each},
    "max_restarts": {"help": argparse.SUPPRESS, "type": _no_restarts},
    "standalone": {"help": "torchrun's: the job has one host", "type": switch, "default": False},
}


def settle_hosts(flags: Namespace, given: Collection[str]) -> None:
    """Process the flags for hosts, secret and config server, which depend on each other.

    `given`: the names of the flags on the command line. Raises SpareTaskError if another Slurm task on this node runs
    as the node's kungfu-run.
    """
    listed = None if isinstance(flags.hosts, Hosts) else flags.hosts
    if listed and flags.hostfile:
        raise UsageError("-H and -hostfile both name the hosts; give only one of them")
    if not listed and not flags.hostfile and not flags.standalone:
        listed = _of_distribute()
        if listed is None and flags.self is None and flags.nic is None and slurm.is_step(os.environ):
            listed = _of_slurm(flags, given)
    try:
        flags.hosts = _hosts_of(listed or flags.hostfile, flags.self, flags.nic)
    except HostError as error:
        raise UsageError(str(error)) from None
    if flags.joinable:
        if not flags.watch or flags.hosts.slots is None:
            raise UsageError("-joinable requires -w, and -H with an address at which other hosts reach this host")
        flags.hosts = replace(flags.hosts, joinable=True)
    flags.secret = secret_of(flags, flags.hosts.is_several)
    if flags.hosts.is_several:
        check_tls(flags.hosts.own.address)
    _settle_torchruns(flags)
    if flags.hosts.is_several:
        flags.hosts = replace(flags.hosts, placement=flags.placement or EVEN)
        _settle_config_server(flags)
    elif flags.placement is not None:
        raise UsageError(
            "-placement assigns workers to several hosts (-H), but this job has one host; leave -placement out"
        )
    if flags.hosts.is_several and flags.strategy == "SHM":
        raise UsageError(
            "-strategy SHM: it requires shared memory, which several hosts don't have; leave -strategy out"
        )
    for name in HOST_FLAGS:
        if name not in ("nproc-per-node", "max_restarts"):  # second spellings of other flags
            delattr(flags, name.replace("-", "_"))


def _of_distribute() -> tuple[Host, ...] | None:
    """Return the hosts on which kungfu-distribute has started this command, or None without kungfu-distribute.

    Without this list of hosts, each host would run a separate job.
    """
    try:
        slots = env.DISTRIBUTE_HOSTS.get()
        return None if slots is None else parse_hosts(",".join(f"{host}:{count}" for host, count in slots.items()))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(str(error)) from None


def _of_slurm(flags: Namespace, given: Collection[str]) -> tuple[Host, ...] | None:
    """Return the nodes of the Slurm step as hosts.

    If the step has only one node, return None, because a job on a single host needs no host name.
    """
    step = slurm.step_of(os.environ)
    slurm.take_cores(os.environ)
    flags.in_slurm = True
    if "port" not in given:
        flags.control_port = step.port
    if flags.size is None and flags.nproc_per_node is None:
        flags.size = step.size
    if len(step.hosts) == 1:
        return None
    flags.self = step.own
    return step.hosts


def _settle_torchruns(flags: Namespace) -> None:
    """Convert torchrun's flags to kungfu-run's flags."""
    hosts, each = flags.hosts, flags.nproc_per_node
    count = len(hosts.each)
    if flags.standalone and hosts.is_several:
        raise UsageError(f"--standalone runs the job on one host, but -H names {count}: {hosts}; give only one of them")
    least, most = flags.nnodes or (count, count)
    if flags.standalone and most > 1:
        raise UsageError("--standalone runs the job on one host, but --nnodes is for several; give only one of them")
    if not least <= count <= most:
        wanted = counted(least, "host") if least == most else f"{least} to {most} hosts"
        raise UsageError(
            f"--nnodes requires {wanted}, but there {'are' if hosts.is_several else 'is'} {count}: {hosts}; name "
            "the hosts with -H or -hostfile"
        )
    if each is None:
        if least < most:
            raise UsageError("--nnodes MIN:MAX requires --nproc-per-node K: the job needs at least MIN*K workers")
        return
    if isinstance(each, str):
        each = _counted_here(each, hosts.self_name)
    if flags.size is not None:
        raise UsageError(
            "-np sets the number of workers on all hosts together, but --nproc-per-node sets the number on each "
            "host; give only one of them"
        )
    if flags.placement == FILL:
        raise UsageError(
            "--nproc-per-node starts the same number of workers on each host, but -placement fill fills one host after "
            "the other; give only one of them"
        )
    few = [host for host in hosts.each if host.slots is not None and host.slots < each]
    if few:
        raise UsageError(f"--nproc-per-node {each} is more than the slots in -H {few[0]}; write {few[0].name}:{each}")
    flags.size = each * count
    if least < most:
        if flags.min_size is not None:
            raise UsageError(
                "-min-np and --nnodes MIN:MAX both set the minimum number of workers; give only one of them"
            )
        flags.watch, flags.min_size = True, each * least


def _counted_here(what: str, host: str) -> int:
    """Count this host's cores or devices for --nproc-per-node.

    If another host counts a different number, its -np differs, and the head node rejects that host.
    """
    try:
        found = devices.find(os.environ, os.listdir("/dev"), host=host, single=False, allow_nvlink=False)
    except (devices.DeviceListError, RankTableError) as error:
        raise UsageError(str(error)) from None
    if what == "cpu" or (what == "auto" and not found.each):
        return core_count()
    if what == "gpu" and found.kind is not devices.GPU:
        instead = "" if found.kind is None else f", but {found.kind.name}s: --nproc-per-node auto counts them"
        raise UsageError(f"--nproc-per-node gpu: the job may use no GPUs on this host{instead}")
    return len(found.each)


def _hosts_of(listed: tuple[Host, ...] | None, own: str | None, interface: str | None) -> Hosts:
    if not listed:
        if own is None and interface is None:
            return Hosts()
        name = own if own is not None else of_interface(str(interface))[0]
        listed = (replace(parse_hosts(f"[{name}]" if ":" in name else name)[0], slots=None),)
    return Hosts(listed, identify(listed, own, interface))


def secret_of(flags: Namespace, is_several: bool) -> str | None:
    """Return the secret that the user has given, or None. Raises UsageError if several hosts have none."""
    try:
        given = given_secret(flags.secret_file)
    except SecretError as error:
        raise UsageError(str(error)) from None
    if flags.no_secret:
        if given is not None:
            raise UsageError("-no-secret conflicts with -secret-file and KUNGFU_JOB_SECRET; give only one of them")
        if not is_several:
            raise UsageError(
                "-no-secret applies to several hosts (-H), but this job has one host; leave -no-secret out"
            )
        return None
    if not is_several:
        return given
    if given is None:
        how = SLURM_MAKES_ONE if flags.in_slurm else MAKE_ONE
        raise UsageError(f"several hosts require a shared secret: {how}")
    if len(given) < _SECRET_DIGITS:
        raise UsageError(
            f"the job's secret has {len(given)} digits; several hosts require at least {_SECRET_DIGITS}: {MAKE_ONE}"
        )
    return given


def _settle_config_server(flags: Namespace) -> None:
    """Decide which host embeds the config server, and at which URL all hosts find it."""
    hosts: Hosts = flags.hosts
    first = hosts.each[0].name
    if flags.config_server is None:
        if flags.builtin_port == 0 or (flags.builtin_port is None and flags.watch):
            raise UsageError(
                "several hosts have to know the port of the config server before it runs; give -builtin-config-port "
                f"9100 on each host; host {first} then runs the server"
            )
        if flags.builtin_port is None:
            return
        scheme = "http" if from_environment() is None else "https"
        flags.config_server = f"{scheme}://{first}:{flags.builtin_port}/config"
    check_url(flags.config_server, flags.builtin_port, is_several=True)
    servers = open_store(flags.config_server).servers
    if any(map(network.is_loopback, servers)) and not network.is_loopback(hosts.each[0].address):
        raise UsageError(
            f"-config-server {flags.config_server} is a different server on each host; write an address that all hosts "
            f"reach, e.g. {first}"
        )
    wanted = network.addresses_of_server(servers)
    there = [host.name for host in hosts.each if wanted & {host.address, *network.addresses_of(host.address)}]
    if there:
        flags.hosts = hosts = replace(hosts, head_name=there[0])
    elif flags.builtin_port is not None:
        raise UsageError(
            f"-builtin-config-port runs the config server on the host that -config-server names, but {servers[0]} is "
            f"none of {hosts}"
        )
    if flags.builtin_port is not None:
        if flags.builtin_port == 0:
            raise UsageError(
                "-builtin-config-port 0 means any free port, but all hosts must know the port in advance; give a "
                "fixed port, e.g. 9100"
            )
        if not hosts.is_head:
            flags.builtin_port = None


def check_url(url: str, builtin_port: int | None, is_several: bool) -> None:
    try:
        open_store(url)
    except ValueError as error:
        raise UsageError(f"-config-server: {error}") from None
    parts = urlsplit(url)
    if builtin_port is not None and parts.scheme not in ("http", "https"):
        raise UsageError(
            f"-builtin-config-port serves http, not {parts.scheme}; leave -builtin-config-port out, or write "
            "-config-server http://..."
        )
    if builtin_port and parts.port != builtin_port:
        raise UsageError(
            f"-config-server {url} has port {parts.port or 80}, but -builtin-config-port is {builtin_port}; "
            "give both the same port"
        )
    speaks_tls = from_environment() is not None
    if builtin_port is not None and parts.scheme == "https" and not speaks_tls:
        raise UsageError(
            "-builtin-config-port serves https only with KUNGFU_TLS_CERT, KUNGFU_TLS_KEY and KUNGFU_TLS_CA; set these, "
            "or write -config-server http://..."
        )
    if parts.scheme == "http" and speaks_tls and (is_several or not network.is_loopback(parts.hostname or "")):
        raise UsageError(f"-config-server {url} isn't encrypted, but {env.TLS_CERT.name} requires TLS; write https://")


def check_tls(own: str) -> None:
    """Raise UsageError if this host can't use TLS with the settings in the environment."""
    try:
        wanted = from_environment()
        if wanted is not None:
            wanted.check(own.partition("%")[0])
    except ValueError as error:
        raise UsageError(str(error)) from None
