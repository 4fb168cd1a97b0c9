"""The standbys of a host: those that are kept for whoever is needed, and those that the members expect to need."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Callable

from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.ahead import Expected, Present, Room, to_start
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.policy import Standing

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 10.0  # whether there is memory now


@dataclass(eq=False)
class StandbyKeeper:
    """Of a `WorkerManager`, in its event loop. `start` and `dismiss` are its ways to start and to end a process;
    `is_over` tells whether the job is ending."""

    options: Options
    machine: Machine
    broker: Broker
    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    coordinator: Coordinator
    is_over: Callable[[], bool]
    new_process: Callable[[str], Process]
    start: Callable[[Process, Cluster, list[int]], None]
    dismiss: Callable[[Process], None]

    def __post_init__(self) -> None:
        self._kept = self.options.standbys
        self._expected = Expected()
        self._numbers = itertools.count(1)
        self._told = (self._expected, False)  # the last that was worth a line
        self._told_of_hosts = False
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, expected: Expected) -> None:
        """The members tell whom they are going to need. Standbys that nobody will need are ended."""
        version = self.coordinator.newest.version
        if self.options.hosts.is_several:
            if expected.newcomers and not self._told_of_hosts:
                self._told_of_hosts = True
                _log.info("nobody is started ahead: the job has several hosts")
            return
        if self.is_over() or self.coordinator.finishing or expected.version != version:
            return
        self._expected = expected if self.options.hosts.has_room(expected.size) else Expected(version)
        self._end_those_beyond(self._expected.newcomers)
        self.keep()

    def expect_nobody(self) -> None:
        """A member has come to the end of its program."""
        self._expected = Expected()
        self._end_those_beyond(0)

    def keep_fewer(self) -> None:
        """Too many have died."""
        self._kept = max(0, self._kept - 1)
        self._expected = replace(self._expected, newcomers=max(0, self._expected.newcomers - 1))

    def keep(self) -> None:
        """Starts standbys in the places of those that were needed, and for those who are expected. Where the job has
        several hosts there are none (`Options` refuses -standby): what comes next may be on any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.is_over() or self.coordinator.finishing or self.options.hosts.is_several:
            return
        newest = self.coordinator.newest
        expected = self._expected if self._expected.version == newest.version else Expected()
        ready = self.broker.requests.ready_standbys
        are_ready = [process.standby in ready for process in self.processes.standbys()]
        present = Present(ready=sum(are_ready), starting=len(are_ready) - sum(are_ready))
        start = to_start(self._kept, expected, present, self._room(newest))
        news = (expected, start.lacks_memory)
        if start.reason and news != self._told:
            _log.info("%s", start.reason)
            self._told = news
        for _ in range(start.count):
            self._start_one(newest, max(expected.size, newest.size + 1))
        if start.lacks_memory:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self.keep)

    def _end_those_beyond(self, expected: int) -> None:
        for process in self.processes.standbys()[max(self._kept, expected) :]:
            _log.info("%s is not needed any more", process.who)
            self.dismiss(process)

    def _room(self, newest: Cluster) -> Room:
        shares = self.agents[self.options.host.name].shares
        cores, each = len(shares.cores), shares.each
        idle = 0 if each is None else max(0, cores - newest.size * each)
        members = [p.pid for p in self.processes.of_standing(Standing.MEMBER) if p.pid is not None]
        taken = max(map(self.machine.taken_bytes, members), default=0)
        return Room(cores, idle, self.machine.free_bytes(), taken)

    def _start_one(self, newest: Cluster, size: int) -> None:
        """For a cluster of `size`, as far as is known."""
        number = next(self._numbers)
        ranks = {process.rank for process in self.processes.standbys()}
        process = self.new_process(f"standby.{number}")
        process.standby, process.size = number, size
        process.rank = next((rank for rank in range(newest.size, size) if rank not in ranks), newest.size)
        process.device = self.processes.choose_device(newest, process.host)
        self.start(process, newest, self.agents[process.host].shares.of(size)[process.rank])
