"""Merge the traces of a job's workers into one timeline with one clock, and summarize each worker's trace.

This module uses no clock and no I/O.

The offset between two hosts' clocks is found from the collectives that are in the traces of both hosts.

1. A collective ends at a rank only after it has begun at every rank. Suppose that a collective lasts from `b1` to `e1`
   by the first host's clock and from `b2` to `e2` by the second host's clock. Then the second clock is ahead of the
   first by at least `b2 - e1` and at most `e2 - b1`. (`test_offset_of_hosts_is_within_its_error`)
2. Each collective gives a lower and an upper bound of the offset at the time of the collective. At other times, these
   bounds are wider, because the clocks may have drifted apart at the rate `DRIFT`. The offset is the mean of the
   highest lower bound and the lowest upper bound. The error is half of the distance between these two bounds.
   (`test_drifting_clocks_stay_within_the_error`)
3. Two traces contain the same collective if cluster version, name and number are equal. Only collectives whose result
   needs every rank's data are used.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

DRIFT = 2e-4
"""How fast the clocks of two hosts may drift apart, in seconds per second."""

COMM_THREAD = "kungfu-comm"
_MEETS = ("all_reduce ", "all_gather ", "barrier ")
_SAMPLE_US = 50_000.0  # the minimum time between two offsets that are kept
_WAITS = "wait for reductions"
_BEGIN = {"host": str, "job": str, "clock": str, "unix_us": float, "monotonic_us": float}  # args of kungfu_begin
_PARTS = (
    "compute", "reductions", _WAITS, "after reductions", "data", "compile", "checkpoint", "evaluation",
    "state transfer", "join cluster version",
)  # fmt: skip


class TraceEvent(Struct, omit_defaults=True):
    """An event in Chrome's trace format. Its times are in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    s: str = ""
    args: dict[str, Any] = {}


Key = tuple[int, str, int]
Times = tuple[float, float]


@dataclass
class WorkerTrace:
    """The sums and times from one worker's trace. The caller adds each event of the trace once."""

    host: str = ""
    pid: int = 0
    job: str = ""
    clock: str = ""
    unix_us: float = 0.0
    monotonic_us: float = 0.0
    is_known: bool = False  # whether the trace contains `kungfu_begin`, which describes its worker
    lost: int = 0
    is_cut: bool = False  # whether the file has reached its size limit
    ranks: list[int] = field(default_factory=list)  # the worker's rank in each cluster version that it was in
    first_us: float = float("inf")
    last_us: float = 0.0
    steps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # microseconds
    awaited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    operations: int = 0
    operating_us: float = 0.0
    waiting_us: float = 0.0
    meetings: dict[Key, Times] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    _collectives: list[Times] = field(default_factory=list)
    _program_waits: list[Times] = field(default_factory=list)

    def add(self, event: TraceEvent) -> None:
        """Add an event of the trace."""
        if event.ph == "M":
            self._describe(event)
            return
        begin, end = event.ts, event.ts + event.dur
        self.first_us, self.last_us = min(self.first_us, begin), max(self.last_us, end)
        if event.cat == "member":
            self.ranks.append(int(event.args["rank"]))
        elif event.cat == "step":
            self.steps.append(end - begin)
        elif event.cat == "wait":
            self.awaited[int(event.args.get("rank", -1))] += end - begin
        elif event.cat == "operation":
            self._operation(event, begin, end)
        elif event.cat in ("in step", "program"):
            self.parts[event.name] += end - begin
            if event.name == _WAITS:
                self._program_waits.append((begin, end))

    def _describe(self, event: TraceEvent) -> None:
        if event.name == "thread_name":
            self.threads[event.tid] = str(event.args["name"])
        elif event.name == "kungfu_end":
            self.lost, self.is_cut = int(event.args["lost"]), "reason" in event.args
        elif event.name == "kungfu_begin":
            self.is_known, self.pid = True, event.pid
            for name, kind in _BEGIN.items():
                setattr(self, name, kind(event.args[name]))

    def _operation(self, event: TraceEvent, begin: float, end: float) -> None:
        self.operations += 1
        self.operating_us += end - begin
        self.waiting_us += event.args["waiting_us"]
        self._collectives.append((begin, end))
        if self.threads.get(event.tid) != COMM_THREAD:
            self._program_waits.append((begin, end))
        if event.name.startswith(_MEETS):
            self.meetings[(event.args["version"], event.name, event.args["n"])] = (begin, end)

    @property
    def hidden_us(self) -> float:
        """The time in which collectives ran while the program didn't wait for them."""
        return _length(self._collectives) - _common(self._collectives, self._program_waits)

    @property
    def name(self) -> str:
        ranks = list(dict.fromkeys(self.ranks))
        return f"rank {', '.join(map(str, ranks))}" if ranks else "no rank"


