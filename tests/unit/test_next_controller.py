"""How a host looks for the next controller. The store is a stand-in, which says when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import LeadershipState, StoreFullError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.agent import succession
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.versions import ClusterVersions

CLUSTER = Cluster((PeerID("b", 10000),))
VERSIONS = ClusterVersions(clusters={0: CLUSTER}, committed=0)
RUNNING = LeadershipState(LeaderSnapshot("j", "a", CLUSTER, (Host("a", 1), Host("b", 1)), VERSIONS).to_json(), 3)


def look_for_the_next_controller(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[int], LeadershipState], controller: Any = None
) -> tuple[int, str]:
    """How a host ends whose store gives these answers, one in 20 s, where it is patient for 60 s.

    `controller`: the one on this host, which has lost its lease.
    """
    monkeypatch.setattr(succession, "_LOOK_S", 0.0)
    looks = 0
    ends: list[tuple[int, str]] = []

    def answer() -> LeadershipState:
        nonlocal looks
        looks += 1
        return look(looks)

    async def in_thread(function: Callable[[], Any]) -> Any:
        return function()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 20.0 * looks

    machine: Any = SimpleNamespace(
        in_thread=in_thread, environ={"KUNGFU_JOIN_TIMEOUT": "60"}, time=lambda: 0.0, monotonic=lambda: 0.0,
        open_leadership=lambda url, timeout_s: SimpleNamespace(look=answer),
    )  # fmt: skip
    b = SimpleNamespace(name="b")
    options: Any = SimpleNamespace(
        host=b,
        config_server="etcd://e/job",
        host_timeout_s=8.0,
        hosts=SimpleNamespace(head=SimpleNamespace(name="a")),
        joins=False,
    )
    departure: Any = SimpleNamespace(exit_code=1, is_leaving=False)
    nothing: Any = None
    search = succession.Succession(
        options, machine, departure, nothing, own=lambda: controller, call_itself=nothing,
        end=lambda *how: ends.append(how), has_ended=lambda: bool(ends), since=7,
    )  # fmt: skip
    host: Any = SimpleNamespace(job="j", workers=SimpleNamespace(exit_codes=lambda: set()))
    loop = Loop()
    assert loop.run_until_complete(search.next("the head node a has ended", host)) is None
    loop.close()
    return ends[0]


@pytest.mark.parametrize("kind", [StoreFullError, StoreUnreachableError])
def test_host_waits_for_a_store_that_is_full_or_away(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    def look(number: int) -> LeadershipState:
        if number < 20:
            raise kind("its database is full, or it is away")
        return LeadershipState()

    code, why = look_for_the_next_controller(monkeypatch, look)
    assert code == 1
    assert "no other host has taken over the job" not in why


def test_host_whose_store_refuses_it_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(number: int) -> LeadershipState:
        if number < 20:
            raise ConfigServerError("user 'u' may not read and write")
        return LeadershipState()

    code, why = look_for_the_next_controller(monkeypatch, look)
    assert code == 1
    assert "no other host has taken over the job (user 'u' may not read and write)" in why


@pytest.mark.parametrize("kind", [StoreFullError, StoreUnreachableError])
def test_host_waits_while_its_own_controller_awaits_the_store(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    code, why = look_for_the_next_controller(
        monkeypatch,
        lambda number: RUNNING if number < 20 else LeadershipState(),
        SimpleNamespace(store_error=kind("its database is full, or it is away")),
    )
    assert code == 1
    assert "no other host has taken over the job" not in why


@pytest.mark.parametrize(
    ("error", "reason"), [(None, ""), (ConfigServerError("user 'u' may not write"), " (user 'u' may not write)")]
)
def test_host_ends_if_its_own_controller_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: ConfigServerError | None, reason: str
) -> None:
    code, why = look_for_the_next_controller(monkeypatch, lambda number: RUNNING, SimpleNamespace(store_error=error))
    assert code == 1
    assert f"no other host has taken over the job{reason};" in why
