"""Derive the first cluster from ``-H`` and ``-port-range``, and check which clusters the hosts can run."""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace as replace_fields

from ms_kungfu import env
from ms_kungfu._run_time import run_time
from ms_kungfu._words import counted
from ms_kungfu.cluster import (
    EVEN,
    MAX_WORKERS,
    MAX_WORKERS_OF_EACH,
    MAX_WORKERS_OF_HOSTS,
    Cluster,
    PeerID,
    next_host,
)  # fmt: skip
from ms_kungfu.launcher import network
from ms_kungfu.launcher.state.states import NodeState

_log = logging.getLogger(__name__)
_LOOK_UP_AGAIN_S = 1.0
MANY_PER_CORE = 4  # a resize request for more workers per core than this is probably a mistake
DEFAULT_HOST = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")


class HostError(ValueError):
    """The hosts can't run the requested cluster; the message is for the user."""


class Host(Struct, frozen=True):
    """One host in the list of the ``-H`` flag.

    Args:
        name: the host as it is written in the workers' addresses. An IPv6 address is in brackets.
        slots: how many workers the host may run. None allows as many workers as are requested and fit into memory. 0 is
            for a head node that runs no workers.
        public: the address for ssh, if it differs from `name`.
    """

    name: str = DEFAULT_HOST
    slots: int | None = None
    public: str = ""

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"

    @property
    def address(self) -> str:
        """Return the name without brackets, for connections and name resolution."""
        return self.name.strip("[]")

    @property
    def login(self) -> str:
        """Return the host's address for ssh."""
        return (self.public or self.name).strip("[]")


