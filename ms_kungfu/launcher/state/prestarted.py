"""How many workers are prestarted, on which hosts, and when. Pure.

A prestarted worker is a standby until it gets a slot. A slot on a host is filled by a standby of that host, or by a new
process. There are two reasons to prestart workers, with one rule for both:

- `-standby N`: N standbys, for any slot that needs a worker.
- Members that train by a schedule report the size that they want next (`Expected`). So an expected entry costs a state
  transfer instead of a start of Python, MindSpore and its compiler. The report is a hint: no process waits for it, and
  a lost, repeated or outdated one only changes how early a worker starts. It holds for one cluster version. If another
  version is desired the hint starts no more workers. The standbys stay, since that version may need them, until the
  members report again.

*Hosts.* Standbys are on the hosts that a resize would give the next workers to (`next_slots`). If the cluster changes
they are moved: a standby on another host is of no use to the next worker.

*Cores.* A start takes some seconds of a core, on a full machine from training. So few start at a time (`to_start`), and
the next ones once these are ready. A nice value is no remedy. It spreads the same seconds over a longer time, in which
the entry may come. A nice process may never get ready beside workers that use their cores wholly. Without root it can't
be taken back when the standby becomes a worker (RLIMIT_NICE is 0).

*Memory.* A standby takes what a worker takes. It is started if there is memory for two, since workers grow. One that is
starting hasn't taken its memory yet. Only the host knows its memory, so its agent refuses a start (`lack_of_memory`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ms_kungfu.cluster import Cluster, next_host

_PART_OF_THE_CORES = 4


@dataclass(frozen=True)
class Expected:
    """The members of cluster `version` want `size` workers next, `newcomers` of which are new."""

    version: int = -1
    newcomers: int = 0
    size: int = 0


def next_slots(cluster: Cluster, count: int) -> list[str]:
    """Return the host of each of the next `count` workers, as `Cluster.resized` places them.

    Once all slots are taken the next worker is a replacement, on whichever host a worker fails. So the rest goes to
    each host with slots in turn.
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
    """Return how many expected workers may start at a time on a host with so many `cores`, `idle` of them unused."""
    return max(1, cores // _PART_OF_THE_CORES, idle)


def to_start(kept: int, expected: int, ready: int, starting: int, at_once: int) -> tuple[int, int]:
    """Return how many standbys a host starts now: as many as it is to have, as far as there is memory.

    Args:
        kept: how many it has at any time (``-standby``). They count among those that are `expected`.
        ready, starting: those that it has.
        at_once: how many may start at a time.
    """
    present = ready + starting
    first = max(0, kept - present)
    return first, max(0, min(expected - present - first, at_once - starting - first))


def lack_of_memory(workers: int, free_bytes: float, worker_bytes: float) -> str:
    """Return why so many `workers` don't fit, "" if they do. `worker_bytes`: of one, 0 if that isn't known."""
    if workers * worker_bytes <= free_bytes:
        return ""
    free, each = (int(number / 2**20) for number in (free_bytes, worker_bytes))
    return f"free_mib={free} worker_mib={each}"
