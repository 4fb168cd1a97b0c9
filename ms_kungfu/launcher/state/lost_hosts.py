"""Decide when a host counts as lost.

This module uses no clock and no I/O.

The controller may declare a host lost if the host's *lease* has expired. Correctness doesn't depend on clocks: a host
that was declared lost may still be running, but what it does has no effect on the other hosts (docs/recovery.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

_MAX_PERIOD_S = 0.5


class Leases:
    """Find the hosts that have been silent for `limit_s` seconds. The caller checks every `period_s` seconds.

    If a check is late, this process itself was stopped and may have unread messages. Then every host gets another
    `after_pause_s` seconds.
    """

    def __init__(self, limit_s: float, after_pause_s: float | None = None) -> None:
        self.period_s = min(_MAX_PERIOD_S, limit_s / 8)
        self._limit_s = limit_s
        self._after_pause_s = limit_s if after_pause_s is None else after_pause_s
        self._last_look: float | None = None
        self._not_before = 0.0  # the earliest time at which a lease may expire

    def run_out(self, now: float, heard: Mapping[str, float]) -> list[str]:
        """Return the hosts whose lease has expired. `heard`: the time of the last message from each host."""
        if self._last_look is not None and now - self._last_look > 3 * self.period_s:
            self._not_before = now + self._after_pause_s
        self._last_look = now
        return [host for host, when in heard.items() if now >= max(when + self._limit_s, self._not_before)]


def to_evict(
    apart: Iterable[tuple[str, str]], workers: Mapping[str, int], order: Sequence[str], head_node: str
) -> list[str]:
    """Return the smallest set of hosts to remove so that all other hosts reach each other.

    The set never contains the head node. Among sets of equal size, the function chooses the set with the fewest
    workers. If several sets have equally few workers, it chooses hosts that are later in `order`.

    Args:
        apart: pairs of hosts that don't reach each other.
        workers: the number of workers on each host.
        order: all hosts.
        head_node: the controller's host.
    """
    edges = {frozenset(pair) for pair in apart}
    unreachable = {other for edge in edges if head_node in edge for other in edge - {head_node}}
    edges = {edge for edge in edges if head_node not in edge and not edge & unreachable}
    place = {host: number for number, host in enumerate(order)}

    def rank(hosts: Collection[str]) -> tuple[int, int, list[int]]:
        return (
            len(hosts),
            sum(workers.get(host, 0) for host in hosts),
            sorted(-place[host] for host in hosts),
        )

    def fewest(left: set[frozenset[str]]) -> set[str]:
        """Return the smallest set of hosts without which none of the pairs in `left` remains.

        In each group of connected pairs, the set contains the host that occurs in the most pairs, or all hosts that
        this host can't reach.
        """
        if not left:
            return set()
        found: set[str] = set()
        for part in _parts(left):
            count = Counter(host for edge in part for host in edge)
            most = min(count, key=lambda host: (-count[host], place[host]))
            others = {host for edge in part if most in edge for host in edge - {most}}
            with_it = {most} | fewest({edge for edge in part if most not in edge})
            without = others | fewest({edge for edge in part if not edge & others})
            found |= min(with_it, without, key=rank)
        return found

    return sorted(unreachable | fewest(edges), key=place.__getitem__)


def _parts(edges: Collection[frozenset[str]]) -> list[set[frozenset[str]]]:
    """Split the pairs into groups, so that no host occurs in two groups."""
    parts: list[tuple[set[str], set[frozenset[str]]]] = []
    for edge in sorted(edges, key=sorted):
        hosts, own = set(edge), {edge}
        apart = []
        for known, inside in parts:
            if known & hosts:
                hosts |= known
                own |= inside
            else:
                apart.append((known, inside))
        parts = [*apart, (hosts, own)]
    return [inside for _, inside in parts]
