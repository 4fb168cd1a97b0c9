"""A checker of traces in Chrome's format, where Perfetto's own trace_processor isn't at hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_ROUNDING_US = 0.002
_KINDS = {"M": {"args"}, "X": {"ts", "dur"}, "i": {"ts", "s"}}


def check_format(events: Iterable[Mapping[str, Any]]) -> None:
    """Fails unless each event is complete, and those of each track lie in each other or apart."""
    tracks = defaultdict(list)
    for event in events:
        assert event["ph"] in _KINDS, event
        assert _KINDS[event["ph"]] <= event.keys(), event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        open_until: list[float] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + _ROUNDING_US:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + _ROUNDING_US, f"overlaps: {event}"
            open_until.append(end)
