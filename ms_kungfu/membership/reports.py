"""Send this worker's reports for the job's event log (`ms_kungfu.job_events`), and measure how long activities take.

1. Sending a report never waits and never raises an error. The worker uses the connection with which it joined. If that
   connection can't accept the report immediately, the report is lost. A process without a launcher reports nothing.
2. A report's values always pass the launcher's checks, whatever values the program passes. After a failed check, the
   launcher would close the connection, which the worker needs to adopt the next cluster version.
   (`test_any_reported_value_is_read`.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ms_kungfu.launcher.wire.messages import ACTIVITIES
from ms_kungfu.membership.member import Member, current
from ms_kungfu.membership.timeline import traced

_MOST_CHARACTERS = 4096


def report(event: str, **values: Any) -> None:
    """Report an event of this worker, given the tag and the fields of a `job_events.WorkerEvent`; thread-safe."""
    _send({"events": [{"event": event, **values}]})


def report_steps(values: dict[str, Any]) -> None:
    """Report this worker's steps (`job_events.StepReport`)."""
    _send({"steps": values})


def _send(values: dict[str, Any]) -> None:
    member = current()
    if member.self_id is not None and member.has_broker:
        who = {"type": "report", "peer": str(member.self_id), "incarnation": member.incarnation}
        member.broker().report({**who, **_readable(values)})


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _readable(each) for name, each in value.items()}
    return [_readable(each) for each in value] if isinstance(value, (list, tuple)) else value


def monotonic() -> float:
    """Return the time in seconds on a clock that doesn't count times when this process was stopped."""
    return current().ports.monotonic()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show this block on the live page and in the trace as the activity `what`, which is in `ACTIVITIES`."""
    member = current()
    before = member.activity
    _note_activity(member, ACTIVITIES.index(what))
    try:
        with traced(what):
            yield
    finally:
        _note_activity(member, before)


def _note_activity(member: Member, activity: int) -> None:
    member.activity = activity
    if member.cluster is not None and not member.deferred:  # the call would make a joining worker join
        member.core.note_activity(activity)


@contextmanager
def spending(what: str) -> Iterator[None]:
    """Do the same as `doing`, and count this block's time as spent on `what`, which is "data" or "checkpoint"."""
    member = current()
    clock = member.ports.monotonic
    began = clock()
    try:
        with doing(what):
            yield
    finally:
        count_spent(what, clock() - began)


def count_spent(what: str, seconds: float) -> None:
    """Count `seconds` as spent on `what`, which is in `ACTIVITIES`. The sum never decreases, even with rounding."""
    spent = current().spent
    spent[what] = spent.get(what, 0.0) + seconds
