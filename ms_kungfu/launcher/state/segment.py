"""What controller and agents know alike of the shared memory of versions, and of the requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ms_kungfu.launcher.wire import messages as m

MAKE_S = 20.0  # for all connections of a version; then the launcher tries again
Progress = tuple[int, float, float]  # a training's last step, seconds of one (0: not known), seconds since


class Asker(Protocol):
    """A worker's request that waits for its answer."""

    def send(self, message: m.FromBroker, fds: Sequence[int] = ()) -> None:
        """Send the answer. `fds` stay the caller's."""

    def end(self) -> None:
        """Give no answer."""
