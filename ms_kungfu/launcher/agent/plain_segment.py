"""A host's part of a cluster version: the interface, and the class for a version with all workers on one host."""

from __future__ import annotations

import os
from typing import Any, Callable, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.state.segment import Asker, Segment
from ms_kungfu.launcher.wire import messages as m


class HostSegment(Segment, Protocol):
    """One host's segment, plain or linked (`links`)."""

    def awaited(self) -> list[tuple[int, int, bool]]:
        """Return the waits of this host's ranks; -1 is its transport."""

    def ranks(self) -> list[int]: ...
    def failure(self) -> str: ...
    def sync_points(self) -> int: ...
    def request_sync_point(self, number: int) -> None: ...

    def hold_deadlines(self, held: bool) -> None:
        """Hold the deadlines of the host's ranks while `held`."""

    def unreachable(self) -> list[tuple[str, str]]: ...


def the_runtime() -> Any:
    """Return the module with shared memory, loaded late: a job without segments starts without it."""
    from ms_kungfu import _core

    return _core


class PlainSegment:
    """The segment of a version whose workers are all on this host.

    It has the descriptor, which `close` closes, and a mapping, which ends with the object.
    """

    def __init__(self, cluster: Cluster, cores: int, recovers: bool, runtime: Callable[[], Any] = the_runtime) -> None:
        self._size = cluster.size
        self.fd: int = runtime().create_segment(cluster.size, cluster.version, cores, recovers)
        try:
            control = runtime().SegmentControl(self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        self.mark_lost, self.announce = control.mark_lost, control.announce
        self.hold_deadlines = control.hold_deadlines
        self.heartbeat, self.gave_up, self.progress = control.heartbeat, control.gave_up, control.progress
        self.awaited, self.set_ending = control.awaited, control.set_ending

    def check_made(self) -> None:
        pass

    def hand_over(self, asker: Asker, message: m.Slot, rank: int) -> None:
        asker.send(message, (self.fd,))

    def lose_host(self, host: str) -> None:
        """Do nothing: there is no other host."""

    def unreachable(self) -> list[tuple[str, str]]:
        return []

    def ranks(self) -> list[int]:
        return list(range(self._size))

    def failure(self) -> str:
        """Return "": no connection can fail."""
        return ""

    def sync_points(self) -> int:
        """Return 0: there is no other host to notify."""
        return 0

    def request_sync_point(self, number: int) -> None:
        """Do nothing: no other host can request one."""

    def close(self) -> None:
        os.close(self.fd)
