"""How the controller starts worker processes: in the slots of a cluster version, or as standbys."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.ending import EndOfWorkers
from ms_kungfu.launcher.controller.environment import environment_of
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.policy import CANT_RUN, peers_to_start
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class StartOfWorkers:
    """The part of a `WorkerManager` that starts worker processes. It runs in the manager's event loop.

    `on_exit` is called with a process that its host can't start.
    """

    options: Options
    begun: JobStart
    coordinator: Coordinator
    broker: Broker
    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    ending: EndOfWorkers
    on_exit: Callable[[Process, m.Exited], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count()
        self._slots = itertools.count()

    def resume(self, keys: int) -> None:
        """Use only keys of at least `keys` for new processes, because earlier controllers have used smaller keys."""
        self._keys = itertools.count(keys)

    def known(
        self, key: int | None, log_name: str, host: str, peer: PeerID | None, incarnation: int, rank: int
    ) -> Process:
        """Add a process that an earlier controller has started, or was about to start (then `key` is None)."""
        key = next(self._keys) if key is None else key
        slot = -1 if peer is None else next(self._slots)
        process = Process(key, log_name, host, peer, incarnation, rank, slot=slot)
        self.processes.add(process)
        return process

    def missing(self, cluster: Cluster, replacing: Collection[PeerID] = ()) -> None:
        """Start the new workers of `cluster`. The workers in `replacing` get the slots of failed workers."""
        coordinator = self.coordinator
        present = {p.peer for p in self.processes if p.peer is not None and self.processes.is_current(p)}
        shares = self.processes.shares_in(cluster)
        hosts = [worker.host for worker in cluster.workers]
        current = self.broker.versions.current
        joins_later = current is not None and current.version < cluster.version
        for peer in peers_to_start(cluster, present, self.broker.versions.ended_in(cluster), coordinator.finishing):
            rank = cluster.workers.index(peer)
            if coordinator.vacant and peer in replacing:
                slot = coordinator.vacant.pop(0)
                coordinator.count_restart(slot, self._loop.time())
            else:
                slot = next(self._slots)
            process = self.processes.standby_for(rank, peer.host) if joins_later else None
            if process is not None:
                _log.info("standby used: standby=%d rank=%d peer=%s pid=%s", process.standby, rank, peer, process.pid)
            else:
                device = self.processes.choose_device(cluster, peer.host)
                process = Process(next(self._keys), f"{peer.host}.{peer.port}", peer.host, device=device)
            process.peer, process.incarnation, process.slot = peer, cluster.version, slot
            process.rank, process.size = rank, cluster.size
            if process.standby is not None:
                self.agents[process.host].assign(process.key, peer, cluster.version, rank)
                self.broker.requests.assign(process.standby, peer, cluster.version)
            else:
                self._launch(process, hosts, joins_later, shares[peer], len(shares[peer]))
            if joins_later:
                self.limit_join(process, cluster.version)
        self.ending.clear_slots()

    def standby(self, number: int, rank: int, hosts: Sequence[str], cluster: Cluster, needs: int) -> None:
        """Start a standby that will have rank `rank` when `cluster` has grown. `hosts`: the host of each rank.

        `needs`: the standby starts only if its host has enough memory for this number of workers.
        """
        host = hosts[rank]
        process = Process(next(self._keys), f"standby.{number}", host, rank=rank, size=len(hosts), standby=number)
        process.device = self.processes.choose_device(cluster, host)
        # Give the standby as many threads as its future share of the cores allows. Until it has its share, it may use
        # all cores, unless the number of cores per worker is fixed.
        shares = self.agents[host].shares
        share = shares.of(hosts.count(host))[hosts[:rank].count(host)]
        self._launch(process, hosts, True, share if shares.each else shares.of(1)[0], len(share), needs)

    def _launch(
        self, process: Process, hosts: Sequence[str], joins_later: bool, cores: list[int], threads: int, needs: int = 0
    ) -> None:
        """Launch a process. Its agent reports the result. `hosts`: the host of each rank."""
        agent, pins = self.agents[process.host], self.options.affinity
        process.has_its_cores = agent.shares.each is not None
        launch = m.Launch(
            process.key,
            process.log_name,
            process.rank,
            process.peer is None,
            environment_of(
                process, hosts, joins_later, self.options, self.coordinator.hosts, self.begun, agent, threads
            ),
            tuple(cores) if pins else (),
            threads if pins else None,
            joins_later,
            process.device,
            needs,
        )
        self.processes.add(process)
        try:
            agent.start(launch)
        except OSError as error:
            # Treat the worker like a process that couldn't be run, so that the failure policy decides what follows.
            self._loop.call_soon(self.on_exit, process, m.Exited(process.key, CANT_RUN, str(error.strerror)))

    def limit_join(self, process: Process, version: int) -> None:
        """Kill a process if it isn't ready to join `version` within KUNGFU_JOIN_TIMEOUT."""
        process.join_timer = self._loop.call_later(self.begun.join_timeout_s, self._end_late, process, version)

    def _end_late(self, process: Process, version: int) -> None:
        if process.is_ending or process.peer is None or self.broker.is_ready(process.peer, process.incarnation):
            return
        process.is_late = True
        limit = f"{self.begun.join_timeout_s:g} s (KUNGFU_JOIN_TIMEOUT)"
        self.ending.kill(process, f"was not ready to join cluster version {version} within {limit} and was killed")


def log_started(process: Process, standbys: int) -> None:
    """Log that an agent has started a process. `standbys`: the value of -standby."""
    if process.standby is None:
        _log.info("worker started: %s", process.who)
    else:
        _log.info("worker started: %s reason=%s", process.who, "-standby" if standbys else "prestart")
