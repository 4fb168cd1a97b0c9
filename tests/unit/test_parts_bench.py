"""`python -m benchmarks parts`: the shares of a step's parts, from a trace."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import parts
from ms_kungfu.launcher.state.timeline import TraceEvent

STEP_US = 10_000.0


def event(name: str, begin: float, dur: float, cat: str = "program", **args: Any) -> TraceEvent:
    return TraceEvent("X", name, 1, 1, begin, dur, cat, args=args)


def step(number: int) -> list[TraceEvent]:
    """A step of 10 ms with a part of each kind. The callback has the agreement, the ledger and a wait in it."""
    begin = number * STEP_US
    return [
        event("step", begin, STEP_US, "step"),
        event("data", begin + 100, 700),
        event("all_reduce gradients", begin + 5000, 900, "operation", waiting_us=400.0),
        event("elastic callback", begin + 8000, 1500),
        event("wait for MindSpore", begin + 8010, 250),
        event("all_reduce kungfu/step", begin + 8300, 300, "operation", waiting_us=200.0),
        event("ledger", begin + 8700, 150),
    ]


def test_each_part_gets_the_time_of_its_own_spans_alone() -> None:
    every = [each for number in range(parts.WARM_UP + 4) for each in step(number)]
    every.append(event("elastic callback", 500, 9000))  # in a step that doesn't count
    every.append(event("ledger", (parts.WARM_UP + 4) * STEP_US + 10, 9000))  # after the last step
    found = parts.shares(reversed(every))
    assert sum(found.values()) == pytest.approx(1)
    del found["MindSpore"]
    assert {name: round(share * STEP_US) for name, share in found.items()} == {
        "reduction": 500, "agreement": 100, "callback": 1500 - 250 - 300 - 150, "ledger": 150, "data": 700,
        "waiting": 400 + 200,
    }  # fmt: skip


@pytest.mark.parametrize("end", [{"lost": 1}, {"lost": 0, "reason": "64 MB"}])
def test_a_trace_that_lacks_events_is_refused(end: dict[str, Any]) -> None:
    every = [each for number in range(parts.WARM_UP + 4) for each in step(number)]
    every.append(TraceEvent("M", "kungfu_end", 1, 1, args=end))
    with pytest.raises(ValueError, match="lacks events"):
        parts.shares(every)


def test_a_trace_without_enough_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no step after the first 5"):
        parts.shares(each for number in range(parts.WARM_UP) for each in step(number))
