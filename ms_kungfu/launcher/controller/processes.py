"""The worker processes of a job, and queries about them. This module takes no action on a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.state.policy import Headcount, Standing
from ms_kungfu.launcher.state.states import WorkerState

_log = logging.getLogger(__name__)
_ENDING = {WorkerState.DISMISSED, WorkerState.KILLED, WorkerState.UNKILLABLE, WorkerState.EXITED}
_NOT_AWAITED = {WorkerState.OVERDUE, WorkerState.DISMISSED, WorkerState.UNKILLABLE}


class Process(Struct):
    """A worker process whose exit hasn't been reported yet."""

    key: int
    log_name: str
    host: str
    peer: PeerID | None = None  # None for a standby without a slot
    incarnation: int = 0
    rank: int = 0  # its rank in its last cluster version; at first, in the version for which it was started
    size: int = 1  # the size of the cluster version in which it has `rank`
    slot: int = -1  # number of its slot, which its replacement inherits; restarts are counted per slot
    standby: int | None = None
    pid: int | None = None
    join_timer: asyncio.TimerHandle | None = None
    leave_timer: asyncio.TimerHandle | None = None
    state: WorkerState = WorkerState.STARTING
    killed_because: str = ""
    is_registered: bool = False  # whether it has requested its slot
    gave_up: bool = False  # whether the controller has noted that the process can't continue
    is_late: bool = False  # whether it was killed because it wasn't ready to join in time
    told_again: bool = False  # whether it got a second SIGTERM, because it may no longer leave
    has_its_cores: bool = False  # whether it has the fixed number of cores per worker, if a number is fixed
    device: int = 0  # the index of its device in Devices; never changes

    def to(self, state: WorkerState) -> None:
        self.state = self.state.to(state, self.who)
        _log.debug("worker: %s state=%s", self.who, state.value)

    @property
    def is_ending(self) -> bool:
        """Return whether the controller has ended or killed the process, or the process has exited."""
        return self.state in _ENDING

    @property
    def named(self) -> dict[str, Any]:
        """Return the fields that name the process in an event of the job."""
        if self.peer is None:
            return {"host": self.host}
        return {"host": self.host, "rank": self.rank, "peer": str(self.peer)}

    @property
    def who(self) -> str:
        if self.peer is None:
            return f"standby {self.standby}" + ("" if self.pid is None else f" (pid {self.pid})")
        pid = "" if self.pid is None else f", pid {self.pid}"
        return f"worker {self.rank} ({self.peer}{pid})"


