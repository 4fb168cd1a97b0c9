"""Find the addresses of a name, and the addresses of this machine."""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

ADDRESS = r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]*):([0-9]{1,5})"
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 1024


def addresses_of(name: str) -> list[str]:
    """Return all addresses of a name. If `name` is an address, return only it. Return [] if `name` is unknown."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError, UnicodeError):
        for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            found[str(address[0])] = None
    return list(found)


def addresses_of_server(servers: Sequence[str]) -> set[str]:
    """Return the name and all addresses of the only host in `servers`.

    If a store has several servers, return an empty set, because none of them is preferred.
    """
    return {servers[0], *addresses_of(servers[0])} if len(servers) == 1 else set()


def is_of_this_machine(address: str) -> bool:
    """Return whether `address` belongs to this machine, so that a socket can be bound to it."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, bound in socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(bound)
                return True
    return False


def is_loopback(address: str) -> bool:
    """Return whether the address is a loopback address, which refers to the machine that uses it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def addresses_of_interface(interface: str) -> list[str]:
    """Return the addresses of a network interface, IPv4 addresses first. Leave out link-local IPv6 addresses."""
    return _ipv4_of(interface) + _ipv6_of(interface)


def _ipv4_of(interface: str) -> list[str]:
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        nbytes, _ = struct.unpack("iP", fcntl.ioctl(asking.fileno(), _SIOCGIFCONF, request))
    found = []
    for at in range(0, nbytes, _IFREQ_BYTES):
        name = buffer[at : at + 16].tobytes().partition(b"\0")[0]
        # "eth0:1" is a second address of eth0.
        if os.fsdecode(name).partition(":")[0] == interface:
            found.append(socket.inet_ntoa(buffer[at + 20 : at + 24].tobytes()))
    return found


def _ipv6_of(interface: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):  # the system may lack IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if name == interface and not address.is_link_local:
                found.append(str(address))
    return found


def known_address(text: str) -> str:
    """Return `text` as ADDR:PORT, with defaults for missing parts. Raises ArgumentTypeError if `text` is invalid."""
    found = re.fullmatch(ADDRESS, text or ":0")
    if found is None or int(found[2]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address and a port; write it like 127.0.0.1:8080")
    return f"{found[1] or '127.0.0.1'}:{int(found[2])}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address in the form ADDR:PORT (-dashboard)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