def _union(spans: Iterable[Times]) -> list[Times]:
    found: list[list[float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return [(begin, end) for begin, end in found]


def _length(spans: Iterable[Times]) -> float:
    return sum(end - begin for begin, end in _union(spans))


def _common(one: Iterable[Times], other: Iterable[Times]) -> float:
    """Return the total time that is covered by both sets of spans."""
    ours, theirs = _union(one), _union(other)
    common, at = 0.0, 0
    for begin, end in ours:
        while at < len(theirs) and theirs[at][1] <= begin:
            at += 1
        for their_begin, their_end in theirs[at:]:
            if their_begin >= end:
                break
            common += min(end, their_end) - max(begin, their_begin)
    return common


class Offset(Struct, frozen=True):
    """The offset of a clock: by how much the clock is ahead of the timeline's clock.

    Args:
        times: the times at which the offset is known, read from the clock with this offset.
        offsets: the offset at each of these times.
        error_us: the error of the offsets. It is infinite if the offset comes only from the hosts' time of day.
    """

    times: Sequence[float]
    offsets: Sequence[float]
    error_us: float

    def at(self, time_us: float) -> float:
        """Return the offset at `time_us`, which was read from the clock with this offset."""
        right = bisect.bisect(self.times, time_us)
        if right == 0 or right == len(self.times):
            return self.offsets[min(right, len(self.times) - 1)]
        before, after = self.times[right - 1], self.times[right]
        share = (time_us - before) / (after - before)
        return self.offsets[right - 1] + share * (self.offsets[right] - self.offsets[right - 1])


def offset_of(own: Mapping[Key, Sequence[Times]], other: Mapping[Key, Sequence[Times]]) -> Offset | None:
    """Return by how much the other clock is ahead; None if there is no common collective.

    Args:
        own: the begin and end of each collective at each rank that uses the timeline's clock.
        other: the begin and end of each collective at each rank that uses the other clock.
    """
    bounds = []
    for key in own.keys() & other.keys():
        least = max(begin for begin, _ in other[key]) - min(end for _, end in own[key])
        most = min(end for _, end in other[key]) - max(begin for begin, _ in own[key])
        bounds.append((max(end for _, end in other[key]), least, most))
    if not bounds:
        return None
    bounds.sort()
    times = [time for time, _, _ in bounds]
    low = _tightest(times, [bound for _, bound, _ in bounds])
    high = [-bound for bound in _tightest(times, [-bound for _, _, bound in bounds])]
    kept = [0]
    for k, time in enumerate(times):
        if time - times[kept[-1]] >= _SAMPLE_US:
            kept.append(k)
    error = max(abs(high[k] - low[k]) / 2 for k in kept) + DRIFT * _SAMPLE_US
    return Offset([times[k] for k in kept], [(low[k] + high[k]) / 2 for k in kept], error)


def _tightest(times: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """Return, for each time, the highest lower bound that follows from all bounds and the clocks' maximum drift."""
    tightest = list(bounds)
    for k in range(1, len(times)):
        tightest[k] = max(tightest[k], tightest[k - 1] - DRIFT * (times[k] - times[k - 1]))
    for k in range(len(times) - 2, -1, -1):
        tightest[k] = max(tightest[k], tightest[k + 1] - DRIFT * (times[k + 1] - times[k]))
    return tightest


def offsets_of(workers: Sequence[WorkerTrace]) -> dict[str, Offset]:
    """Return the offset of each clock from the first worker's clock.

    Workers on the same machine have the same clock, because all processes of a machine share CLOCK_MONOTONIC.
    """
    by_clock: dict[str, list[WorkerTrace]] = defaultdict(list)
    for worker in workers:
        by_clock[worker.clock].append(worker)
    first, *others = by_clock
    found = {first: Offset([0.0], [0.0], 0.0)}
    own = _meetings(by_clock[first]) if others else {}
    for clock in others:
        offset = offset_of(own, _meetings(by_clock[clock]))
        if offset is None:
            one, other = by_clock[first][0], by_clock[clock][0]
            by_day = (other.monotonic_us - other.unix_us) - (one.monotonic_us - one.unix_us)
            offset = Offset([0.0], [by_day], float("inf"))
        found[clock] = offset
    return found


def _meetings(workers: Iterable[WorkerTrace]) -> dict[Key, list[Times]]:
    found: dict[Key, list[Times]] = defaultdict(list)
    for worker in workers:
        for key, times in worker.meetings.items():
            found[key].append(times)
    return found


def summary_of(worker: WorkerTrace) -> list[str]:
    """Return lines of text that say how a worker spent its time."""
    total = max(0.0, worker.last_us - worker.first_us)
    lines = [f"{worker.name} ({worker.host}, pid {worker.pid}): {total / 1e6:.3g} s"]
    if worker.steps:
        median = sorted(worker.steps)[len(worker.steps) // 2]
        share = _percent(sum(worker.steps), total)
        lines.append(f"  {len(worker.steps)} steps, median {median / 1000:.3g} ms: {share} of the time")
    if shown := [f"{what} {_percent(worker.parts[what], total)}" for what in _PARTS if worker.parts.get(what)]:
        lines.append(f"  {', '.join(shown)} of the time")
    if worker.operations:
        lines.append(
            f"  {worker.operations} collectives, {worker.operating_us / 1e6:.3g} s: waiting for other ranks "
            f"{_percent(worker.waiting_us, worker.operating_us)}, overlapped with the program's work "
            f"{_percent(worker.hidden_us, worker.operating_us)}"
        )
    if worker.awaited:
        rank, most = max(worker.awaited.items(), key=lambda item: item[1])
        awaited = "other hosts" if rank < 0 else f"rank {rank}"
        lines.append(f"  waits most for {awaited}: {_percent(most, sum(worker.awaited.values()))} of its waiting")
    if worker.lost:
        lines.append(f"  {worker.lost} events lost, because the worker recorded them faster than it could write them")
    if worker.is_cut:
        lines.append("  the trace stops at the size limit, before its worker ends; set a higher KUNGFU_TRACE_BYTES")
    return lines


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
