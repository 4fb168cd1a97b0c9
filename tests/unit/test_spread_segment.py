"""The memory of a version over several hosts, which is closed at any moment while it is made."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.channel import LocalChannel
from ms_kungfu.launcher.controller.remote_agent import RemoteAgent
from ms_kungfu.launcher.controller.segments import SpreadSegment
from ms_kungfu.launcher.state.stuck import StuckWatch, stuck_among, stuck_sure_s, told_each_s
from ms_kungfu.launcher.wire import messages as m

HERE, THERE = "10.0.0.1", "10.0.0.2"
CLUSTER = Cluster(tuple(PeerID(host, 10000) for host in (HERE, THERE)), (), 5)


class AgentHandle:
    def __init__(self, name: str) -> None:
        self.name, self.lost = name, ""
        self.segments: dict[int, Any] = {}
        self.apart: dict[Any, str] = {}
        self.sent: list[type] = []

    def send(self, message: object) -> None:
        self.sent.append(type(message))


@pytest.mark.parametrize("error", ["", "no memory"])
@pytest.mark.parametrize("turns", range(10))
def test_nothing_is_left_of_a_version_that_is_closed_while_it_is_made(turns: int, error: str) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        agents = {name: AgentHandle(name) for name in (HERE, THERE)}
        owner: Any = SimpleNamespace(
            agents=agents, lease=None, in_loop=loop.call_soon, was_made=lambda: None, machine=None
        )
        segment = SpreadSegment(owner, CLUSTER, 1, recovers=True)
        await asyncio.sleep(0.01)
        segment.was_made(HERE, "")
        segment.was_made(THERE, error)
        for _ in range(turns):
            await asyncio.sleep(0)
        segment.close()
        await asyncio.sleep(0.01)
        for agent in agents.values():
            assert agent.sent[0] is m.Make
            assert agent.sent[-1] is m.Close
            assert agent.segments == {}
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_single_report_confirms_no_rank() -> None:
    """Rank 1 has said that it waits for rank 0, overdue, and its launcher gets no core from then on."""
    now, sure_s = 100.0, stuck_sure_s(60.0)
    agents = {name: AgentHandle(name) for name in (HERE, THERE)}
    owner: Any = SimpleNamespace(
        agents=agents, lease=None, stuck_sure_s=sure_s, machine=SimpleNamespace(monotonic=lambda: now)
    )
    segment = SpreadSegment(owner, CLUSTER, 1, recovers=True, is_made=True)
    watch: StuckWatch[int] = StuckWatch(sure_s)

    def confirmed() -> list[int]:
        return watch.look(now, stuck_among({0, 1}, segment.awaited()))  # type: ignore[arg-type]

    segment.note_waits(THERE, [(1, -1, True)])
    for _ in range(40):
        segment.note_waits(HERE, [])
        assert confirmed() == []
        now += sure_s / 10
    # A host that tells as often as it should does confirm.
    for _ in range(40):
        segment.note_waits(THERE, [(1, -1, True)])
        segment.note_waits(HERE, [])
        found = confirmed()
        now += told_each_s(1.0, 60.0)
    assert found == [0]


def test_request_without_an_answer_is_answered_by_none() -> None:
    async def run() -> None:
        def serve(asker: Any, asked: m.FixCores) -> None:
            if asked.each == 1:
                raise RuntimeError("a bug")
            asker.send(m.CoresFixed(asked.each))
            asker.end()

        owner: Any = SimpleNamespace(options=SimpleNamespace(peer_timeout_s=None))
        workers: Any = SimpleNamespace(broker=SimpleNamespace(serve=serve))
        channel, host = LocalChannel.pair()
        agent = RemoteAgent(owner, channel, m.Registration(HERE, "1", "2", {}, [0], None, ()), None)
        for number, each in ((5, 1), (6, 3)):
            agent.hear(workers, m.Asks(number, m.FixCores(each)))
        assert await host.receive(m.FROM_CONTROLLER) == m.Answer(5, None)
        assert await host.receive(m.FROM_CONTROLLER) == m.Answer(6, m.CoresFixed(3))
        assert agent._asking == {}

    asyncio.run(run())


def test_cores_are_divided_as_their_host_has_them_by_now() -> None:
    """A cpuset may be rewritten while the job runs."""

    async def run() -> None:
        owner: Any = SimpleNamespace(options=SimpleNamespace(peer_timeout_s=None))
        workers: Any = SimpleNamespace(hanging=SimpleNamespace(look_at=lambda *_: None))
        channel: Any = None
        agent = RemoteAgent(owner, channel, m.Registration(HERE, "1", "2", {}, [0, 1, 2, 3], None, ()), None)
        assert agent.shares.of(2) == [[0, 1], [2, 3]]
        agent.hear(workers, m.Looked(1.0, (0,), {}))
        assert agent.shares.of(2) == [[0], [0]]

    asyncio.run(run())
