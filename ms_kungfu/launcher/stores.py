"""The workers' model stores, which the broker keeps for whoever asks on this host, and for the host's link, by which
other hosts ask: descriptors that can only read."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable

from ms_kungfu.broker_protocol import close_all
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.segments import Asker
from ms_kungfu.launcher.wire.codec import ProtocolError

_Process = tuple[PeerID, int]  # a peer ID and the version that the process was started for


class Stores:
    """Thread-safe. Owns the descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[_Process, int] = {}

    def serve(self, connection: Asker, message: dict[str, Any], is_out: Callable[[PeerID, int], bool]) -> None:
        """Answers a request: ``{"store": "put", "peer", "incarnation"}``, after which the descriptor comes with a
        message of its own, or ``{"store": "get", "peer"}``."""
        peer = PeerID.parse(message.get("peer"))
        if message.get("store") == "get":
            fd = self.find(peer)
            found = [] if fd < 0 else [fd]
            try:
                connection.send({"store": bool(found)}, tuple(found))
            finally:
                close_all(found)
            return
        incarnation = message.get("incarnation")
        if message.get("store") != "put" or not isinstance(incarnation, int):
            raise ProtocolError("a request to the stores is a put with an incarnation, or a get")
        _, fds = connection.receive_with_fds()
        if len(fds) != 1:
            close_all(fds)
            raise ProtocolError(f"a store is one descriptor, got {len(fds)}")
        if is_out(peer, incarnation):
            os.close(fds[0])
            connection.send({"error": f"{peer} is no member any more"})
            return
        with self._lock:
            before = self._fds.get((peer, incarnation))
            self._fds[peer, incarnation] = fds[0]
        if before is not None:
            os.close(before)
        connection.send({"store": True})

    def find(self, peer: PeerID) -> int:
        """A copy of the descriptor, which is the caller's; -1 where there is none."""
        with self._lock:
            found = [process for process in self._fds if process[0] == peer]
            return os.dup(self._fds[max(found, key=lambda process: process[1])]) if found else -1

    def drop(self, gone: Callable[[PeerID, int], bool]) -> None:
        """Closes those of processes that are gone."""
        with self._lock:
            close_all([self._fds.pop(process) for process in list(self._fds) if gone(*process)])
