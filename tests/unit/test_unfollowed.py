"""What is said of a version that nobody follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ms_kungfu.launcher.controller.workers import WorkerManager


@pytest.mark.parametrize("awaits_store", [True, False])
def test_program_is_not_blamed_while_the_store_is_away(awaits_store: bool, caplog: pytest.LogCaptureFixture) -> None:
    later: list[Any] = []
    agent: Any = SimpleNamespace(
        _follows=False, _unfollowed=None, _loop=SimpleNamespace(call_later=lambda *call: later.append(call)),
        reports=SimpleNamespace(is_over=False, awaits_store=awaits_store),
        _members_yet_to_join=list, _steps_of_members=lambda: [13],
    )  # fmt: skip
    agent._tell_unfollowed = lambda *told: WorkerManager._tell_unfollowed(agent, *told)
    with caplog.at_level("WARNING", "ms_kungfu"):
        agent._tell_unfollowed(3)
    assert ("at step 13, have not followed it" in caplog.text) == (not awaits_store)
    assert len(later) == awaits_store, "it looks again"
