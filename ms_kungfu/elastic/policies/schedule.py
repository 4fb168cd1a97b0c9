"""Changes at steps that are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ms_kungfu._checks import at_least
from ms_kungfu.elastic.policy import Decision, Metrics, Policy
from ms_kungfu.elastic.schedule import Schedule, parse_schedule


class SchedulePolicy(Policy):
    """What to change once how many steps are done.

    Args:
        size: a schedule of sizes, as `KungFuElasticCallback` takes it: ``"10:2,20:4"``, ``{10: 2}`` or a function.
        global_batch_size, local_batch_size, learning_rate, strategy, optimizer: ``{step: value}``.

    Step 0 is before the first step.
    """

    def __init__(self, size: Schedule | None = None, **changes: Mapping[int, Any]) -> None:
        self._size_after = parse_schedule(size)
        known = ("global_batch_size", "local_batch_size", "learning_rate", "strategy", "optimizer")
        for name, table in changes.items():
            if name not in known:
                raise TypeError(f"a schedule changes size, {', '.join(known)}, not {name!r}")
            for step, value in table.items():
                at_least(0, step, f"{name}: a step")
                _ = Decision("a check", **{name: value})
        self._changes = {name: dict(table) for name, table in changes.items()}

    def before_train(self, q: Metrics) -> Decision | None:
        return self._at(0) if q.step == 0 else None

    def after_step(self, q: Metrics) -> Decision | None:
        return self._at(q.step)

    def _at(self, step: int) -> Decision | None:
        found = {name: table[step] for name, table in self._changes.items() if step in table}
        size = self._size_after(step)
        if size is not None:
            found["size"] = size
        return Decision(f"the schedule's entry for step {step}", **found) if found else None
