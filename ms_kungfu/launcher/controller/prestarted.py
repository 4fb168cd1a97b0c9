"""The job's prestarted workers on all hosts.

Some are standbys that -standby requests. The others are standbys for a larger cluster that the members expect.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Callable

from msgspec.structs import replace

from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.ending import EndOfWorkers
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.controller.starting import StartOfWorkers
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.prestarted import Expected, next_slots, start_at_once, to_start
from ms_kungfu.launcher.state.states import WorkerState

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 10.0  # time until the controller tries again to start a standby for which there was no memory


@dataclass(eq=False)
class PrestartedWorkers:
    """The part of a `WorkerManager` that starts and ends standbys. It runs in the manager's event loop."""

    options: Options
    broker: Broker
    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    coordinator: Coordinator
    starting: StartOfWorkers
    ending: EndOfWorkers
    # called with each process that was removed from `processes`; a leaving host waits until it has no process
    removed: Callable[[Process], None]

    def __post_init__(self) -> None:
        self._kept = self.options.standbys
        self._expected = Expected()
        self._numbers = itertools.count(1)
        # what has been logged about `_expected`: each host without enough memory, and "" for the start of standbys
        self._logged: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, expected: Expected) -> None:
        """Record the size that the members expect next. Start and end standbys accordingly."""
        if expected.version != self.coordinator.newest.version:
            return
        has_room = self.coordinator.hosts.has_room(expected.size)
        expected = expected if has_room else Expected(expected.version)
        if expected != self._expected:
            self._expected = expected
            self._logged.clear()
        self.keep()

    def expect_none(self) -> None:
        """End all standbys except those that -standby requests, because a member has completed the program."""
        for process in self.processes.standbys()[self._kept :]:
            self._end(process)

    def resume(self, last: int) -> None:
        """Keep the standbys of an earlier controller. `last`: the highest number of a standby.

        The size that the members expect is unknown until they report it again.
        """
        self._numbers = itertools.count(last + 1)
        if (present := len(self.processes.standbys())) > self._kept:
            self._expected = Expected(newcomers=present)

    def keep_fewer(self) -> None:
        """Keep fewer standbys, because too many have failed."""
        self._kept = max(0, self._kept - 1)
        self._expected = replace(self._expected, newcomers=max(0, self._expected.newcomers - 1))

    def keep(self) -> None:
        """On each host, start the standbys that are missing, and end the standbys that aren't needed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.ending.is_over() or self.coordinator.finishing:
            return
        newest = self.coordinator.hosts.described(self.coordinator.newest)
        expected = self._expected if self._expected.version == newest.version else Expected()
        is_outdated = expected != self._expected and self._expected.newcomers > 0
        slots = next_slots(newest, max(self._kept, expected.newcomers))
        hosts = [*(worker.host for worker in newest.workers), *slots]
        staying = {host.name for host in self.coordinator.hosts.staying}
        everywhere = self.processes.standbys()
        for host in dict.fromkeys((*slots, *(process.host for process in everywhere))):
            kept, wanted = slots[: self._kept].count(host), slots[: expected.newcomers].count(host)
            standbys = [process for process in everywhere if process.host == host]
            if host not in staying or not is_outdated:
                for process in standbys[max(kept, wanted) :]:
                    self._end(process)
                    standbys.remove(process)
            if host in staying:
                self._start(host, standbys, kept, wanted, hosts, expected.size)

    def no_memory(self, host: str, key: int, why: str) -> None:
        """Record that a host has too little memory for a standby. The controller retries later."""
        process = self.processes.get(key)
        if process is None or process.host != host:
            return
        self.processes.remove(process)
        process.to(WorkerState.EXITED)
        self.removed(process)
        if host not in self._logged:
            self._logged.add(host)
            _log.info("prestart: no memory for a standby host=%s %s retry_s=%g", host, why, _LOOK_AGAIN_S)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self.keep)

    def _end(self, process: Process) -> None:
        _log.info('worker dismissed: %s reason="not needed any more"', process.who)
        self.ending.dismiss(process)

    def _start(
        self, host: str, standbys: Collection[Process], kept: int, wanted: int, hosts: list[str], size: int
    ) -> None:
        """Start the standbys that are missing on `host`.

        `standbys`: the standbys that the host has. `kept` and `wanted`: how many the host needs for -standby, and for
        the expected size `size`. `hosts`: the host of each present worker in rank order, followed by the hosts of the
        workers that will be added.
        """
        known = self.broker.requests.ready_standbys
        ready = sum(process.standby in known for process in standbys)
        starting, shares, newest = len(standbys) - ready, self.agents[host].shares, self.coordinator.newest
        used = None if shares.each is None else shares.each * hosts[: newest.size].count(host)
        idle = 0 if used is None else max(0, len(shares.cores) - used)
        first, more = to_start(kept, wanted, ready, starting, start_at_once(len(shares.cores), idle))
        if more and "" not in self._logged:
            self._logged.add("")
            where = ",".join(f"{name}:{number}" for name, number in Counter(hosts[newest.size :]).items())
            _log.info(
                "prestart: %d -> %d workers version=%d hosts=%s reason=schedule",
                newest.size,
                size,
                newest.version,
                where,
            )
        taken = {process.rank for process in standbys}
        ranks = (rank for rank in range(newest.size, len(hosts)) if hosts[rank] == host and rank not in taken)
        for i, rank in zip(range(first + more), ranks):
            needs = 0 if i < first else 2 + starting + i  # memory for one more worker must stay free
            self.starting.standby(next(self._numbers), rank, hosts[: max(size, rank + 1)], newest, needs)
