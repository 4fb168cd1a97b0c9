"""Create, watch and close a host's shared-memory segments, one per cluster version, as the controller orders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Callable

from ms_kungfu.broker_protocol import close_all
from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.agent.transports import Transport, Transports
from ms_kungfu.launcher.state.segment import Asker, Progress
from ms_kungfu.launcher.wire import messages as m

_TRANSPORTS_LOOK_S = 0.2
_ACTIVITY_S = 1.0


class HostSegment:
    """The shared memory of the ranks that one cluster version has on this host.

    If the cluster version has several hosts, this object also contains the inter-host transport and the control block
    of all ranks. The transport is then the last member of the segment.
    """

    def __init__(self, cluster: Cluster, host: str, cores: int, recovers: bool, runtime: Any) -> None:
        here = [rank for rank, worker in enumerate(cluster.workers) if worker.host == host]
        self._local = {rank: place for place, rank in enumerate(here)}
        self._hosts = cluster.hosts
        self._transport: Transport | None = None
        self._fds: list[int] = []
        sizes = [len(here)] if len(cluster.hosts) == 1 else [len(here) + 1, cluster.size]
        try:
            for size in sizes:
                is_board = bool(self._fds)
                self._fds.append(runtime.create_segment(size, cluster.version, cores, recovers, is_board))
            self._memories = [runtime.SegmentControl(fd) for fd in self._fds]
        except BaseException:
            close_all(self._fds)
            raise
        # `_segment` is the memory in which this host's ranks wait. `_board` is the control block, which contains
        # everything except data. If there is one host, both are the same memory.
        self._segment, self._board = self._memories[0], self._memories[-1]

    @classmethod
    async def make(
        cls, cluster: Cluster, attempt: int, recovers: bool, cores: int, transports: Transports
    ) -> HostSegment:
        """Create this host's segment of `cluster`, which has workers on this host.

        If this fails, raise the error and release everything that was created.
        """
        segment = cls(cluster, transports.hosts.self_name, cores, recovers, transports.machine.runtime())
        try:
            if len(cluster.hosts) > 1:
                segment._transport = await transports.make(cluster, attempt, *segment._fds)
        except BaseException:
            segment.close()
            raise
        return segment

    def hand_over(self, asker: Asker, message: m.Slot) -> None:
        """Send `message` with the file descriptors that the rank needs to join the cluster version.

        Raises:
            KeyError: the rank isn't on this host.
        """
        sockets: Sequence[int] = ()
        local_rank = self._local[message.rank]
        if self._transport is not None:
            sockets = self._transport.connect(local_rank)
        try:
            asker.send(message, (*self._fds, *sockets))
        finally:
            close_all(sockets)

    def announce(self, version: int) -> None:
        self._board.announce(version)

    def hold_deadlines(self, held: bool) -> None:
        """Suspend (`held`) or resume the deadlines of this host's ranks."""
        for memory in self._memories:
            memory.hold_deadlines(held)

    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None:
        # First write the control block, which lists failures in the same order on all hosts. When the segment then
        # notifies a rank, the rank finds the failure in the control block.
        self._board.mark_lost(rank, reason, recover, reaped)
        if self._transport is not None and rank in self._local:
            self._segment.mark_lost(self._local[rank], reason, recover, reaped)

    def lose_host(self, host: str) -> None:
        """Let the members continue without `host`. All ranks of `host` must already be marked lost."""
        if self._transport is not None:
            self._transport.lose_host(self._hosts.index(host))

    def unreachable(self) -> list[tuple[str, str]]:
        """Return the hosts to which a connection has ended, each with the reason."""
        found = [] if self._transport is None else self._transport.unreachable()
        return [(self._hosts[place], why) for place, why in found]

    def heartbeat(self, rank: int) -> int:
        return self._segment.heartbeat(self._local[rank])

    def gave_up(self, rank: int) -> str:
        return self._segment.gave_up(self._local[rank])

    def progress(self, rank: int) -> Progress | None:
        return self._segment.progress(self._local[rank])

    def awaited(self) -> list[tuple[int, int, bool]]:
        """Return this host's waits: the waiting rank, the awaited rank, and whether the wait will soon time out.

        The number -1 is the transport.
        """
        rank_of = [*self._local, -1]  # the transport is the last member of the segment
        return [(rank_of[a], rank_of[b], is_overdue) for a, b, is_overdue in self._segment.awaited()]

    def doing(self, rank: int) -> m.Doing:
        """Return what a rank on this host is doing now."""
        activity, seconds, operations = self._segment.activity(self._local[rank])
        return m.Doing(m.ACTIVITIES[activity] if activity < len(m.ACTIVITIES) else "", seconds, operations)

    def set_ending(self, rank: int, ending: bool) -> None:
        """Record whether a rank is about to be ended. If the rank is on another host, record this for the transport."""
        self._segment.set_ending(self._local.get(rank, len(self._local)), ending)

    def ranks(self) -> list[int]:
        """Return the ranks on this host."""
        return list(self._local)

    def sync_points(self) -> int:
        """Return the number of sync points that this host's workers have requested or have been notified of.

        Return 0 if the cluster version has no other hosts, because there is no host to notify then.
        """
        return 0 if self._transport is None else self._board.sync_points

    def request_sync_point(self, number: int) -> None:
        self._board.request_sync_point(number)

    def failure(self) -> str:
        """Return why data can no longer be exchanged with the other hosts, or "" if it can."""
        return "" if self._transport is None else self._transport.failure()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None  # this closes the transport's connections
        close_all(self._fds)
        self._fds.clear()


