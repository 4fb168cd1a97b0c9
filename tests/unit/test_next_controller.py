"""How a host looks for the next controller. The store is a stand-in, which says when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from ms_kungfu.cluster_store import LeadershipState, StoreFullError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.agent import succession


def look_for_the_next_controller(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[int], LeadershipState]
) -> tuple[int, str]:
    """How a host ends whose store gives these answers, one in 20 s, where it is patient for 60 s."""
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
        in_thread=in_thread, environ={"KUNGFU_JOIN_TIMEOUT": "60"}, time=lambda: 0.0,
        open_leadership=lambda url, timeout_s: SimpleNamespace(look=answer),
    )  # fmt: skip
    b = SimpleNamespace(name="b")
    options: Any = SimpleNamespace(
        host=b, config_server="etcd://e/job", host_timeout_s=8.0, hosts=SimpleNamespace(head=SimpleNamespace(name="a"))
    )
    departure: Any = SimpleNamespace(exit_code=1, is_leaving=False)
    nothing: Any = None
    search = succession.Succession(
        options, machine, departure, nothing, leads=lambda: False, call_itself=nothing,
        end=lambda *how: ends.append(how), has_ended=lambda: bool(ends), since=7,
    )  # fmt: skip
    loop = Loop()
    assert loop.run_until_complete(search.next("the head node a has ended", nothing)) is None
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
    assert "no other host has taken the job" not in why


def test_host_whose_store_refuses_it_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(number: int) -> LeadershipState:
        if number < 20:
            raise ConfigServerError("user 'u' may not read and write")
        return LeadershipState()

    code, why = look_for_the_next_controller(monkeypatch, look)
    assert code == 1
    assert "no other host has taken the job (user 'u' may not read and write)" in why
