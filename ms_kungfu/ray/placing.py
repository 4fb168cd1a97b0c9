"""Decide on the Ray nodes for the workers, the number of workers on each node, and the hosts' names.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4
_MOST_LOOPBACK = 2**16


@dataclass(frozen=True)
class Node:
    """A Ray node. `free`: the node's free resources. `leaves`: whether Ray is about to remove the node."""

    id: str
    address: str
    free: Mapping[str, float] = field(default_factory=dict)
    leaves: bool = False

    def room(self, needs: Mapping[str, float]) -> int:
        """Return how many workers fit on the node if each requires the resources `needs`."""
        if self.leaves:
            return 0
        return min(math.floor(self.free.get(name, 0.0) / count + _ROUNDING) for name, count in needs.items())


def deal(nodes: Iterable[Node], needs: Mapping[str, float], most: int) -> dict[str, int]:
    """Return the number of workers on each node, by node ID. The total is at most `most`.

    Nodes on which more workers fit come first, because a few nodes with many workers are better than many nodes with
    few workers.
    """
    dealt: dict[str, int] = {}
    for node in sorted(nodes, key=lambda node: -node.room(needs)):
        count = min(node.room(needs), most - sum(dealt.values()))
        if count:
            dealt[node.id] = count
    return dealt


class Names:
    """Choose the hosts' names. Normally, a host's name is the address of its node.

    Nodes with the same address are raylets on one machine, as in Ray's own tests. If all nodes have the same address,
    each host gets its own loopback address (127.0.0.0/8), like hosts that are simulated on one machine (``-self``). If
    only some nodes share an address, the first of these becomes a host, and the others don't take part in the job.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        """Choose the kind of names. `nodes`: the nodes on which the job may begin."""
        self._machine = ""  # the address of the machine that simulates all hosts
        if len({node.address for node in nodes}) == 1 and (len(nodes) > 1 or _is_loopback(nodes[0].address)):
            self._machine = nodes[0].address
        self._given = 0

    def name(self, node: Node, taken: Collection[str]) -> str | None:
        """Return the name of a new host; None if the node can't be a host in this job.

        `taken`: the names of the current hosts.
        """
        if self._machine:
            if node.address != self._machine or self._given >= _MOST_LOOPBACK:
                return None
            name = f"127.0.{self._given // 250}.{self._given % 250 + 1}"
            self._given += 1  # the name of a removed host isn't used again, because the job may still use it
            return name
        name = f"[{node.address}]" if ":" in node.address else node.address
        return None if name in taken or _is_loopback(node.address) else name


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


@dataclass(frozen=True)
class Words:
    """The names for messages: the flags of kungfu-run, or the arguments of `ms_kungfu.ray.run`."""

    size: str
    least: str
    address: str
    wait: str
    for_example: str
    for_a_new_one: str


FLAGS = Words("-np ", "-min-np ", "-address ", "-wait", "-wait 10m", "-address local")
ARGUMENTS = Words("num_workers=", "num_workers=", "address=", "wait_s", "wait_s=600", 'address="local"')


def too_small(
    nodes: Sequence[Node],
    needs: Mapping[str, float],
    size: int,
    least: int,
    waited_s: float,
    address: str,
    is_found: bool,
    words: Words = FLAGS,
) -> str:
    """Return the message that the cluster is too small for `size` workers, or for the minimum of `least` workers.

    `is_found`: whether the user hasn't named the cluster at `address`, and so might not know about that cluster.
    """
    room = sum(node.room(needs) for node in nodes)
    each = " and ".join(f"{count:g} {name}" for name, count in needs.items())
    free: Counter[str] = Counter()
    for node in nodes:
        free.update({name: node.free.get(name, 0.0) for name in needs})
    has = " and ".join(f"{free[name]:g} {name}" for name in needs)
    waited = f" after {waited_s:g} s" if waited_s else ""
    what = words.least if least < size else words.size
    found = (
        f"; this cluster was found running on this machine: {words.for_a_new_one} starts a new cluster for "
        "this job only"
        if is_found
        else ""
    )
    return (
        f"{what}{least} is more than the {room} worker{'' if room == 1 else 's'} that fit on the Ray cluster at "
        f"{address}{waited}: its {'1 node has' if len(nodes) == 1 else f'{len(nodes)} nodes have'} {has} free, and a "
        f"worker requires {each}; request a smaller {what.strip(' =')}, add nodes, or let it wait for some "
        f"({words.for_example}){found}"
    )
