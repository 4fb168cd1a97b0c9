"""Decide how many workers are prestarted, on which hosts, and when. Pure.

A prestarted worker is a standby until it gets a slot. A slot on a host is filled by a standby on that host, or by a new
process. There are two reasons to prestart workers, and one rule covers both:

- `-standby N`: N standbys, for any slot that needs a worker.
- Members that train with a schedule report the size that they want next (`Expected`). The resize then takes only the
  time of a state transfer, not the start of Python, MindSpore and its compiler. The report is a hint: no process waits
  for it, and a lost, repeated or outdated report only changes how early a worker starts. A hint is valid for one
  cluster version. If another version is desired, the hint starts no more workers. Existing standbys stay until the
  members report again, because that version may need them.

*Hosts.* Standbys run on the hosts to which a resize would assign the next workers (`next_slots`). If the cluster
changes, the standbys are replaced, because a standby on another host can't become the next worker.

*Cores.* Starting a process uses a core for some seconds. This slows down training on a machine without free cores. So
only a few processes start at the same time (`to_start`), and the next ones start when these are ready. A nice value
doesn't help. It only spreads the same seconds over a longer time, in which the resize may begin. Next to workers that
use their cores fully, a process with a nice value may never get ready. Without root the nice value can't be lowered
again when the standby becomes a worker (RLIMIT_NICE is 0).

*Memory.* A standby uses as much memory as a worker. A standby is started if there is memory for two workers, because
workers grow and a starting process hasn't allocated its memory yet. Only the host knows its memory, so its agent may
reject a start (`lack_of_memory`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ms_kungfu.cluster import Cluster, next_host

_PART_OF_THE_CORES = 4


@dataclass(frozen=True)
class Expected:
    """The members of cluster `version` want `size` workers next, of which `newcomers` are new."""

    version: int = -1
    newcomers: int = 0
    size: int = 0


def next_slots(cluster: Cluster, count: int) -> list[str]:
    """Return the host of each of the next `count` workers, in the order of `Cluster.resized`.

    If all slots are taken, the next worker will replace a worker that fails, and it is unknown on which host. So the
    remaining entries go to each host with slots in turn.
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
    """Return how many expected workers may start at once on a host with `cores` cores, of which `idle` are unused."""
    return max(1, cores // _PART_OF_THE_CORES, idle)


def to_start(kept: int, expected: int, ready: int, starting: int, at_once: int) -> tuple[int, int]:
    """Return how many standbys a host starts now: (standbys of ``-standby``, standbys for expected workers).

    Args:
        kept: the number of standbys that the host always has (``-standby``). They count as part of `expected`.
        ready, starting: the numbers of standbys that the host has in each state.
        at_once: the number of standbys that may start at the same time.
    """
    present = ready + starting
    first = max(0, kept - present)
    return first, max(0, min(expected - present - first, at_once - starting - first))


def lack_of_memory(workers: int, free_bytes: float, worker_bytes: float) -> str:
    """Return why `workers` workers don't fit, or "" if they fit. `worker_bytes`: bytes per worker, 0 if unknown."""
    if workers * worker_bytes <= free_bytes:
        return ""
    free, each = (int(number / 2**20) for number in (free_bytes, worker_bytes))
    return f"free_mib={free} worker_mib={each}"
