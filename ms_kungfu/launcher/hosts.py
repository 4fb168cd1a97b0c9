"""Hosts, slots and ports: from ``-H`` and ``-port-range`` to the first cluster, and what this host may be asked for."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ms_kungfu import env
from ms_kungfu.cluster import MAX_WORKERS, Cluster, PeerID

MANY_PER_CORE = 4  # workers, before a resize looks like a mistake
DEFAULT_HOST = "127.0.0.1"


class HostError(ValueError):
    """The hosts don't give what is asked for; the message is a sentence for the user."""


@dataclass(frozen=True)
class Host:
    """This host as the workers' addresses name it. `slots` None: as many workers as are asked for, and have room."""

    name: str = DEFAULT_HOST
    slots: int | None = None
    max_workers: int = MAX_WORKERS

    @property
    def limit(self) -> str | None:
        """As KUNGFU_HOSTS has it."""
        return None if self.slots is None else f"{self.name}:{self.slots}"

    @property
    def slots_by_host(self) -> dict[str, int] | None:
        return None if self.slots is None else {self.name: self.slots}

    def has_room(self, size: int) -> bool:
        """For so many workers."""
        return size <= (self.max_workers if self.slots is None else min(self.slots, self.max_workers))

    def first_cluster(self, size: int, ports: range, runner_port: int, version: int) -> Cluster:
        """The cluster a job starts with. HostError where there is no room for it."""
        if self.slots is not None and size > self.slots:
            raise HostError(
                f"-np {size} is more than the {self.slots} slots of -H {self.limit}; ask for fewer workers or give "
                "the host more slots"
            )
        if size > self.max_workers:
            raise HostError(f"-np {size} is more than the {self.max_workers} workers that one host can have")
        if size > len(ports):
            raise HostError(f"-port-range {ports[0]}-{ports[-1]} is too small for {size} workers; give a larger one")
        workers = tuple(PeerID(self.name, port) for port in ports[:size])
        return Cluster(workers, (PeerID(self.name, runner_port),), version)

    def check(self, cluster: Cluster, members: Sequence[PeerID]) -> None:
        """HostError where this host can't run `cluster`, or none of the living `members` would be left to hand over
        their state; without members there is none."""
        strangers = [str(w) for w in cluster.workers if w.host != self.name]
        if strangers:
            raise HostError(f"worker {strangers[0]} is not on {self.name}: this job has one host only so far")
        if self.slots is not None and cluster.size > self.slots:
            raise HostError(f"{cluster.size} workers are more than the {self.slots} slots that -H {self.limit} gives")
        if cluster.size > self.max_workers:
            raise HostError(f"{cluster.size} workers are more than the {self.max_workers} that one host can have")
        if members and not set(cluster.workers) & set(members):
            raise HostError(
                "the new cluster keeps none of the present workers, so their state would be lost; keep one of "
                + ", ".join(map(str, members[:8]))
            )


def parse_ports(text: str) -> range:
    """``-port-range``."""
    try:
        return env.port_range(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of ports; write it like 10000-11000") from None


def parse_hosts(text: str) -> Host:
    """``-H host[:slots[:public address]]``. As with KungFu, a host without slots has one."""
    entries = [entry for entry in text.split(",") if entry]
    if len(entries) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one host:slots; one host only so far")
    name, *rest = entries[0].split(":")
    slots = rest[0] if rest else "1"
    if not name or len(rest) > 2 or not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:slots, e.g. 127.0.0.1:4")
    if not _is_this_host(name):
        raise argparse.ArgumentTypeError(f"{name} is not this machine; one host only so far")
    return Host(name, int(slots))


def _is_this_host(name: str) -> bool:
    """Whether one of the addresses of `name` is ours: only such can be bound."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
