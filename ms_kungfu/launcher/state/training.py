"""Derive the progress of a job's training from the job's events, for the status document.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from ms_kungfu import job_events as e

_WINDOW_S = 10.0  # rates are averaged over this time


class TrainingWatch:
    """The latest values of a job's training, and the stalls that haven't ended."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        self._recent: collections.deque[e.Statistics] = collections.deque()
        self._stalls: dict[int, e.StallBegan] = {}  # rank for which the others wait -> its stall

    def add(self, event: e.Event) -> None:
        if isinstance(event, e.Statistics):
            for name in ("step", "loss", "epoch", "epochs", "total_steps"):
                if (value := getattr(event, name)) is not None:
                    self._latest[name] = value
            self._recent.append(event)
            while len(self._recent) > 2 and (event.time or 0.0) - (self._recent[0].time or 0.0) > _WINDOW_S:
                self._recent.popleft()
        elif isinstance(event, e.StallBegan) and event.rank is not None:
            self._stalls[event.rank] = event
        elif isinstance(event, e.StallEnded) and event.rank is not None:
            self._stalls.pop(event.rank, None)
        elif isinstance(event, e.VersionCommitted):
            self._recent.clear()  # the rates belong to the previous cluster size
            self._stalls.clear()  # in the new version a rank may be another worker

    def describe(self, now: float, is_over: bool = False, step: int | None = None) -> dict[str, Any]:
        """Return the fields `training` and `stalls` of the status document.

        `now`: in seconds since 1970. `is_over`: whether the job is ending. If so, the result has no rates and no
        remaining time. `step`: the last step that a member has finished, which is newer than the step in the events;
        None if no member's step is known.
        """
        stalls = [] if is_over else self._told_stalls(now)
        rates = (None, None) if is_over or stalls else self._rates(now)  # a rate predicts nothing during a stall
        latest = self._latest if step is None else {**self._latest, "step": step}
        return {"training": _training(latest, *rates) if self._latest else None, "stalls": stalls}

    def _rates(self, now: float) -> tuple[float | None, float | None]:
        """Return steps and samples per second. The rates decrease if no step has ended for longer than usual."""
        if len(self._recent) < 2:
            return None, None
        began, *rest = self._recent  # the first event covers earlier time, e.g. the program's start
        seconds = (rest[-1].time or 0.0) - (began.time or 0.0)
        idle_s = now - (rest[-1].time or now)
        if idle_s > 2 * max(each.seconds for each in rest):
            seconds += idle_s
        if seconds <= 0:
            return None, None
        samples = sum(each.samples for each in rest)
        rate = sum(each.steps for each in rest) / seconds
        return float(f"{rate:.4g}"), float(f"{samples / seconds:.4g}") if samples else None

    def _told_stalls(self, now: float) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "waiting": stall.waiting,
                "seconds": round(stall.seconds + max(0.0, now - (stall.time or now)), 1),
                "why": stall.reason,
            }
            for rank, stall in self._stalls.items()
        ]


def _training(latest: Mapping[str, Any], steps_per_s: float | None, samples_per_s: float | None) -> dict[str, Any]:
    step, total = latest.get("step"), latest.get("total_steps")
    left_s = None
    if steps_per_s and step is not None and total is not None and total >= step:
        left_s = round((total - step) / steps_per_s, 1)
    names = ("step", "total_steps", "epoch", "epochs", "loss")
    rates = {"steps_per_s": steps_per_s, "samples_per_s": samples_per_s, "left_s": left_s}
    return {**{name: latest.get(name) for name in names}, **rates}
