"""Define what both controller and agents use for the shared memory of versions and for requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ms_kungfu.launcher.wire import messages as m

MAKE_S = 20.0  # time limit for making all connections of a version; after this time the launcher tries again
Progress = tuple[int, float, float]  # the last training step, seconds per step (0: unknown), seconds since that step


class Asker(Protocol):
    """A worker's request that is waiting for an answer."""

    def send(self, message: m.FromBroker, fds: Sequence[int] = ()) -> None:
        """Send the answer. The caller still owns `fds`."""

    def end(self) -> None:
        """End the request without an answer."""
