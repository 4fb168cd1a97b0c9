"""What each rank is doing now, for the live page. The functions here have no side effects.

1. If steps are short, a rank's state is the activity that took most of the last second, according to the worker's own
   report. A snapshot would only show what the rank happens to be doing. If the last step ended longer ago, the state is
   what shared memory shows at this moment. (`test_state_of_short_steps_is_where_the_time_went`.)

2. The page shows that a rank waits for the process at the end of its chain of waits (`stuck.stuck_among`). If steps are
   short, the page instead shows that the rank waits for the rank with the smallest fraction of time in operations. That
   rank waits for no other rank (`statistics`). (`test_rank_waits_for_the_one_that_waits_least`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from ms_kungfu.cluster import PeerID
from ms_kungfu.job_events import StepReport
from ms_kungfu.launcher.wire.messages import Doing

_SHORT_S = 1.0  # steps count as short if the last step ended at most this long ago
_LONG_S = 1.0  # an activity that has lasted this long is shown as the rank's state, even if steps were short before
_STATES = {
    "data": "data",
    "checkpoint": "checkpoint",
    "evaluation": "computing",
    "compilation": "compiling",
    "callback": "computing",
}


class RankFacts(Struct, frozen=True):
    """What the controller knows about a rank.

    `pid` and `memory` (in bytes): None if unknown. `failed`: why the rank counts as failed, or "" if it doesn't.
    `note`: text about what the process does. `joins`: whether the rank hasn't joined yet. `stopped`: whether a signal
    has stopped the process. `step` and `ended_ago_s`: the rank's last step, and the seconds since that step ended.
    `sleeps`: whether the rank sleeps in an operation, because it waits for the ranks in `awaits`. `doing`: what the
    rank is doing, or None if no dashboard was open a moment ago. `report`: the rank's last report about its steps.
    """

    rank: int
    peer: PeerID
    pid: int | None = None
    memory: int | None = None
    failed: str = ""
    note: str = ""
    joins: bool = False
    stopped: bool = False
    step: int | None = None
    ended_ago_s: float | None = None
    sleeps: bool = False
    awaits: Sequence[int] = ()
    doing: Doing | None = None
    report: StepReport | None = None

    @property
    def has_short_steps(self) -> bool:
        return self.report is not None and self.ended_ago_s is not None and self.ended_ago_s <= _SHORT_S


class Activity(Struct):
    """Turn facts about ranks into samples. Remember when each rank entered its current state and step."""

    _since: dict[int, tuple[tuple[Any, ...], float]] = field(default_factory=dict)

    def sample(self, now: float, facts: Sequence[RankFacts]) -> list[dict[str, Any]]:
        """Return the list `ranks` of a sample (docs/dashboard.md). `now`: the time in seconds, by any steady clock."""
        in_operations = {each.rank: _share(each.report) for each in facts if each.report and each.has_short_steps}
        before, self._since = self._since, {}
        samples = []
        for each in facts:
            state, operation, waits_for = _state(each, in_operations)
            kind = (each.pid, state, tuple(waits_for), each.step)
            was, since = before.get(each.rank, (None, now))
            since = since if was == kind else now
            if each.doing is not None and each.doing.activity and operation == each.doing.activity:
                since = min(since, now - each.doing.seconds)
            self._since[each.rank] = kind, since
            samples.append(
                {
                    "rank": each.rank, "peer": str(each.peer), "host": each.peer.host, "pid": each.pid,
                    "memory": each.memory, "step": each.step, "state": state, "operation": operation or None,
                    "waits_for": list(waits_for), "seconds": round(now - since, 3),
                }
            )  # fmt: skip
        return samples


def _state(facts: RankFacts, in_operations: dict[int, float]) -> tuple[str, str, Sequence[int]]:
    """Return the rank's state, text about what the rank is doing, and the ranks for which it waits."""
    doing = facts.doing or Doing()
    if facts.failed:
        return "failed", facts.failed, ()
    if facts.joins:
        return "joining", facts.note, ()
    if facts.stopped:
        return "unknown", "stopped by a signal", ()
    if facts.has_short_steps and not (doing.activity and doing.seconds >= _LONG_S):
        return _state_of_short_steps(facts, in_operations)
    if facts.sleeps:
        return ("waiting" if facts.awaits else "reducing"), doing.operations, facts.awaits
    if doing.activity:
        return _STATES[doing.activity], doing.activity, ()
    return "computing", facts.note or ("" if facts.step is not None else "before its first step"), ()


def _state_of_short_steps(facts: RankFacts, in_operations: dict[int, float]) -> tuple[str, str, Sequence[int]]:
    report = facts.report
    assert report is not None
    own, least = in_operations[facts.rank], min(in_operations.values())
    data, checkpoint = ((part or 0.0) / (report.seconds or 1.0) for part in (report.data, report.checkpoint))
    parts = {
        "computing": max(0.0, 1 - own - data - checkpoint),
        "reducing": least,
        "waiting": own - least,
        "data": data,
        "checkpoint": checkpoint,
    }
    state = max(parts, key=lambda name: parts[name])
    waits_for = [rank for rank, share in in_operations.items() if share == least] if state == "waiting" else []
    return state, "", waits_for


def _share(report: StepReport) -> float:
    return min(1.0, report.collectives / report.seconds) if report.seconds else 0.0