class ProcessTable:
    """All worker processes of the job."""

    def __init__(self, broker: Broker, agents: Mapping[str, AgentHandle]) -> None:
        self._broker = broker
        self._agents = agents
        self._by_key: dict[int, Process] = {}
        self.emptied = asyncio.Event()  # set when the last process is removed

    def add(self, process: Process) -> None:
        self._by_key[process.key] = process
        self.emptied.clear()

    def remove(self, process: Process) -> None:
        del self._by_key[process.key]
        for timer in (process.join_timer, process.leave_timer):
            if timer is not None:
                timer.cancel()
        if not self._by_key:
            self.emptied.set()

    def get(self, key: int) -> Process | None:
        return self._by_key.get(key)

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def is_current(self, process: Process) -> bool:
        """Return whether the process has a peer ID that later cluster versions still use for this process."""
        return process.peer is not None and not self._broker.versions.is_out(process.peer, process.incarnation)

    def standing(self, process: Process) -> Standing:
        if process.peer is None:
            return Standing.STANDBY
        if not self.is_current(process):
            return Standing.LEAVING
        current = self._broker.versions.current
        member = current is not None and process.peer in current.workers and process.incarnation <= current.version
        return Standing.MEMBER if member else Standing.JOINING

    def of_standing(self, *standings: Standing) -> list[Process]:
        return [p for p in self if self.standing(p) in standings]

    def living_members(self) -> list[PeerID]:
        """Return the members of the committed cluster whose processes run, in rank order."""
        current = self._broker.versions.current
        members = {p.peer for p in self.of_standing(Standing.MEMBER)}
        return [peer for peer in current.workers if peer in members] if current is not None else []

    def headcount(self) -> Headcount:
        waited_for = [p for p in self if p.state not in _NOT_AWAITED]
        # Read `told_to_end` first. A commit between the two reads would exclude members and forget their SIGTERM.
        told_to_end = self._broker.leaves.told_to_end if waited_for else ()
        standings = [self.standing(p) for p in waited_for]
        return Headcount(
            members=standings.count(Standing.MEMBER),
            leaving=standings.count(Standing.LEAVING),
            terminated=sum(p.peer in told_to_end and s is Standing.MEMBER for p, s in zip(waited_for, standings)),
        )

    def taken_ports(self) -> set[int]:
        """Return the ports in use.

        A process that is leaving keeps its port until it exits, or until -leave-grace is over.
        """
        return {p.peer.port for p in self if p.peer is not None and p.state is not WorkerState.OVERDUE}

    def standbys(self) -> list[Process]:
        """Return the standbys that aren't ending. Ready standbys come first, and older ones before younger ones."""
        ready = self._broker.requests.ready_standbys
        spare = [p for p in self if p.peer is None and not p.is_ending]
        return sorted(spare, key=lambda p: (p.standby not in ready, p.key))

    def standby_for(self, rank: int, host: str) -> Process | None:
        """Return a standby on `host` for this rank, or None.

        A ready standby is preferred. Among standbys that are equally ready, one that was prepared for the rank is
        preferred. A standby without a process ID is never returned, because its agent may still fail to start it.
        """
        ready = self._broker.requests.ready_standbys
        there = (p for p in self.standbys() if p.host == host and p.pid is not None)
        return min(there, key=lambda p: (p.standby not in ready, p.rank != rank), default=None)

    def shares_in(self, cluster: Cluster) -> dict[PeerID, list[int]]:
        """Return each worker's share of its host's cores."""
        shares: dict[PeerID, list[int]] = {}
        for host in cluster.hosts:
            here = [worker for worker in cluster.workers if worker.host == host]
            shares.update(zip(here, self._agents[host].shares.of(len(here))))
        return shares

    def shares(self, cluster: Cluster) -> Iterator[tuple[Process, list[int]]]:
        """Return the running processes of `cluster`'s workers, each with its cores."""
        shares = self.shares_in(cluster)
        for process in self:
            if process.peer in shares and self.is_current(process):
                yield process, shares[process.peer]

    def choose_device(self, cluster: Cluster, host: str) -> int:
        """Return the device for a process that is about to start on `host` for `cluster`."""
        staying: list[int] = []
        leaving: list[int] = []
        for other in self:
            if other.host != host:
                continue
            # A standby counts as staying, because it is about to join a cluster.
            stays = other.peer is None or (other.peer in cluster.workers and self.is_current(other))
            (staying if stays else leaving).append(other.device)
        devices = self._agents[host].devices
        chosen = devices.choose(staying, leaving)
        name = devices.name_of(chosen)
        if name is not None and chosen in staying:
            _log.warning(
                'device shared: device="%s" host=%s workers=%d devices=%d host_workers=%d',
                name,
                host,
                staying.count(chosen) + 1,
                len(devices.each),
                sum(worker.host == host for worker in cluster.workers),
            )
        return chosen

    def in_the_way(self) -> list[Process]:
        """Return the removed processes that are still running although another worker has their peer ID or device."""
        current = [p for p in self if self.is_current(p)]
        found = []
        for process in self:
            if process.state is WorkerState.OVERDUE:
                here = [p for p in current if p.host == process.host]
                device = self._agents[process.host].devices.name_of(process.device)
                if any(p.peer == process.peer or (device is not None and p.device == process.device) for p in here):
                    found.append(process)
        return found
