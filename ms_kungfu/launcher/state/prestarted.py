"""Decide how many workers are prestarted, on which hosts, and when. This module uses no clock and no I/O.

A prestarted worker is a standby until it gets a slot. A slot on a host goes to a standby on that host, or to a new
process. Workers are prestarted for two reasons, and the same rules apply to both:

- `-standby N` keeps N standbys for any slot that needs a worker.
- Members that train with a schedule report the size that they want next (`Expected`). With standbys, the resize takes
  only as long as a state transfer, and doesn't wait for Python, MindSpore and its compiler to start. The report is a
  hint: no process waits for it, and a lost, repeated or outdated report only changes how early a worker starts. A hint
  is valid for one cluster version. If another version is desired, the hint starts no more workers. Existing standbys
  stay until the members report again, because the other version may need them.

*Hosts.* Standbys run on the hosts to which a resize would assign the next workers (`next_slots`). If these hosts
change together with the cluster, the standbys are replaced.

*Cores.* A process that starts uses a core for a few seconds. This slows down training on a machine without free cores.
So only a few processes start at the same time (`to_start`), and the next ones start when these are ready. A nice value
doesn't help: the process then only starts more slowly, and the resize may begin before the process is ready. If the
workers use all cores, a process with a nice value may never be ready. Without root, the nice value can't be lowered
again when the standby becomes a worker (RLIMIT_NICE is 0).

*Memory.* A standby uses as much memory as a worker. A standby starts only if the host has memory for two workers,
because workers grow, and a starting process hasn't allocated its memory yet. Only the host knows how much memory it
has, so the host's agent may reject a start (`lack_of_memory`).
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from ms_kungfu.cluster import Cluster, next_host

_PART_OF_THE_CORES = 4


class Expected(Struct, frozen=True):
    """The members of cluster `version` want `size` workers next; `newcomers` of these workers are new."""

    version: int = -1
    newcomers: int = 0
    size: int = 0


def next_slots(cluster: Cluster, count: int) -> list[str]:
    """Return the host of each of the next `count` workers, in the order in which `Cluster.resized` assigns them.

    If all slots are taken, the next worker can only replace a failed worker, whose host isn't known in advance. So the
    remaining entries are distributed evenly over the hosts with slots.
    """
    present = Counter(worker.host for worker in cluster.workers)
    slots = cluster.slots
    hosts = list(cluster.hosts) if slots is None else [host for host, number in slots.items() if number]
    found: list[str] = []
    for _ in range(count if hosts else 0):
        if slots is None or any(present[host] < slots[host] for host in hosts):
            host = next_host(present, hosts, slots, cluster.placement)
        else:
            host = min(hosts, key=found.count)
        present[host] += 1
        found.append(host)
    return found


def start_at_once(cores: int, idle: int) -> int:
    """Return how many expected workers may start at the same time on a host.

    `idle`: how many of the host's `cores` cores are unused.
    """
    return max(1, cores // _PART_OF_THE_CORES, idle)


def to_start(kept: int, expected: int, ready: int, starting: int, at_once: int) -> tuple[int, int]:
    """Return how many standbys a host starts now, as (standbys for ``-standby``, standbys for expected workers).

    Args:
        kept: how many standbys the host always has because of ``-standby``.
        expected: how many standbys the host should have in total, including the `kept` ones.
        ready: how many standbys of the host are ready.
        starting: how many standbys of the host are starting.
        at_once: how many standbys for expected workers may start at the same time.
    """
    present = ready + starting
    first = max(0, kept - present)
    return first, max(0, min(expected - present - first, at_once - starting - first))


def lack_of_memory(workers: int, free_bytes: float, worker_bytes: float) -> str:
    """Return why `workers` workers don't fit into memory, or "" if they fit.

    `worker_bytes`: how much memory a worker uses; 0 if this is unknown.
    """
    if workers * worker_bytes <= free_bytes:
        return ""
    free, each = (int(number / 2**20) for number in (free_bytes, worker_bytes))
    return f"free_mib={free} worker_mib={each}"
