"""A host's parts of the job's cluster versions: it makes, watches and closes them on the controller's orders."""

from __future__ import annotations

import asyncio
from typing import Any, Callable

from ms_kungfu.launcher.agent.links import LinkMaker
from ms_kungfu.launcher.agent.plain_segment import HostSegment
from ms_kungfu.launcher.agent.relay import Relay
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.wire import messages as m

_LINKS_LOOK_S = 0.2


class HostSegments:
    """This host's segments, in the agent's event loop.

    `send` brings a message to the present controller; `look_s`: how often it gets heartbeats; `running` returns the
    workers' process IDs by their keys, and `cores` those that the host has for the job.
    """

    def __init__(
        self, machine: Machine, links: LinkMaker, relay: Relay, send: Callable[[m.FromHost], None], look_s: float,
        running: Callable[[], dict[int, int]], cores: Callable[[], tuple[list[int], tuple[int, ...]]],
    ) -> None:  # fmt: skip
        self._machine, self._links, self._relay, self._send, self._look_s = machine, links, relay, send, look_s
        self._running, self._cores = running, cores
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._making: dict[int, tuple[int, asyncio.Task[None]]] = {}  # version -> attempt
        self._beats: dict[int, dict[int, int]] = {}  # version -> rank -> its count at the last look
        # version -> rank -> why it can't continue; everything that was ever seen
        self._words: dict[int, dict[int, str]] = {}
        # What the controller was notified of, by version: failed transports, sync points (in either direction), and
        # hosts that the version's transport can't reach.
        self._unlinked: set[int] = set()
        self._sync_points: dict[int, int] = {}
        self._apart: set[tuple[int, str]] = set()
        self._losses: dict[int, list[m.Loss]] = {}  # for the next controller

    def begin(self) -> None:
        self._look()
        self._look_at_links()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self.cancel_making()

    def cancel_making(self) -> None:
        for _, making in self._making.values():
            making.cancel()
        self._making.clear()

    def forget_what_was_told(self) -> None:
        """Forget what was reported: another controller gets it again."""
        self._words.clear()
        self._unlinked.clear()
        self._sync_points.clear()
        self._apart.clear()

    def losses(self) -> dict[int, list[m.Loss]]:
        return {version: self._losses.get(version, []) for version in self._relay.segments()}

    # ---- orders of the controller ----

    def make(self, said: m.Make) -> None:
        version = said.cluster.version
        self.drop(version)
        self._making[version] = (said.attempt, asyncio.ensure_future(self._make(said)))

    async def _make(self, said: m.Make) -> None:
        cluster, attempt, error = said.cluster.cluster(), said.attempt, ""
        try:
            segment = await self._links.make(cluster, attempt, said.recovers)
            self._relay.add(cluster.version, segment)
        except Exception as trouble:  # any error of the runtime, the kernel or another host
            error = str(trouble) or repr(trouble)
        if self._making.get(cluster.version, (None,))[0] == attempt:
            del self._making[cluster.version]
        self._send(m.Made(cluster.version, attempt, error))

    def drop(self, version: int) -> None:
        if version in self._making:
            self._making.pop(version)[1].cancel()
        self._relay.drop(version)
        self._losses.pop(version, None)
        self._words.pop(version, None)
        self._unlinked.discard(version)
        self._sync_points.pop(version, None)
        self._apart = {(v, host) for v, host in self._apart if v != version}

    def obey(self, said: Any) -> None:
        """Obey a message of `OF_A_VERSION`, which has no effect if the version is closed by now."""
        segment = self._relay.segment(said.version)
        if segment is not None:
            OF_A_VERSION[type(said)](self, segment, said)

    def _lose(self, segment: HostSegment, said: m.Lost) -> None:
        segment.mark_lost(said.rank, said.reason, said.recover, said.reaped)
        told = self._losses.setdefault(said.version, [])
        if said.rank not in [rank for rank, *_ in told]:
            told.append((said.rank, said.reason, said.recover, said.reaped))

    def _sync(self, segment: HostSegment, said: m.Sync) -> None:
        if said.number > self._sync_points.get(said.version, 0):
            self._sync_points[said.version] = said.number
            segment.request_sync_point(said.number)

    # ---- reports to the controller ----

    def _look_at_links(self) -> None:
        self.tell_of_links()
        self._later(_LINKS_LOOK_S, self._look_at_links)

    def tell_of_links(self) -> None:
        for version, segment in self._relay.segments().items():
            if segment.sync_points() > self._sync_points.get(version, 0):
                self._sync_points[version] = segment.sync_points()
                self._send(m.Syncs(version, self._sync_points[version]))
            if version not in self._unlinked and (why := segment.failure()):
                self._unlinked.add(version)
                self._send(m.Unlinked(version, why))
            for host, why in segment.unreachable():
                if (version, host) not in self._apart:
                    self._apart.add((version, host))
                    self._send(m.Unreachable(version, host, why))

    def new_words(self) -> dict[int, dict[int, str]]:
        """Return why ranks of this host can't continue, without what was reported."""
        news: dict[int, dict[int, str]] = {}
        for version, segment in self._relay.segments().items():
            known = self._words.setdefault(version, {})
            for rank in segment.ranks():
                if rank not in known and (why := segment.gave_up(rank)):
                    known[rank] = news.setdefault(version, {})[rank] = why
        return news

    def _look(self) -> None:
        """Report heartbeats: the controller finds the workers that hang, by this clock and these counts."""
        segments, running, machine = self._relay.segments(), self._running(), self._machine
        beats = {
            version: {rank: segment.heartbeat(rank) for rank in segment.ranks()}
            for version, segment in segments.items()
        }
        progress = {
            version: {rank: told for rank in segment.ranks() if (told := segment.progress(rank)) is not None}
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

    def _any_stands(self, beats: dict[int, dict[int, int]]) -> bool:
        """Return whether a worker hasn't counted since the last look.

        If all have, no process is examined: each has many threads.
        """
        return any(
            count and count == self._beats.get(version, {}).get(rank)
            for version, counts in beats.items()
            for rank, count in counts.items()
        )

    def _starved(self, running: dict[int, int]) -> list[int]:
        return [key for key, pid in running.items() if self._machine.is_starved(pid)]

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        self._timers[function] = self._loop.call_later(seconds, function)


OF_A_VERSION: dict[type, Callable[[HostSegments, HostSegment, Any], None]] = {
    m.Lost: HostSegments._lose,
    m.LoseHost: lambda host, segment, said: segment.lose_host(said.host),
    m.VersionPrepared: lambda host, segment, said: segment.announce(said.newer),
    m.Sync: HostSegments._sync,
    m.Ending: lambda host, segment, said: segment.set_ending(said.rank, said.ending),
}
