"""The interface of a cluster version's shared memory, as the controller uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.wire import messages as m

MAKE_S = 20.0  # for all connections of a version; then the launcher tries again
Progress = tuple[int, float, float]  # a training's last step, seconds of one (0: not known), seconds since


class NotMadeYet(Exception):
    """The segment is being made, on other hosts too; its maker then calls `Broker.prepare`."""


class Asker(Protocol):
    """A worker's request that waits for its answer."""

    def send(self, message: m.FromBroker, fds: Sequence[int] = ()) -> None:
        """Send the answer. `fds` stay the caller's."""

    def end(self) -> None:
        """Give no answer."""


class Segment(Protocol):
    """The shared memory of a cluster version, as the launcher holds it."""

    def check_made(self) -> None:
        """Raise `NotMadeYet`, or why the runtime or the kernel of one of its hosts can't make it."""

    def hand_over(self, asker: Asker, message: m.Slot, rank: int) -> None:
        """Send `message`, and what `rank` needs to join, to the process that has this rank."""

    def announce(self, version: int) -> None: ...
    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None: ...

    def lose_host(self, host: str) -> None:
        """Let the members continue without this host; all of its ranks have been marked lost."""

    def heartbeat(self, rank: int) -> int: ...
    def gave_up(self, rank: int) -> str: ...
    def progress(self, rank: int) -> Progress | None: ...

    def awaited(self) -> Sequence[tuple[int | str, int | str, bool]]:
        """Return (rank, rank that it sleeps for, whether it is about to give up) for each sleeper.

        Over several hosts a host's name stands for its inter-host transport.
        """

    def set_ending(self, rank: int, ending: bool) -> None:
        """Note that `rank` is about to be ended, or isn't after all: meanwhile those that wait for it don't give up."""

    def close(self) -> None: ...


MakeSegment = Callable[[Cluster, bool], Segment]  # whether members outlive others
