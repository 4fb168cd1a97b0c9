"""What is asked about the processes of a host, without any."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.state.policy import Headcount
from ms_kungfu.launcher.state.states import WorkerState

A, B, C = (PeerID("127.0.0.1", 10000 + i) for i in range(3))


def table(*peers, out=(), told=()):
    """All of version 0, but for those that are `out`."""
    broker: Any = SimpleNamespace(
        versions=SimpleNamespace(is_out=lambda peer, incarnation: peer in out, current=Cluster(tuple(peers), (), 0)),
        leaves=SimpleNamespace(told_to_end=set(told)),
    )
    nothing: Any = None

    async def made() -> ProcessTable:  # Python 3.9 makes an asyncio.Event only where an event loop runs
        return ProcessTable(broker, nothing)

    found = asyncio.run(made())
    for key, peer in enumerate(peers):
        found.add(Process(key, str(peer), peer.host, peer, state=WorkerState.RUNNING))
    return found


def test_members_and_leavers_are_counted():
    assert table(A, B, C, out=[B], told=[C]).headcount() == Headcount(members=2, leaving=1, terminated=1)


def test_unkillable_overdue_or_dismissed_worker_is_not_counted():
    for state in (WorkerState.UNKILLABLE, WorkerState.OVERDUE, WorkerState.DISMISSED):
        processes = table(A, B, told=[B])
        processes.get(1).state = state
        assert processes.headcount() == Headcount(members=1, leaving=0, terminated=0), state
