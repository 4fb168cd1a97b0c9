"""Define a cluster version: its workers in rank order, the runners of their hosts, and its number."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ms_kungfu._words import counted

WORKER_PORTS = range(10000, 11001)  # KungFu's default
# The maximum numbers of workers in a single-host job, in a job on several hosts, and on each of several hosts
# (ops_src/transport/shm/segment.h). The last limit is lower by one than the first, because a host's transport is also a
# member of the host's segment.
MAX_WORKERS = 256
MAX_WORKERS_OF_HOSTS = 1024
MAX_WORKERS_OF_EACH = MAX_WORKERS - 1
EVEN, FILL = PLACEMENTS = "even", "fill"
HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,253}")  # a host name or address; other characters could corrupt a log


@dataclass(frozen=True, order=True)
class PeerID:
    """The address of a worker or runner. The port identifies a slot; in single-host jobs, no process listens on it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: object) -> PeerID:
        """Parse a text such as ``"127.0.0.1:10000"``. Raise ValueError if it is invalid."""
        if not isinstance(text, str):
            raise ValueError(f"a peer is written as 'host:port', got {text!r}")
        host, _, port = text.rpartition(":")
        if not HOST.fullmatch(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"a peer is written as 'host:port' with a port from 1 to 65535, got {text!r}")
        return cls(host, int(port))


