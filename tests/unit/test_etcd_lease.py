"""What a controller does with its lease, on an event loop. The store is a stand-in."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from ms_kungfu import _run_loop
from ms_kungfu._run_time import MOST_GAP_S, run_time
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.controller.etcd_lease import EtcdLease
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.lost_hosts import Leases

SLOW_S = 0.6  # more than an entry takes without a hold


class Lease:
    since = 1

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.renewed = asyncio.Event()
        self.trouble: ConfigServerError | None = None
        self.calls: list[Any] = []

    def renew(self) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.renewed.set()

    def write(self, document: dict[str, Any]) -> None:
        self.renew()
        self.calls.append(document.get("alive"))

    def leave(self) -> None:
        self.calls.append("leave")


class Machine:
    def __init__(self, takes_s: float = 0.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.takes_s, self.monotonic = takes_s, monotonic

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.takes_s)
        return function()


def held(lease: Lease, machine: Machine, holds: list[bool]) -> EtcdLease:
    term: Any = SimpleNamespace(lease=lease, guard=lambda store: None, snapshot=TAKEN)
    return EtcdLease(term, machine, "etcd://e/job", "a", lambda why: None, lambda: None, holds.append)  # type: ignore[arg-type]


SNAPSHOT: Any = SimpleNamespace(to_json=dict)
TAKEN = LeaderSnapshot("j", "a", Cluster((PeerID("a", 10000),)), (Host("a", 1), Host("b", 1)), before=("b",))


def test_slow_renewal_holds_no_deadline_and_slow_entry_does() -> None:
    async def main() -> None:
        holds: list[bool] = []
        own = held(Lease(lease_s=3600.0), Machine(SLOW_S), holds)
        assert not await own.time_to_ask()
        assert holds == []
        assert await own.write(lambda: SNAPSHOT)
        assert holds == [True, False]

    asyncio.run(main())


def test_renewal_of_over_half_a_lease_holds_the_deadlines() -> None:
    async def main() -> None:
        holds: list[bool] = []
        await held(Lease(lease_s=SLOW_S / 4), Machine(SLOW_S), holds).time_to_ask()
        assert holds == [True, False]

    asyncio.run(main())


def test_version_is_said_once_a_renewal_has_been_answered() -> None:
    async def main() -> None:
        own = held(Lease(lease_s=3600.0), Machine(), [])
        assert not own.may_say(3)
        assert await own.until_it_may_be_said(3, lambda: False)
        assert own.may_say(3)
        assert not own.may_say(4)

    asyncio.run(main())


def test_failed_renewal_holds_the_deadlines_until_one_succeeds() -> None:
    async def main() -> None:
        holds: list[bool] = []
        lease = Lease(lease_s=3600.0)
        own = held(lease, Machine(), holds)
        lease.trouble = StoreUnreachableError("it is away")
        await own.time_to_ask()
        await own.time_to_ask()
        assert holds == [True]
        assert own.store_error is lease.trouble
        lease.trouble = None
        await own.time_to_ask()
        assert holds == [True, False]
        assert own.store_error is None

    asyncio.run(main())


def test_lease_is_released_once_the_snapshot_says_its_host_is_alive() -> None:
    async def main() -> None:
        lease = Lease(lease_s=3600.0)
        own = held(lease, Machine(), [])
        lease.trouble = StoreUnreachableError("it is away")
        stepping = asyncio.ensure_future(own.step_down(["a"]))
        await asyncio.sleep(0.01)
        assert not own.has_stepped_down
        lease.trouble = None
        await asyncio.wait_for(stepping, 60.0)
        assert own.has_stepped_down
        assert lease.calls == [("a",), "leave"]

    asyncio.run(main())


def test_lease_is_renewed_at_once_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on in the store while this host stands still."""
    ahead = 0.0

    def clock() -> float:
        return time.monotonic() + ahead

    monkeypatch.setattr(run_time, "_monotonic", clock)
    run_time()

    async def main() -> None:
        nonlocal ahead
        lease = Lease(lease_s=4 * 3600.0)
        end = held(lease, Machine(monotonic=clock), []).keep(None)
        await asyncio.sleep(0)
        ahead += 3601.0
        await asyncio.wait_for(lease.renewed.wait(), 60.0)
        end()

    _run_loop.run(main())


def test_beats_are_due_at_once_behind_a_pause() -> None:
    """A pause counts as `MOST_GAP_S`."""
    assert Leases(1e6).period_s < MOST_GAP_S
