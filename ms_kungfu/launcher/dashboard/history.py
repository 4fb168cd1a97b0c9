"""The events of a job that the dashboard sends to a client when it connects. The functions here have no side effects.

1. At most `most` events are kept. If there are more, the history is thinned: in the older half, every two successive
   statistics events are merged into one event that covers the time of both. This doesn't change sums over all
   statistics. If there are still too many events, the oldest ones are dropped, except the events with which each
   controller began. (`test_history_is_bounded_and_keeps_sums`.)

2. A client reads `items` by position. Thinning makes a new list, and a client that is reading the old list reads it to
   the end. So a client gets no step twice. (`test_client_of_a_thinned_history_gets_no_step_twice`.)
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ms_kungfu import job_events as e
from ms_kungfu.launcher.wire.codec import encode

_MOST = 20_000
_ALWAYS_KEPT = (e.LogBegan, e.JobStarted, e.LeaderChanged)
_LEFT = 0.9  # after events are dropped, this fraction of the limit remains


class Item(Struct, frozen=True):
    """An event and its number. `message`: the event as a client gets it."""

    number: int
    event: e.Event

    @property
    def message(self) -> bytes:
        return b"id: %d\ndata: %s\n\n" % (self.number, encode(self.event))


@dataclass
class History:
    """The newest events of a job. `last`: the number of the last event; the next event has the next number."""

    last: int = 0
    most: int = _MOST
    items: list[Item] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._thinned = self.last  # the highest number of an event that was merged or dropped

    def add(self, event: e.Event) -> None:
        self.last += 1
        self.items.append(Item(self.last, event))
        if len(self.items) > self.most:
            self._thin()

    def knows(self, number: int) -> bool:
        """Return whether a client that has got the events up to `number` can continue from `place_after(number)`."""
        return self._thinned <= number <= self.last

    def place_after(self, number: int) -> int:
        """Return the index in `items` of the first event whose number is greater than `number`."""
        return bisect.bisect_right([item.number for item in self.items], number)

    def _thin(self) -> None:
        half = len(self.items) // 2
        self._thinned = self.items[half - 1].number
        items = merged(self.items[:half]) + self.items[half:]
        excess = len(items) - int(_LEFT * self.most)
        if excess > 0:
            kept = []
            for item in items:
                if excess > 0 and not isinstance(item.event, _ALWAYS_KEPT):
                    excess, self._thinned = excess - 1, max(self._thinned, item.number)
                else:
                    kept.append(item)
            items = kept
        self.items = items


def merged(items: Sequence[Item]) -> list[Item]:
    """Merge every other statistics event into the next one of its kind. Return the resulting items."""
    found: list[Item | None] = []
    before: dict[type, int] = {}  # kind -> index of the statistics event that the next event of that kind will absorb
    for item in items:
        kind, event = type(item.event), item.event
        if isinstance(event, (e.Statistics, e.RankStatistics)):
            place = before.pop(kind, None)
            both = None
            if place is not None:
                earlier = found[place]
                assert earlier is not None
                both = _both(earlier.event, event)
            if both is not None and place is not None:
                found[place], item = None, Item(item.number, both)
            else:
                before[kind] = len(found)
        found.append(item)
    return [item for item in found if item is not None]


def _both(one: e.Event, other: e.Event) -> e.Event | None:
    """Return an event that covers the time of both events, or None if the events have different numbers of ranks."""
    if isinstance(one, e.Statistics) and isinstance(other, e.Statistics):
        weights = one.seconds, other.seconds
        steps = one.steps, other.steps
        return replace(
            other,
            seconds=sum(weights),
            steps=sum(steps),
            samples=one.samples + other.samples,
            committed=_total(one.committed, other.committed),
            p50=_mean(one.p50, other.p50, steps),
            p99=_most(one.p99, other.p99),
            **{
                name: getattr(one, name) if getattr(other, name) is None else getattr(other, name)
                for name in ("loss", "learning_rate", "batch", "epoch", "epochs", "total_steps", "noise_scale")
            },
            **{
                name: _mean(getattr(one, name), getattr(other, name), weights)
                for name in ("computing", "reduction", "waiting", "data", "checkpoint")
            },
        )
    if isinstance(one, e.RankStatistics) and isinstance(other, e.RankStatistics) and len(one.p50) == len(other.p50):
        weights = one.seconds, other.seconds
        means = {
            name: [_mean(a, b, weights) for a, b in zip(getattr(one, name), getattr(other, name))]
            for name in ("p50", "computing", "waiting", "data", "checkpoint")
        }
        p99 = [_most(a, b) for a, b in zip(one.p99, other.p99)]
        return replace(other, seconds=sum(weights), p99=p99, **means)
    return None


def _given(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def _total(one: float | None, other: float | None) -> float | None:
    return sum(_given(one, other)) if _given(one, other) else None


def _most(one: float | None, other: float | None) -> float | None:
    return max(_given(one, other), default=None)


def _mean(one: float | None, other: float | None, weights: Iterable[float]) -> float | None:
    pairs: list[Any] = [(value, weight) for value, weight in zip((one, other), weights) if value is not None]
    whole = sum(weight for _, weight in pairs)
    if not pairs:
        return None
    return float(f"{sum(value * weight for value, weight in pairs) / whole:.4g}") if whole else pairs[-1][0]
