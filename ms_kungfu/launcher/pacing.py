"""How TCP paces what hosts send each other.

Systems that have BBR for all connections have it for the Internet's sake. It sends by a timer, which between hosts of
one room costs more than it gains: an all-reduce of 16 MiB over two of them takes 20 ms by it, and 11 by CUBIC. A
connection that has begun by BBR stays timed, whatever it goes by later. So each begins by CUBIC where the system would
take BBR, and goes over to that where the way turns out to be long. Any other choice of the system is left alone, and
where the kernel has no CUBIC all stays as it is.
"""

from __future__ import annotations

import contextlib
import socket
import struct

FOR_FAR, FOR_NEAR = b"bbr", b"cubic"
NEAR_US = 2000
"""There and back."""

_MIN_RTT = struct.Struct("148x I")  # in Linux's tcp_info, which only grows
_NAME_BYTES = 16


def pace_of(connection: socket.socket) -> bytes:
    """The name of the algorithm by which it goes."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")


def of_the_system() -> bytes:
    """That of connections about which nobody says anything."""
    with socket.socket() as fresh:
        return pace_of(fresh)


def begin_near(connection: socket.socket) -> None:
    """Before it is connected, or listens: those that it accepts begin likewise."""
    with contextlib.suppress(OSError):
        if pace_of(connection) == FOR_FAR:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FOR_NEAR)


def go_on_by_distance(connection: socket.socket) -> None:
    """When something has gone to the other end, and come back."""
    with contextlib.suppress(OSError):
        if pace_of(connection) != FOR_NEAR or of_the_system() != FOR_FAR:
            return
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        if len(info) == _MIN_RTT.size and _MIN_RTT.unpack(info)[0] > NEAR_US:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FOR_FAR)
