"""Define the types that the controller and the agents share to handle shared memory and workers' requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ms_kungfu.launcher.wire import messages as m

MAKE_S = 20.0  # time limit for all connections of a cluster version; the launcher tries again after this time
Progress = tuple[int, float, float]  # (last training step, seconds per step (0 if unknown), seconds since that step)


class Asker(Protocol):
    """A worker that is waiting for the answer to its request."""

    def send(self, message: m.FromBroker, fds: Sequence[int] = ()) -> None:
        """Send the answer. The caller still owns `fds`."""

    def end(self) -> None:
        """End the request without an answer."""