class Hosts(Struct, frozen=True):
    """The hosts of a job, in the order of ``-H``.

    Args:
        each: the hosts.
        self_name: the name of the host that is this machine.
        head_name: the name of the host that controls the job. This is the host that runs the config server, or by
            default the first host.
        most: the limit on the number of workers, if there is one.
        placement: how workers are assigned to hosts (`Cluster.resized`).
        ports: the ports of all workers, if a worker's port determines its slot (``--msrun``).
        states: the states of the hosts that are no longer active.
        joinable: whether other hosts may join even if the job starts with one host.
    """

    each: tuple[Host, ...] = (Host(),)
    self_name: str = DEFAULT_HOST
    head_name: str = ""
    most: int | None = None
    placement: str = EVEN
    ports: range | None = None
    states: tuple[tuple[str, NodeState], ...] = ()
    joinable: bool = False

    def __str__(self) -> str:
        return ",".join(map(str, self.each))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.each)

    @property
    def is_several(self) -> bool:
        """Return whether the job has several hosts, or may get more hosts because others may join."""
        return len(self.each) > 1 or self.joinable

    @property
    def own(self) -> Host:
        return self.named(self.self_name)

    @property
    def head(self) -> Host:
        return self.named(self.head_name) if self.head_name else self.each[0]

    @property
    def is_head(self) -> bool:
        """Return whether this machine is the head node."""
        return self.own == self.head

    def named(self, name: str) -> Host:
        return next(host for host in self.each if host.name == name)

    @property
    def slots_by_host(self) -> dict[str, int] | None:
        """Return the number of slots of each active host; None if a single host has no limit."""
        if self.each[0].slots is None:
            return None
        return {host.name: host.slots or 0 for host in self.staying}

    @property
    def staying(self) -> tuple[Host, ...]:
        """Return the active hosts, which are the ones that may get new workers."""
        return tuple(host for host in self.each if self.state_of(host.name) is NodeState.ACTIVE)

    @property
    def limit(self) -> str | None:
        """Return the active hosts with their slots, in the format of KUNGFU_HOSTS."""
        return None if self.slots_by_host is None else ",".join(map(str, self.staying))

    @property
    def slots(self) -> int | None:
        """Return the total number of slots of the active hosts; None if there is no limit."""
        return None if self.slots_by_host is None else sum(self.slots_by_host.values())

    def state_of(self, name: str) -> NodeState:
        return dict(self.states).get(name, NodeState.ACTIVE)

    @property
    def leaving(self) -> frozenset[str]:
        return self._in(NodeState.DRAINING)

    @property
    def lost(self) -> frozenset[str]:
        return self._in(NodeState.REMOVED)

    def _in(self, state: NodeState) -> frozenset[str]:
        return frozenset(name for name, its in self.states if its is state)

    def _to(self, name: str, state: NodeState) -> Hosts:
        states = {**dict(self.states), name: self.state_of(name).to(state, f"host {name}")}
        return replace_fields(self, states=tuple(each for each in states.items() if each[1] is not NodeState.ACTIVE))

    def letting_go(self, name: str) -> Hosts:
        """Return a copy in which the host `name` is marked as leaving."""
        return self._to(name, NodeState.DRAINING)

    def without(self, name: str) -> Hosts:
        """Return a copy in which the host `name` is marked as removed, because it failed or left."""
        return self._to(name, NodeState.REMOVED)

    def joined_by(self, host: Host) -> Hosts:
        """Return a copy with a new host at the end, or with a lost host active again at its old position."""
        known = host.name in self.names
        each = tuple(host if old.name == host.name else old for old in self.each) + (() if known else (host,))
        return replace_fields(self._to(host.name, NodeState.ACTIVE) if host.name in self.lost else self, each=each)

    @property
    def max_workers(self) -> int:
        """Return the maximum number of workers of the job."""
        return min(MAX_WORKERS_OF_HOSTS if self.is_several else MAX_WORKERS, self.most or MAX_WORKERS_OF_HOSTS)

    def has_room(self, size: int) -> bool:
        """Return whether the hosts have enough slots for `size` workers, and the job's limit allows this size."""
        return size <= (self.max_workers if self.slots is None else min(self.slots, self.max_workers))

    def first_cluster(self, size: int, ports: range, control_port: int, version: int) -> Cluster:
        """Return the cluster that a job starts with.

        Raises:
            HostError: the cluster doesn't fit on the hosts.
        """
        if self.slots is not None and size > self.slots:
            raise HostError(
                f"-np {size}: -H {self} has {counted(self.slots, 'slot')}; request fewer workers or give "
                f"{'the hosts' if self.is_several else 'the host'} more slots"
            )
        if size > self.max_workers:
            raise HostError(f"-np {size}: {self._most}")
        runners = tuple(PeerID(host.name, control_port) for host in self.each)
        dealt = self._dealt(size)
        most = max(dealt.values())
        self._check_each(dealt)
        if most > len(ports):
            raise HostError(
                f"-port-range {ports[0]}-{ports[-1]}: too small for {counted(most, 'worker')}; give a larger range"
            )
        # Ranks are sorted by host, so that neighbouring ranks are on the same host. The order in which workers were
        # assigned to hosts doesn't matter.
        workers = tuple(PeerID(name, ports[i]) for name, count in self._dealt(size).items() for i in range(count))
        return self.described(Cluster(workers, runners, version))

    def described(self, cluster: Cluster) -> Cluster:
        """Return `cluster` with the host information that a client needs to resize it. A one-host job needs none."""
        if not self.is_several:
            return cluster
        runners = {runner.host: runner for runner in cluster.runners}
        port = next((runner.port for runner in cluster.runners), None)
        # There is no port if the program that wrote `cluster` doesn't use runners.
        if port is not None:
            named = (runners.get(host.name, PeerID(host.name, port)) for host in self.staying)
            cluster = replace(cluster, runners=tuple(named))
        return replace(cluster, slots=self.slots_by_host, placement=self.placement)

    def _dealt(self, size: int) -> dict[str, int]:
        """Return how many of `size` workers each host gets."""
        count = dict.fromkeys(self.names, 0)
        for _ in range(size):
            count[next_host(count, self.names, self.slots_by_host, self.placement)] += 1
        return count

    @property
    def _most(self) -> str:
        """Return the part of an error message that states the limit on the job's size and the remedy."""
        if self.most == self.max_workers:
            return f"at most {counted(self.most, 'worker')} by -msrun-size; request fewer"
        if self.is_several:
            return f"at most {self.max_workers} workers in a job; request fewer"
        return f"at most {self.max_workers} workers per host; add hosts with -H"

    def _check_each(self, workers: Mapping[str, int]) -> None:
        if not self.is_several:
            return  # a single host has no limit of its own; only the job's limit applies
        for name, count in workers.items():
            if count > MAX_WORKERS_OF_EACH:
                raise HostError(
                    f"{count} workers on {name}: at most {MAX_WORKERS_OF_EACH} per host in a job with several hosts; "
                    "add hosts with -H"
                )

    def check(
        self,
        cluster: Cluster,
        members: Sequence[PeerID],
        ended: Collection[PeerID] = (),
        going: Collection[PeerID] = (),
    ) -> None:
        """Check that these hosts can run `cluster`, and that a living member would keep the training state.

        Args:
            cluster: the cluster to check. Its writer may list workers in `ended` and `going` on removed or leaving
                hosts, because the writer might not know yet that these workers end.
            members: the living members. If there are none, there is no training state to keep.
            ended: the workers that have exited.
            going: the workers that leave together with their host.

        Raises:
            HostError: the hosts can't run `cluster`, or no member would keep the training state.
        """
        strangers = [str(w) for w in cluster.workers if w.host not in self.names]
        if strangers:
            raise HostError(
                f"worker {strangers[0]} is on a host that isn't in the job: the hosts are {','.join(self.names)}"
            )
        for worker in cluster.workers:
            if worker.host in self.lost and worker not in ended:
                raise HostError(f"worker {worker} is on host {worker.host}, which is lost; remove the worker")
            if worker.host in self.leaving and worker not in going and worker not in ended:
                raise HostError(
                    f"worker {worker} is on host {worker.host}, which is leaving the job; remove the worker"
                )
        on_each = Counter(worker.host for worker in cluster.workers)
        for name, count in on_each.items():
            slots = self.named(name).slots
            if slots is not None and count > slots:
                if self.is_several:  # a host that has joined isn't in `-H`, and has its own number of slots
                    raise HostError(
                        f"{counted(count, 'worker')} on {name}: that host has {counted(slots, 'slot')}; request fewer"
                    )
                raise HostError(f"{count} workers: -H {self} has {counted(slots, 'slot')}; request fewer")
        for worker in cluster.workers:
            if self.ports is not None and worker.port not in self.ports:
                ports = f"-port-range {self.ports[0]}-{self.ports[-1]}"
                raise HostError(
                    f"worker {worker} has a port outside of {ports}, but --msrun requires a port in this range"
                )
        if cluster.size > self.max_workers:
            raise HostError(f"{cluster.size} workers: {self._most}")
        self._check_each(on_each)
        if members and not set(cluster.workers) & set(members):
            raise HostError(
                "the new cluster keeps none of the present workers, so the training state would be lost; keep one of "
                + ", ".join(map(str, members[:8]))
            )


