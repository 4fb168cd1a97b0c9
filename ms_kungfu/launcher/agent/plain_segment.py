"""What a host has of a cluster version: an interface, and the case of a version whose workers are all on one host."""

from __future__ import annotations

import os
from typing import Any, Callable, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.state.segment import Asker, Segment
from ms_kungfu.launcher.wire import messages as m


class HostSegment(Segment, Protocol):
    """One host's, plain or linked (`links`)."""

    def awaited(self) -> list[tuple[int, int, bool]]:
        """Of this host's ranks; -1 is its link."""

    def ranks(self) -> list[int]: ...
    def failure(self) -> str: ...
    def sync_points(self) -> int: ...
    def request_sync_point(self, number: int) -> None: ...

    def hold_deadlines(self, held: bool) -> None:
        """While it is `held` no deadline of the host's ranks runs."""

    def unreachable(self) -> list[tuple[str, str]]: ...


def the_runtime() -> Any:
    """The module that has shared memory. Not loaded at the top: a job whose workers never ask for a segment starts
    without it."""
    from ms_kungfu import _core

    return _core


class PlainSegment:
    """That of a version whose workers are all on this host: the descriptor, which `close` closes, and a mapping, which
    goes with the object."""

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
        """There is no other."""

    def unreachable(self) -> list[tuple[str, str]]:
        return []

    def ranks(self) -> list[int]:
        return list(range(self._size))

    def failure(self) -> str:
        """None of a connection where there is none."""
        return ""

    def sync_points(self) -> int:
        """None that another host would have to hear of."""
        return 0

    def request_sync_point(self, number: int) -> None:
        """From another host: there is none."""

    def close(self) -> None:
        os.close(self.fd)
