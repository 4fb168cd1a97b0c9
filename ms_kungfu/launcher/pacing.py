"""The TCP congestion control between hosts.

Systems use BBR for all connections because of the Internet. It sends by a timer, which costs more than it gains between
neighbouring hosts. An all-reduce of 16 MiB over two of them takes 20 ms with BBR, and 11 ms with CUBIC. A connection
that has begun with BBR stays timed under any later algorithm.

So each begins with CUBIC if the system would use BBR, and changes to BBR if the round trip is long. Any other choice of
the system stays, as does everything if the kernel has no CUBIC.
"""

from __future__ import annotations

import contextlib
import socket
import struct

FOR_FAR, FOR_NEAR = b"bbr", b"cubic"
NEAR_US = 2000
"""Round trip."""

_MIN_RTT = struct.Struct("148x I")  # in Linux's tcp_info, to which versions only append
_NAME_BYTES = 16


def pace_of(connection: socket.socket) -> bytes:
    """Return the name of a connection's algorithm."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")


def of_the_system() -> bytes:
    """Return the system's default algorithm."""
    with socket.socket() as fresh:
        return pace_of(fresh)


def begin_near(connection: socket.socket) -> None:
    """Begin with CUBIC. Call it before the socket is connected, or listens: accepted connections inherit it."""
    with contextlib.suppress(OSError):
        if pace_of(connection) == FOR_FAR:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FOR_NEAR)


def go_on_by_distance(connection: socket.socket) -> None:
    """Choose the algorithm by the round trip, after data has reached the other end and an answer has come."""
    with contextlib.suppress(OSError):
        if pace_of(connection) != FOR_NEAR or of_the_system() != FOR_FAR:
            return
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        if len(info) == _MIN_RTT.size and _MIN_RTT.unpack(info)[0] > NEAR_US:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FOR_FAR)