def parse_ports(text: str) -> range:
    """Return the ports that the value of ``-port-range`` specifies."""
    try:
        return env.port_range(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of ports; write it like 10000-11000") from None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``-H host[:slots[:public address]],...``. As in KungFu, the default is one slot."""
    return _checked([_parse_host(entry) for entry in text.split(",") if entry] or [_parse_host(text)])


def _parse_host(text: str) -> Host:
    # An IPv6 address contains colons, so it requires brackets.
    parts = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([^:]*)(?::(\[[^]]*\]|[^:]*))?)?", text)
    if parts is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not host:slots, e.g. 10.0.0.1:4; write an IPv6 address in brackets, [fd00::1]:4"
        )
    name, slots, public = parts[1], parts[2], parts[3]
    if slots is not None and not _is_count(slots):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not host:slots: {slots!r} is not a number of slots; write it like 127.0.0.1:4"
        )
    return Host(_name(name), 1 if slots is None else int(slots), _name(public) if public is not None else "")


def _is_count(text: str) -> bool:
    return re.fullmatch("[0-9]{1,8}", text) is not None


def _name(text: str) -> str:
    """Return a name or address in its normal form, which is the same on all hosts. Names become lower case."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(bare)
        if "%" in bare:  # an IPv6 scope names a network interface, so it is valid on one machine only
            raise ValueError(bare)
    except ValueError:
        if bare == text and _NAME.fullmatch(text) and not re.fullmatch(r"[0-9.]+", text):
            return text.lower()
        user, at, host = text.rpartition("@")
        if at:
            what = f"contains a user name; write {host}, and give kungfu-distribute -u {user}"
            raise argparse.ArgumentTypeError(f"{text!r} {what}") from None
        raise argparse.ArgumentTypeError(f"{text!r} is neither a host name nor an IP address") from None
    return f"[{address}]" if address.version == 6 else str(address)


def _checked(hosts: Sequence[Host]) -> tuple[Host, ...]:
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise argparse.ArgumentTypeError(f"{name} is listed {count} times; list it once with all its slots")
    return tuple(hosts)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read ``-hostfile`` in KungFu's format. A line describes one host: ``10.0.0.1 slots=4 public_addr=h # note``."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path} is not text in UTF-8") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        try:
            hosts += [_parse_line(words)] if words else []
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise argparse.ArgumentTypeError(f"{path} contains no host; write lines like 10.0.0.1 slots=4")
    return _checked(hosts)


def _parse_line(words: Sequence[str]) -> Host:
    host = Host(_name(words[0]), 1)
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "slots" and _is_count(value):
            host = replace_fields(host, slots=int(value))
        elif key == "public_addr" and value:
            host = replace_fields(host, public=_name(value))
        else:
            raise argparse.ArgumentTypeError(f"{word!r} is neither slots=NUMBER nor public_addr=ADDRESS")
    return host


def identify(hosts: Sequence[Host], own: str | None, interface: str | None) -> str:
    """Return the name of the host in `hosts` that is this machine.

    ``-self`` names this host, or ``-nic`` names a network interface with the host's address. Without these flags, the
    result is the only host whose address this machine can bind.

    Raises:
        HostError: no host or more than one host matches, or the other hosts can't reach the matching address.
    """
    addresses = _resolved(hosts)
    name = _identified(addresses, own, interface)
    if all(map(network.is_loopback, addresses[name])) and not network.is_loopback(name):
        if len(hosts) > 1:  # e.g. on Debian, /etc/hosts maps the machine's own name to a loopback address
            raise HostError(
                f"{name} is {addresses[name][0]} on this machine, which other hosts can't reach; write another "
                f"address in -H, "
                "or correct /etc/hosts"
            )
    return name


def _identified(addresses: dict[str, list[str]], own: str | None, interface: str | None) -> str:
    listed = ",".join(addresses)
    if own is not None:
        try:
            name = _name(own)
        except argparse.ArgumentTypeError as error:
            raise HostError(f"-self: {error}") from None
        mine = [name] if name in addresses else _with_any(addresses, network.addresses_of(name.strip("[]")))
        if not mine:
            raise HostError(f"-self {own} is not one of the hosts {listed}; give one of them")
        if not any(map(network.is_of_this_machine, addresses[mine[0]])):
            raise HostError(f"-self {own} is not an address of this machine")
        return _the_one(mine, f"-self {own}")
    if interface is not None:
        found = of_interface(interface)
        mine = _with_any(addresses, found)
        if not mine:
            raise HostError(f"-nic {interface}: none of its addresses ({', '.join(found)}) is among the hosts {listed}")
        return _the_one(mine, f"-nic {interface}")
    mine = [name for name, known in addresses.items() if any(map(network.is_of_this_machine, known))]
    if not mine:
        raise HostError(f"this machine has none of the addresses of the hosts {listed}; correct -H")
    return _the_one(mine, "this machine")


def of_interface(interface: str) -> list[str]:
    """Return the addresses of the network interface that ``-nic`` names. The list is never empty."""
    found = network.addresses_of_interface(interface)
    if not found:
        there = network.interfaces()
        if interface in there:
            raise HostError(f"-nic {interface} has no address")
        raise HostError(f"-nic {interface}: this machine has no such interface; its interfaces are {', '.join(there)}")
    return found


def _with_any(addresses: dict[str, list[str]], given: Iterable[str]) -> list[str]:
    wanted = {*given}
    return [name for name, known in addresses.items() if wanted & {*known}]


def _the_one(mine: Sequence[str], what: str) -> str:
    if len(mine) > 1:
        raise HostError(f"{what} matches several hosts: {' and '.join(mine)}; select one with -self")
    return mine[0]


def _looked_up(hosts: Sequence[Host]) -> dict[str, list[str]]:
    """Return the addresses of each host. Look up unknown names again until the join timeout has passed.

    Kubernetes and clouds publish a machine's name a few seconds after the machine has started.
    """
    limit_s = env.JOIN_TIMEOUT.get()
    until, is_told = run_time() + limit_s, False
    while True:
        addresses = {host.name: network.addresses_of(host.address) for host in hosts}
        unknown = [name for name, known in addresses.items() if not known]
        if not unknown:
            return addresses
        if run_time() >= until:
            raise HostError(
                f"the name of host {unknown[0]} could not be resolved within {limit_s:g} s (KUNGFU_JOIN_TIMEOUT); "
                "write its address in -H, or add the name to the name service"
            )
        if not is_told:
            is_told = True
            _log.warning("host name unknown: hosts=%s action=retry limit_s=%g", ",".join(unknown), limit_s)
        time.sleep(_LOOK_UP_AGAIN_S)


def _resolved(hosts: Sequence[Host]) -> dict[str, list[str]]:
    addresses = _looked_up(hosts)
    loopback = [host.name for host in hosts if network.is_loopback(host.address)]
    if loopback and len(loopback) < len(hosts):
        raise HostError(f"{loopback[0]} is a loopback address; write the address at which other hosts reach it")
    for host, other in itertools.combinations(addresses, 2):
        if {*addresses[host]} & {*addresses[other]}:
            raise HostError(f"{host} and {other} resolve to the same machine; list it once")
    return addresses
