"""How the controller serves the live page (`launcher/dashboard`): it sends events and samples, and obeys commands.

After an internal error, it logs one line, and the job continues without the page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from ms_kungfu.cluster_store import open_store
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.commands import write_size, write_without
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.workers import WorkerManager
from ms_kungfu.launcher.dashboard.activity import Activity, RankFacts
from ms_kungfu.launcher.dashboard.requests import CommandRefused, Evict, Resize, Stop
from ms_kungfu.launcher.network import split_address
from ms_kungfu.launcher.state.policy import Standing
from ms_kungfu.launcher.state.states import WorkerState

if TYPE_CHECKING:
    from ms_kungfu.launcher.dashboard.server import DashboardServer

_log = logging.getLogger(__name__)
_SAMPLE_S = 1.0
_FAILED = {WorkerState.FAILING, WorkerState.KILLED, WorkerState.UNKILLABLE, WorkerState.EXITED}


@dataclass(eq=False)
class JobDashboard:
    """Implements `server.Job`. `describe()` returns the job's status. `stop()` ends the job as a signal does."""

    job: JobContext
    describe: Callable[[], dict[str, Any]]
    stop: Callable[[], None]
    _server: DashboardServer | None = None
    _timer: asyncio.TimerHandle | None = None

    def begin(self, address: str) -> None:
        """Serve the page at `address`."""
        options, machine = self.job.options, self.job.machine
        self._activity = Activity()
        host, port = split_address(address)
        names = tuple(dict.fromkeys((options.host.name, machine.host_name())))
        # Derive the first event's number from the clock, so that it is greater than all event numbers of an earlier
        # controller at the same address.
        first = int(machine.time() * 1000)
        self._server = machine.make_dashboard(self, host=host, port=port, names=names, first_event=first)
        self._server.start()
        for event in self.job.events.kept:
            self._server.add(event)
        self.job.events.listeners.append(self._server.add)
        self._sample()

    async def close(self) -> None:
        """Send the last events, and stop the server."""
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            await self._server.stop()

    # ---- samples ----

    def _sample(self) -> None:
        server, job = self._server, self.job
        assert server is not None
        try:
            self._watch(server.has_clients)
            now = {"time": round(job.machine.time(), 3), "ranks": self._activity.sample(job.loop.time(), self._facts())}
            server.sample({**now, "status": self.describe()} if server.has_clients else now)
        except Exception as error:
            _log.error('internal error: where=dashboard error="%r". The page shows no states any more', error,
                       exc_info=error)  # fmt: skip
            server.sample({"time": job.machine.time(), "ranks": []})  # so that no client gets an old sample
            return
        self._timer = job.loop.call_later(_SAMPLE_S, self._sample)

    def _watch(self, has_clients: bool) -> None:
        """Make the hosts report their workers' activity while a client is connected, and stop that afterwards."""
        if self.job.remote is not None:
            for agent in self.job.remote.reachability.living():
                agent.watch_activity(has_clients)

    def _facts(self) -> list[RankFacts]:
        manager = self.job.manager
        current = None if manager is None else manager.broker.versions.current
        if manager is None or current is None:
            return []
        processes = {(p.peer, p.incarnation): p for p in manager.processes if p.peer is not None}
        awaits: dict[int, list[int]] = {}
        for key, waiting in manager.hanging.waited_for(processes).items():
            for rank in waiting:
                awaits.setdefault(rank, []).append(processes[key].rank)
        sleeping = manager.broker.facts.sleeping(current.version)
        facts = {
            rank: RankFacts(rank, worker, failed="its process has ended") for rank, worker in enumerate(current.workers)
        }
        for process, standing in _of_ranks(manager):
            if standing is Standing.MEMBER or process.rank not in facts:
                facts[process.rank] = self._of(process, manager, standing, process.rank in sleeping, awaits)
        return [facts[rank] for rank in sorted(facts)]

    def _of(
        self, process: Process, manager: WorkerManager, standing: Standing, sleeps: bool, awaits: dict[int, list[int]]
    ) -> RankFacts:
        peer, incarnation, rank = process.peer, process.incarnation, process.rank
        assert peer is not None
        facts = manager.broker.facts
        step, _, ended_ago_s = facts.progress(peer, incarnation) or (None, None, None)
        is_ready = manager.broker.is_ready(peer, incarnation)
        is_member = standing is Standing.MEMBER
        failed = facts.gave_up(peer, incarnation) or process.killed_because
        remote = self.job.remote
        agent = None if remote is None else remote.agents.get(process.host)
        return RankFacts(
            rank, peer, process.pid, None if agent is None else agent.memory.get(process.key),
            failed=failed or ("it has failed" if process.state in _FAILED else ""),
            note="" if is_ready else "starts its program",
            joins=not is_member or not is_ready,
            stopped=manager.hanging.is_stopped(process),
            step=step, ended_ago_s=ended_ago_s, sleeps=sleeps and is_member, awaits=sorted(awaits.get(rank, ())),
            doing=facts.doing(peer, incarnation), report=self.job.statistics.latest.get(rank) if is_member else None,
        )  # fmt: skip

    # ---- the server's requests ----

    def status(self) -> dict[str, Any]:
        return self.describe()

    async def obey(self, command: Resize | Evict | Stop) -> str:
        if self.job.course.is_over:
            raise CommandRefused("the job is already ending")
        if isinstance(command, Stop):
            self.stop()
            limit_s = self.job.options.grace_period_s
            return f"the job ends; its workers have {limit_s:g} s to write a checkpoint (-grace-period)"
        if not self.job.options.watch:
            raise CommandRefused("the job's workers can't change, because the job runs without -w; start it with -w")
        if not self.job.has_begun or self.job.begun.url is None:
            raise CommandRefused("the job hasn't begun yet; try again once its workers run")
        url, secret = self.job.begun.url, self.job.begun.secret

        def write() -> str:
            store = open_store(url, secret)
            if isinstance(command, Resize):
                return write_size(store, command.workers)
            return write_without(store, command.rank, command.peer)

        try:
            return await self.job.machine.in_thread(write)
        except (ConfigServerError, ValueError) as error:
            raise CommandRefused(str(error)) from None


def _of_ranks(manager: WorkerManager) -> Iterator[tuple[Process, Standing]]:
    """Yield the processes that have a rank, members first."""
    found = [(process, manager.processes.standing(process)) for process in manager.processes]
    for wanted in (Standing.MEMBER, Standing.JOINING):
        yield from (each for each in found if each[1] is wanted)
