"""Define a policy that makes changes at predefined steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ms_kungfu._checks import at_least
from ms_kungfu.elastic.policy import Decision, Metrics, Policy
from ms_kungfu.elastic.schedule import Schedule, parse_schedule


class SchedulePolicy(Policy):
    """Make changes at predefined steps.

    Args:
        size: a schedule of sizes, as in `KungFuElasticCallback`: ``"10:2,20:4"``, ``{10: 2}`` or a
            function.
        changes: keyword arguments with values ``{step: value}``. The names may be
            `global_batch_size`, `shards`, `local_batch_size`, `learning_rate`, `strategy` and
            `optimizer`. Step 0 means before the first step. An entry of `shards` requires an entry of
            `global_batch_size` at the same step.

    Raises:
        TypeError: if `changes` contains any other name.
        ValueError: if a `Decision` rejects a value, or a step is negative.
    """

    def __init__(self, size: Schedule | None = None, **changes: Mapping[int, Any]) -> None:
        self._size_after = parse_schedule(size)
        known = ("global_batch_size", "shards", "local_batch_size", "learning_rate", "strategy", "optimizer")
        for name, table in changes.items():
            if name not in known:
                raise TypeError(f"a schedule can't change {name!r}, only size, {', '.join(known)}")
            for step in table:
                at_least(0, step, f"{name}: a step")
        self._changes = {name: dict(table) for name, table in changes.items()}
        for step in {step for table in self._changes.values() for step in table}:
            _ = Decision("a check", **self._changes_at(step))

    def before_train(self, q: Metrics) -> Decision | None:
        """Return the decision for step 0 if, according to `q`, no step has been done yet."""
        return self._at(0) if q.step == 0 else None

    def after_step(self, q: Metrics) -> Decision | None:
        """Return the decision for the step in the metrics `q`."""
        return self._at(q.step)

    def _at(self, step: int) -> Decision | None:
        found = self._changes_at(step)
        size = self._size_after(step)
        if size is not None:
            found["size"] = size
        return Decision(f"the schedule's entry for step {step}", **found) if found else None

    def _changes_at(self, step: int) -> dict[str, Any]:
        return {name: table[step] for name, table in self._changes.items() if step in table}