@dataclass(frozen=True)
class Cluster:
    """An ordered list of workers (index = rank), the runners of their hosts, and the version number."""

    workers: tuple[PeerID, ...]
    runners: tuple[PeerID, ...] = field(default=())
    version: int = 0
    # The name under which a process has written this version to the cluster store; "" if there is none.
    writer: str = field(default="", compare=False)
    # For a job on several hosts: the maximum number of workers on each host, and the placement of joining workers.
    slots: Mapping[str, int] | None = field(default=None, compare=False)
    placement: str = field(default=EVEN, compare=False)

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts with workers, ordered by the first rank on each host."""
        return tuple(dict.fromkeys(worker.host for worker in self.workers))

    @property
    def named_hosts(self) -> set[str]:
        """Return the hosts that belong to the job: those with workers, with runners or with slots."""
        return {*self.hosts, *(runner.host for runner in self.runners), *(self.slots or ())}

    @property
    def host_of_rank(self) -> list[int]:
        """Return the index in `hosts` of each rank's host."""
        place = {host: number for number, host in enumerate(self.hosts)}
        return [place[worker.host] for worker in self.workers]

    def rank_of(self, peer: PeerID) -> int | None:
        return self._ranks.get(peer)

    @functools.cached_property
    def _ranks(self) -> dict[PeerID, int]:
        """Return a dict from peer to rank.

        The launcher looks up each worker's rank once a second. If each look-up searched the list, this would take
        quadratic time.
        """
        return {peer: rank for rank, peer in enumerate(self.workers)}

    def resized(
        self,
        size: int,
        ports: Collection[int],
        without: Collection[PeerID] = (),
        slots: Mapping[str, int] | None = None,
    ) -> Cluster:
        """Return the next version with `size` workers. Workers in `without` leave first, then the highest ranks.

        A joining worker is placed on a host with a free slot: on the host with the fewest workers (the first of several
        such hosts) or, if `placement` is "fill", on the first host. The worker gets the lowest free port of its host.
        `slots` is the number of slots on each host; the default is the cluster's own `slots`. Raise ValueError if the
        hosts have too few slots or ports.
        """
        if size < 1:
            raise ValueError(f"a cluster has at least 1 worker, got size {size}")
        workers = [worker for worker in self.workers if worker not in without][:size]
        present = Counter(worker.host for worker in workers)
        slots = slots or self.slots
        hosts = list(slots or dict.fromkeys(worker.host for worker in self.workers))
        # The ports of leaving workers are not assigned, because a leaving worker may still be running.
        taken = {*self.workers}
        while len(workers) < size:
            if slots is not None and size > sum(slots.values()):
                room = counted(sum(slots.values()), "slot")
                raise ValueError(f"{size} workers: the job's hosts have {room}; request fewer workers, or add a host")
            host = next_host(present, hosts, slots, self.placement)
            free = (PeerID(host, port) for port in ports if PeerID(host, port) not in taken)
            joining = next(free, None)
            if joining is None:
                raise ValueError(f"{counted(size, 'worker')}: the port range is too small; give a larger -port-range")
            workers.append(joining)
            taken.add(joining)
            present[host] += 1
        return self.following(workers)

    def without(self, leaving: Collection[PeerID]) -> Cluster:
        """Return the next version without these workers. Raise ValueError if no worker would remain."""
        keep = tuple(worker for worker in self.workers if worker not in leaving)
        if not keep:
            raise ValueError(f"{self.workers[0]} can't leave: it is the last worker of the cluster")
        return self.following(keep)

    def following(self, workers: Iterable[PeerID]) -> Cluster:
        """Return the next version with exactly these workers."""
        return replace(self, workers=tuple(workers), version=self.version + 1, writer="")

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "Runners": [str(r) for r in self.runners],
            "Workers": [str(w) for w in self.workers],
            "Version": self.version,
        }
        if self.slots is not None:
            document["Slots"] = dict(self.slots)
        if self.placement != EVEN:
            document["Placement"] = self.placement
        return document

    def dumps(self) -> str:
        return json.dumps(self.to_json())

    @classmethod
    def from_json(cls, document: object, *, writer: str = "") -> Cluster:
        """Return the cluster that `document`, in KungFu's JSON format, describes. Raise ValueError if it is invalid."""
        if not isinstance(document, dict):
            raise ValueError(f"a cluster is a JSON object with Runners and Workers, got {type(document).__name__}")
        unknown = sorted(set(document) - {"Runners", "Workers", "Version", "Slots", "Placement"})
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; a cluster has Runners, Workers and Version")
        slots, placement = document.get("Slots"), document.get("Placement", EVEN)
        if slots is not None and not _are_slots(slots):
            raise ValueError(f"Slots must map each host to its maximum number of workers, got {slots!r}")
        if placement not in PLACEMENTS:
            raise ValueError(f"Placement must be {' or '.join(PLACEMENTS)}, got {placement!r}")
        peers: dict[str, tuple[PeerID, ...]] = {}
        for key in ("Runners", "Workers"):
            listed = document.get(key, [] if key == "Runners" else None)
            if not isinstance(listed, list):
                raise ValueError(f"{key} must be a list of 'host:port', got {listed!r}")
            if key == "Workers" and len(listed) > MAX_WORKERS_OF_HOSTS:
                raise ValueError(f'"Workers" has {len(listed)} entries; the limit is {MAX_WORKERS_OF_HOSTS}')
            peers[key] = tuple(PeerID.parse(p) for p in listed)
            if len(set(peers[key])) < len(listed):
                twice = next(peer for peer, count in Counter(peers[key]).items() if count > 1)
                raise ValueError(f'"{key}" contains {twice} twice')
        if not peers["Workers"]:
            raise ValueError("Workers is empty; a cluster has at least 1 worker")
        given = document.get("Version", 0)
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ValueError(f"Version must be a non-negative integer, got {given!r}")
        return cls(peers["Workers"], peers["Runners"], given, writer, slots, placement)


def _are_slots(slots: object) -> bool:
    return (
        isinstance(slots, dict)
        and bool(slots)
        and all(HOST.fullmatch(host) for host in slots)
        and all(type(count) is int and count >= 0 for count in slots.values())
    )


def next_host(present: Mapping[str, int], hosts: Iterable[str], slots: Mapping[str, int] | None, placement: str) -> str:
    """Return the host for the next worker. At least one host must have a free slot.

    `present`: the number of workers on each host.
    """
    free = [host for host in hosts if slots is None or present[host] < slots[host]]
    return free[0] if placement == FILL else min(free, key=present.__getitem__)


# Each write to the cluster store carries a signature that names the writer. The job's launcher signs with the job's
# name. The job's workers, and a launcher without running workers (-k), have signatures of their own. A writer
# outside the job uses the signature below to evict the workers that its cluster version doesn't contain.
WRITER_WHO_EVICTS = "evicts"


def writer_of_workers(job: str) -> str:
    return f"{job}workers"
