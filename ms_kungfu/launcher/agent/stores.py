"""Keep the model stores of this host's workers, as read-only file descriptors.

Workers on this host use the descriptors to read each other's stores. Workers on other hosts read a store through this
host's inter-host transport, which also uses the descriptors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Callable

from ms_kungfu.broker_protocol import close_all
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.state.segment import Asker
from ms_kungfu.launcher.wire import messages as m

_Process = tuple[PeerID, int]  # the peer ID and the cluster version for which the process was started


class Stores:
    """Own the descriptors of the model stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[_Process, int] = {}

    def serve(
        self,
        asker: Asker,
        request: m.PutStore | m.GetStore,
        fds: Sequence[int],
        is_out: Callable[[PeerID, int], bool],
    ) -> None:
        """Answer a request. `fds` are the descriptors that came with the request, which this method owns now."""
        peer = PeerID.parse(request.peer)
        if isinstance(request, m.GetStore):
            close_all(fds)
            found = [fd for fd in (self.find(peer),) if fd >= 0]
            try:
                asker.send(m.Store(bool(found)), tuple(found))
            finally:
                close_all(found)
        elif len(fds) != 1 or is_out(peer, request.incarnation):
            close_all(fds)
            why = f"{peer} is no longer a member" if len(fds) == 1 else f"a store has one descriptor, got {len(fds)}"
            asker.send(m.Error(why))
        else:
            with self._lock:
                before = self._fds.pop((peer, request.incarnation), None)
                self._fds[peer, request.incarnation] = fds[0]
            close_all(() if before is None else (before,))
            asker.send(m.Store(True))

    def find(self, peer: PeerID) -> int:
        """Return a new descriptor, which the caller owns, of the store of `peer`; -1 if there is no store."""
        with self._lock:
            found = [process for process in self._fds if process[0] == peer]
            return os.dup(self._fds[max(found, key=lambda process: process[1])]) if found else -1

    def drop(self, has_exited: Callable[[PeerID, int], bool]) -> None:
        """Close the stores of exited processes."""
        with self._lock:
            close_all([self._fds.pop(process) for process in list(self._fds) if has_exited(*process)])
