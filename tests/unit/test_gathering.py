"""Which hosts a controller counts on. The hosts are stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.gathering import HostGathering
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot


async def no_time() -> float:
    return 0.0


async def all_the_time() -> float:
    return 3600.0


def gathering(**confirmed: bool) -> tuple[HostGathering, dict[str, Any]]:
    """Of hosts a and b."""
    registered = {name: SimpleNamespace(is_confirmed=yes) for name, yes in confirmed.items()}
    hosts = SimpleNamespace(names=("a", "b"), lost=frozenset(), self_name="a")
    options: Any = SimpleNamespace(hosts=hosts, secret="00")
    nothing: Any = None
    return HostGathering(options, nothing, registered, resumes=True), registered


def test_registered_host_is_awaited_until_it_is_confirmed() -> None:
    async def main() -> None:
        found, registered = gathering(a=True, b=False)
        waiting = asyncio.ensure_future(found.gather_again(3600.0, (), no_time))
        await asyncio.sleep(0.01)
        assert not found.is_closed
        registered["b"].is_confirmed = True
        found.news.set()
        await asyncio.wait_for(waiting, 60.0)
        assert found.is_closed

    asyncio.run(main())


def test_host_that_leaves_unconfirmed_is_awaited_again() -> None:
    async def main() -> None:
        found, registered = gathering(a=True, b=False)
        waiting = asyncio.ensure_future(found.gather_again(3600.0, (), no_time))
        await asyncio.sleep(0.01)
        del registered["b"]
        found.news.set()
        await asyncio.sleep(0.01)
        assert not found.is_closed
        assert found.missing() == ("b",)
        registered["b"] = SimpleNamespace(is_confirmed=True)
        found.news.set()
        await asyncio.wait_for(waiting, 60.0)

    asyncio.run(main())


def test_unconfirmed_host_is_not_awaited_for_longer_than_a_missing_one() -> None:
    async def main() -> None:
        found, _ = gathering(a=True, b=False)
        await asyncio.wait_for(found.gather_again(3600.0, (), all_the_time), 60.0)
        assert found.is_closed

    asyncio.run(main())


def test_host_of_a_controller_that_stepped_down_is_not_silent() -> None:
    hosts = tuple(Host(name, 1) for name in "abc")
    second = LeaderSnapshot("j", "a", Cluster((PeerID("a", 10000),)), hosts).taken_by("b")
    left = LeaderSnapshot.from_json(second.left_by("b", ["b", "c"]).to_json())
    assert second.taken_by("c").silent == {"a", "b"}
    assert left.taken_by("c").silent == {"a"}
    assert left.taken_by("c").left_by("c", ["c"]).taken_by("b").silent == {"a"}
    assert left.taken_by("b").taken_by("c").silent == {"a", "b"}, "it took the lease again, and lost it"
    assert second.left_by("b", ["a", "b"]).taken_by("c").silent == frozenset()
