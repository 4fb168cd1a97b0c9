"""How a host looks for the next head. The store is a stand-in, which says when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from ms_kungfu.cluster_store import Sitting, StoreFullError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.agent import agent


def look_for_the_next_head(monkeypatch: pytest.MonkeyPatch, look: Callable[[int], Sitting]) -> tuple[int, str]:
    """How a host ends whose store gives these answers, one in 20 s, where it is patient for 60 s."""
    monkeypatch.setattr(agent, "_SEAT_LOOK_S", 0.0)
    looks = 0
    ends: list[tuple[int, str]] = []

    def answer() -> Sitting:
        nonlocal looks
        looks += 1
        return look(looks)

    async def in_thread(function: Callable[[], Any]) -> Any:
        return function()

    machine = SimpleNamespace(
        in_thread=in_thread, environ={"KUNGFU_JOIN_TIMEOUT": "60"},
        open_seat=lambda url, timeout_s: SimpleNamespace(look=answer),
    )  # fmt: skip
    host: Any = SimpleNamespace(
        _relay=SimpleNamespace(hold_deadlines=lambda yes: None), _making={}, _machine=machine, _lease_s=8.0,
        _options=SimpleNamespace(host=SimpleNamespace(name="b"), config_server="etcd://e/job"), _seated=7, _head=None,
        _loop=SimpleNamespace(time=lambda: 20.0 * looks), _ended=SimpleNamespace(done=lambda: bool(ends)),
        _end=lambda *how: ends.append(how), _warn_once=lambda sentence: None, _interrupted=0, _is_leaving=False,
    )  # fmt: skip
    assert asyncio.run(agent.Agent._next_head(host, "a, which has the job, is gone")) is None
    return ends[0]


@pytest.mark.parametrize("kind", [StoreFullError, StoreUnreachableError])
def test_host_waits_for_a_store_that_is_full_or_away(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    def look(number: int) -> Sitting:
        if number < 20:
            raise kind("its database is full, or it is away")
        return Sitting()

    code, why = look_for_the_next_head(monkeypatch, look)
    assert code == 1
    assert "nobody else has it" not in why


def test_host_whose_store_refuses_it_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(number: int) -> Sitting:
        if number < 20:
            raise ConfigServerError("user 'u' may not read and write")
        return Sitting()

    code, why = look_for_the_next_head(monkeypatch, look)
    assert code == 1
    assert "nobody else has it (user 'u' may not read and write)" in why
