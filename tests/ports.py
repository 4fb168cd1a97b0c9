"""Ports that are free for a server of a test, and stay so while it is stopped and started again."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_FIRST = 20000
_random = random.SystemRandom()  # several tests look at a time


def free_port(*addresses: str) -> int:
    """A port that was free a moment ago, at each of the addresses (127.0.0.1).

    It is none that the system gives to connections that go out: one of these could have it when a server binds it, or
    binds it again.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if end <= _FIRST:
        raise RuntimeError(f"net.ipv4.ip_local_port_range begins at {end}: no ports are left for servers of tests")
    while True:
        port = _random.randrange(_FIRST, end)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # another program has it at one of them
            for address in addresses or ("127.0.0.1",):
                stack.enter_context(socket.socket()).bind((address, port))
            return port


def free_ports(count: int) -> list[int]:
    """So many different ones, at 127.0.0.1."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [*ports]
