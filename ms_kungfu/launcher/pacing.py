"""Choose the algorithm for TCP congestion control between hosts.

Some systems use BBR for all connections, because it suits the Internet. BBR sends data by a timer, which costs more
than it gains between neighbouring hosts. An all-reduce of 16 MiB over two hosts takes 20 ms with BBR, and 11 ms with
CUBIC. A connection that has begun with BBR keeps the timer even after a change to another algorithm.

So if the system's default is BBR, each connection begins with CUBIC, and changes to BBR if its round trip is long. Any
other default stays in use. If the kernel has no CUBIC, nothing is changed.
"""

from __future__ import annotations

import contextlib
import socket
import struct

FOR_FAR, FOR_NEAR = b"bbr", b"cubic"
NEAR_US = 2000
"""The longest round-trip time, in microseconds, at which a host counts as near."""

_MIN_RTT = struct.Struct("148x I")  # offset in Linux's tcp_info; new kernel versions only append fields
_NAME_BYTES = 16


def pace_of(connection: socket.socket) -> bytes:
    """Return the name of a connection's congestion control algorithm."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")


def of_the_system() -> bytes:
    """Return the system's default congestion control algorithm."""
    with socket.socket() as fresh:
        return pace_of(fresh)


def begin_near(connection: socket.socket) -> None:
    """Begin with CUBIC if the system's default is BBR.

    Call this before the socket connects or listens. Accepted connections inherit the algorithm.
    """
    with contextlib.suppress(OSError):
        if pace_of(connection) == FOR_FAR:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FOR_NEAR)


def go_on_by_distance(connection: socket.socket) -> None:
    """Choose the algorithm by the round-trip time. Call this after data has been sent and an answer has arrived."""
    with contextlib.suppress(OSError):
        if pace_of(connection) != FOR_NEAR or of_the_system() != FOR_FAR:
            return
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        if len(info) == _MIN_RTT.size and _MIN_RTT.unpack(info)[0] > NEAR_US:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FOR_FAR)