class HostSegments:
    """This host's segments, one per cluster version. Used only in the agent's event loop.

    Args:
        transports: the inter-host transports of this host.
        send: sends a message to the current controller.
        look_s: the interval in seconds at which the controller gets heartbeats.
        running: returns the process ID of each running worker, by the worker's key.
        cores: returns the cores that the job has on this host, and the cores that others have taken
            (`CoreClaims.look`).
        core_count: how many cores the job has on this host at the beginning.
    """

    def __init__(
        self, transports: Transports, send: Callable[[m.FromHost], None], look_s: float,
        running: Callable[[], dict[int, int]], cores: Callable[[], tuple[list[int], tuple[int, ...]]], core_count: int,
    ) -> None:  # fmt: skip
        self._transports, self._machine, self._core_count = transports, transports.machine, core_count
        self._send, self._look_s, self._running, self._cores = send, look_s, running, cores
        self._loop = asyncio.get_running_loop()
        self.open: dict[int, HostSegment] = {}
        self._held = False  # whether the workers' deadlines are suspended
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._making: dict[int, tuple[int, asyncio.Task[None]]] = {}  # version -> (attempt, task)
        self._beats: dict[int, dict[int, int]] = {}  # version -> rank -> heartbeat count at the last check
        # the reported reasons why ranks can't continue: version -> rank -> reason
        self._words: dict[int, dict[int, str]] = {}
        # What the controller already knows about each version: whether its transport has failed, its number of sync
        # points (reported by this host or by the controller), and the hosts that its transport can't reach.
        self._failed: set[int] = set()
        self._sync_points: dict[int, int] = {}
        self._apart: set[tuple[int, str]] = set()
        self._losses: dict[int, list[m.Loss]] = {}  # version -> its failures, for a resync report
        self._is_watched = False  # whether the controller wants reports of what the workers are doing

    def begin(self) -> None:
        self._look()
        self._look_at_transports()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self.cancel_making()
        for segment in self.open.values():
            segment.close()
        self.open.clear()

    def cancel_making(self) -> None:
        for _, making in self._making.values():
            making.cancel()
        self._making.clear()

    def forget_what_was_told(self) -> None:
        """Forget which reports the previous controller got, so that the next controller gets all reports."""
        self._words.clear()
        self._failed.clear()
        self._sync_points.clear()
        self._apart.clear()
        self._is_watched = False

    def losses(self) -> dict[int, list[m.Loss]]:
        return {version: self._losses.get(version, []) for version in self.open}

    # ---- commands of the controller ----

    def hold_deadlines(self, held: bool) -> None:
        """Suspend the workers' deadlines if `held`, because the controller waits for the store; else resume them."""
        self._held = held
        for segment in self.open.values():
            segment.hold_deadlines(held)

    def make(self, said: m.Make) -> None:
        version = said.cluster.version
        self.drop(version)
        self._making[version] = (said.attempt, asyncio.ensure_future(self._make(said)))

    async def _make(self, said: m.Make) -> None:
        cluster, attempt, error = said.cluster.cluster(), said.attempt, ""
        try:
            segment = await HostSegment.make(cluster, attempt, said.recovers, self._core_count, self._transports)
            segment.hold_deadlines(self._held)
            self.open[cluster.version] = segment
        except Exception as trouble:  # an error of the runtime, the kernel or another host
            error = str(trouble) or repr(trouble)
        if self._making.get(cluster.version, (None,))[0] == attempt:
            del self._making[cluster.version]
        self._send(m.Made(cluster.version, attempt, error))

    def drop(self, version: int) -> None:
        if version in self._making:
            self._making.pop(version)[1].cancel()
        if version in self.open:
            self.open.pop(version).close()
        self._losses.pop(version, None)
        self._words.pop(version, None)
        self._failed.discard(version)
        self._sync_points.pop(version, None)
        self._apart = {(v, host) for v, host in self._apart if v != version}

    def lose(self, segment: HostSegment, said: m.Lost) -> None:
        segment.mark_lost(said.rank, said.reason, said.recover, said.reaped)
        losses = self._losses.setdefault(said.version, [])
        if said.rank not in [rank for rank, *_ in losses]:
            losses.append((said.rank, said.reason, said.recover, said.reaped))

    def sync(self, segment: HostSegment, said: m.Sync) -> None:
        if said.number > self._sync_points.get(said.version, 0):
            self._sync_points[said.version] = said.number
            segment.request_sync_point(said.number)

    # ---- reports to the controller ----

    def _look_at_transports(self) -> None:
        self.report_transports()
        self._later(_TRANSPORTS_LOOK_S, self._look_at_transports)

    def report_transports(self) -> None:
        for version, segment in self.open.items():
            if segment.sync_points() > self._sync_points.get(version, 0):
                self._sync_points[version] = segment.sync_points()
                self._send(m.Syncs(version, self._sync_points[version]))
            if version not in self._failed and (why := segment.failure()):
                self._failed.add(version)
                self._send(m.TransportFailed(version, why))
            for host, why in segment.unreachable():
                if (version, host) not in self._apart:
                    self._apart.add((version, host))
                    self._send(m.Unreachable(version, host, why))

    def new_words(self) -> dict[int, dict[int, str]]:
        """Return why ranks on this host can't continue, except for ranks whose reason has been reported already."""
        news: dict[int, dict[int, str]] = {}
        for version, segment in self.open.items():
            known = self._words.setdefault(version, {})
            for rank in segment.ranks():
                if rank not in known and (why := segment.gave_up(rank)):
                    known[rank] = news.setdefault(version, {})[rank] = why
        return news

    def _look(self) -> None:
        """Report the heartbeat counts and this host's time, from which the controller finds hanging workers."""
        segments, running, machine = self.open, self._running(), self._machine
        beats = {
            version: {rank: segment.heartbeat(rank) for rank in segment.ranks()}
            for version, segment in segments.items()
        }
        progress = {
            version: {rank: progress for rank in segment.ranks() if (progress := segment.progress(rank)) is not None}
            for version, segment in segments.items()
        }
        awaited = {version: segment.awaited() for version, segment in segments.items()}
        stopped = [key for key, pid in running.items() if machine.is_stopped(pid)]
        starved = self._starved(running) if self._any_stands(beats) else []
        self._beats = beats
        cores, taken = self._cores()
        self._send(
            m.Looked(
                self._loop.time(), tuple(cores), beats, self.new_words(), stopped, starved, progress, awaited, taken
            )
        )  # fmt: skip
        self._later(self._look_s, self._look)

    def watch_activity(self, said: m.WatchActivity) -> None:
        """Begin or stop reporting what the workers are doing, as the controller has requested."""
        begins = said.watched and not self._is_watched
        self._is_watched = said.watched
        if begins:
            self._report_activity()

    def _report_activity(self) -> None:
        if not self._is_watched:
            return
        doing = {
            version: {rank: segment.doing(rank) for rank in segment.ranks()} for version, segment in self.open.items()
        }
        memory = {key: self._machine.resident_bytes(pid) for key, pid in self._running().items()}
        self._send(m.Activity(doing, {key: taken for key, taken in memory.items() if taken is not None}))
        self._later(_ACTIVITY_S, self._report_activity)

    def _any_stands(self, beats: dict[int, dict[int, int]]) -> bool:
        """Return whether at least one worker's heartbeat count hasn't changed since the last check.

        If all counts have changed, no process has to be examined. That saves time, because each process has many
        threads.
        """
        return any(
            count and count == self._beats.get(version, {}).get(rank)
            for version, counts in beats.items()
            for rank, count in counts.items()
        )

    def _starved(self, running: dict[int, int]) -> list[int]:
        return [key for key, pid in running.items() if self._machine.is_starved(pid)]

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        if function in self._timers:
            self._timers[function].cancel()
        self._timers[function] = self._loop.call_later(seconds, function)
