"""When a controller starts and ends prestarted workers. The parts of a `WorkerManager` beside it are stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.controller import prestarted
from ms_kungfu.launcher.controller.prestarted import PrestartedWorkers
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.state.prestarted import Expected
from ms_kungfu.launcher.state.states import WorkerState

CORES = list(range(16))  # four may start at a time
NEWEST = Cluster((PeerID("a", 10000),), slots={"a": 8})


class Job:
    """One host with one worker, and `-standby kept`. `needs`: of each start; `ended`: the numbers of standbys."""

    def __init__(self, kept: int) -> None:
        self.needs: list[int] = []
        self.ended: list[int | None] = []
        self.removed: list[Process] = []
        self.ready: set[int] = set()
        self.started = asyncio.Event()
        broker: Any = SimpleNamespace(requests=SimpleNamespace(ready_standbys=self.ready))
        agents: Any = {"a": SimpleNamespace(shares=Shares(CORES, None))}
        hosts = SimpleNamespace(
            described=lambda cluster: cluster, staying=[SimpleNamespace(name="a")], has_room=lambda size: True
        )
        coordinator: Any = SimpleNamespace(newest=NEWEST, hosts=hosts, finishing=False)
        options: Any = SimpleNamespace(standbys=kept)
        starting: Any = SimpleNamespace(standby=self._start)
        ending: Any = SimpleNamespace(is_over=lambda: False, dismiss=lambda process: self.ended.append(process.standby))
        self.processes = ProcessTable(broker, agents)
        self.prestarted = PrestartedWorkers(
            options, broker, self.processes, agents, coordinator, starting, ending, self.removed.append
        )

    def _start(self, number: int, rank: int, hosts: list[str], cluster: Cluster, needs: int) -> None:
        self.processes.add(Process(number, f"standby.{number}", hosts[rank], rank=rank, standby=number))
        self.needs.append(needs)
        self.started.set()


def test_standby_without_memory_is_started_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestarted, "_LOOK_AGAIN_S", 0.0)

    async def main() -> None:
        job = Job(kept=1)
        job.prestarted.keep()
        assert len(job.needs) == 1
        job.started.clear()
        job.prestarted.no_memory("a", 1, "free_mib=1 worker_mib=2")
        assert [(process.standby, process.state) for process in job.removed] == [(1, WorkerState.EXITED)]
        assert not job.started.is_set()
        await asyncio.wait_for(job.started.wait(), 60.0)
        assert [process.standby for process in job.processes] == [2]

    asyncio.run(main())


def test_refusal_of_an_unknown_standby_changes_nothing() -> None:
    async def main() -> None:
        job = Job(kept=1)
        job.prestarted.keep()
        job.prestarted.no_memory("b", 1, "another host says so")
        job.prestarted.no_memory("a", 7, "it has been ended meanwhile")
        assert job.removed == []
        assert [process.standby for process in job.processes] == [1]

    asyncio.run(main())


def test_standbys_beyond_the_kept_ones_need_free_memory() -> None:
    """For each that starts before them, for themselves, and for one more."""

    async def main() -> None:
        job = Job(kept=1)
        job.prestarted.expect(Expected(NEWEST.version, 3, 4))
        assert job.needs == [0, 3, 4]

    asyncio.run(main())


def test_starting_standby_adds_to_the_memory_of_the_next_one() -> None:
    async def main() -> None:
        job = Job(kept=0)
        job.prestarted.expect(Expected(NEWEST.version, 1, 2))
        job.prestarted.expect(Expected(NEWEST.version, 3, 4))
        assert job.needs == [2, 3, 4]

    asyncio.run(main())


def test_completed_program_leaves_the_kept_standby_that_is_ready() -> None:
    async def main() -> None:
        job = Job(kept=1)
        job.prestarted.expect(Expected(NEWEST.version, 3, 4))
        job.ready.add(2)
        job.prestarted.expect_none()
        assert job.ended == [1, 3]

    asyncio.run(main())
