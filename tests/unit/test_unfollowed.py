"""Warnings of a prepared version that the members don't follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.controller.following import FollowWatch
from ms_kungfu.launcher.controller.processes import Process


@pytest.mark.parametrize("awaits_store", [True, False])
def test_program_is_not_blamed_while_the_store_is_away(awaits_store: bool, caplog: pytest.LogCaptureFixture) -> None:
    broker: Any = SimpleNamespace(
        facts=SimpleNamespace(progress=lambda peer, incarnation: (13, 0.1, 0.0)),
        is_ready=lambda peer, incarnation: True,
    )
    member = Process(0, "", "a", PeerID("a", 10000))
    processes: Any = SimpleNamespace(of_standing=lambda standing: [member])
    watch = FollowWatch(broker, processes, lambda: False, lambda: awaits_store)
    looks = []
    watch._look_later = lambda *told: looks.append(told)
    with caplog.at_level("WARNING", "ms_kungfu"):
        watch._look(3, frozenset())
    assert ("step=13. The workers have not adopted it" in caplog.text) == (not awaits_store)
    assert len(looks) == awaits_store, "it looks again"


@pytest.mark.parametrize(("before", "after", "said"), [
    ([13, 13], [13, 13], "step=13. No worker has finished a step in this time"),
    ([13, 13], [14, 13], "step=14. The workers have not adopted it"),
    ([], [1, 1], "step=1. The workers have not adopted it"),
    ([], [0, 0], "step=0. No worker has finished a step in this time"),
    ([], [], "No worker has reported a step. Did you forget KungFuElasticCallback"),
])  # fmt: skip
def test_warning_of_an_unfollowed_change_fits_the_steps(
    before: list[int], after: list[int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = iter([before, after])
    watch = FollowWatch(None, None, lambda: False, lambda: False)  # type: ignore[arg-type]
    watch._steps_of_members = lambda: next(told)  # type: ignore[method-assign]
    watch._members_yet_to_join = list  # type: ignore[method-assign,assignment]
    watch._look_later = lambda *_: None  # type: ignore[method-assign]
    with caplog.at_level("WARNING", "ms_kungfu"):
        watch.prepared(3)
        watch._look(3, frozenset())
    (record,) = caplog.records
    assert said in record.getMessage()
