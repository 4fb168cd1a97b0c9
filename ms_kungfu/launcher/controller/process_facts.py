"""Read the state of each process from the shared memory of the cluster versions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Callable, Union

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.controller.segments import Segments
from ms_kungfu.launcher.state.segment import Asker, Progress
from ms_kungfu.launcher.state.stuck import stuck_among
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m

Waits = Sequence[tuple[Union[int, str], Union[int, str], bool]]


class ProcessFacts:
    """The broker's view of the worker processes.

    `has_slot(process)` returns whether a process (peer ID and incarnation) has been granted a slot and hasn't been
    excluded since.
    """

    def __init__(
        self, versions: ClusterVersions, segments: Segments, has_slot: Callable[[tuple[PeerID, int]], bool]
    ) -> None:
        self._versions, self._segments, self._has_slot = versions, segments, has_slot
        self.ended_programs: set[tuple[PeerID, int]] = set()  # processes whose programs have ended
        self._counting: set[tuple[PeerID, int]] = set()  # processes whose heartbeat has been seen

    def note_program_end(self, asker: Asker, asked: m.ProgramEnded) -> None:
        self.ended_programs.add((PeerID.parse(asked.peer), asked.incarnation))
        asker.send(m.Noted())

    def heartbeat(self, peer: PeerID, incarnation: int) -> tuple[int, ...]:
        """Return counts that change while the process runs.

        The tuple is empty before the process has a slot, and after the process has left.
        """
        beats = tuple(segment.heartbeat(rank) for segment, rank in self._segments.slots_of(peer, incarnation))
        process = (peer, incarnation)
        if any(beats):
            self._counting.add(process)
        elif process in self._counting or not self._has_slot(process):
            return ()  # the process has left, or has no slot yet
        return beats

    def progress(self, peer: PeerID, incarnation: int) -> Progress | None:
        """Return the process's training progress, from the newest cluster version in which it has reported progress."""
        slots = list(self._segments.slots_of(peer, incarnation))
        return next(filter(None, (segment.progress(rank) for segment, rank in reversed(slots))), None)

    def doing(self, peer: PeerID, incarnation: int) -> m.Doing | None:
        """Return what the process is doing, according to the newest cluster version that it has joined.

        Return None if that isn't known.
        """
        slots = list(self._segments.slots_of(peer, incarnation))
        joined = [(segment, rank) for segment, rank in slots if segment.heartbeat(rank)]
        return joined[-1][0].doing(joined[-1][1]) if joined else None

    def gave_up(self, peer: PeerID, incarnation: int) -> str:
        """Return why a live process can't continue, or "" if it can.

        If the process can't continue, the other workers wait for its exit.
        """
        slots = self._segments.slots_of(peer, incarnation)
        return next(filter(None, (segment.gave_up(rank) for segment, rank in slots)), "")

    def stuck(self, alive: Collection[tuple[PeerID, int]]) -> dict[tuple[PeerID, int], list[int]]:
        """Return the live processes that keep others waiting for too long (`stuck`), with the waiting ranks."""
        awaited = {version: segment.awaited() for version, segment in self._segments.open.items()}
        if not any(is_overdue for waits_of_version in awaited.values() for *_, is_overdue in waits_of_version):
            return {}  # in a healthy job, no wait is about to time out
        return self._found(alive, awaited)

    def waited_for(
        self, alive: Collection[tuple[PeerID, int]], stopped: Collection[tuple[PeerID, int]]
    ) -> dict[tuple[PeerID, int], list[int]]:
        """Return the live processes that currently keep others waiting, with the waiting ranks.

        `stopped`: the processes that a signal has stopped. They count as waiting for no rank, even if they were
        stopped while they slept in an operation.
        """
        awaited = {version: segment.awaited() for version, segment in self._segments.open.items()}
        return self._found(alive, awaited, stopped) if any(awaited.values()) else {}

    def sleeping(self, version: int) -> set[int]:
        """Return the ranks of cluster version `version` that sleep in an operation."""
        segment = self._segments.open.get(version)
        return set() if segment is None else {rank for rank, *_ in segment.awaited() if isinstance(rank, int)}

    def _found(
        self,
        alive: Collection[tuple[PeerID, int]],
        awaited: Mapping[int, Waits],
        stopped: Collection[tuple[PeerID, int]] | None = None,
    ) -> dict[tuple[PeerID, int], list[int]]:
        """Return the processes that others wait for.

        Without `stopped`, only waits that will soon time out count. With `stopped`, all waits count, except those of
        stopped processes.
        """
        rank_of: dict[tuple[PeerID, int], int] = {}
        waits: list[tuple[Any, Any, bool]] = []
        for version, waits_of_version in awaited.items():
            cluster = self._versions.clusters[version]
            known: dict[int, tuple[PeerID, int]] = {}
            for process in alive:
                rank = cluster.rank_of(process[0])
                if rank is not None and self._versions.belongs(*process, version):
                    known[rank], rank_of[process] = process, rank
            for *ends, is_overdue in waits_of_version:
                sleeper, other = (known.get(end, end) if isinstance(end, int) else (version, end) for end in ends)
                if stopped is None or sleeper not in stopped:
                    waits.append((sleeper, other, stopped is not None or bool(is_overdue)))
        found = stuck_among(set(alive), waits)
        return {process: sorted(rank_of[each] for each in by) for process, by in found.items()}

    def set_ending(self, peer: PeerID, incarnation: int, ending: bool) -> None:
        """Record whether the controller is about to end the process."""
        for segment, rank in self._segments.slots_of(peer, incarnation):
            segment.set_ending(rank, ending)
