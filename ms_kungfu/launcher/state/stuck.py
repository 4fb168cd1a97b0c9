"""Find live workers that block the others because of an endless loop or a deadlock in the program.

This module uses no clock and no I/O.

A worker that still counts heartbeats doesn't hang (see `hangs`), but it may never reach the collective in which the
others wait. Each rank that sleeps in a collective writes to shared memory which rank it waits for. When most of the
time until its deadline has passed, the sleeping rank also marks its wait as *overdue*.

1. A *stuck* process is alive and isn't waiting itself, but other processes wait for it, directly or through a chain of
   processes. At least one of these waits is overdue. If ranks wait for each other in a circle, they have called
   different operations, and none of them is stuck. (`test_circle_has_no_stuck_rank`.)

2. The controller acts only if each check within `stuck_sure_s` seconds has found the process stuck. So a rank that
   reaches the collective in this time isn't considered stuck. A host's report expires within this time, so a host
   whose launcher gets no core can't confirm that a rank is stuck. (`test_rank_that_arrives_is_not_confirmed`,
   `test_single_report_confirms_no_rank`.)

3. From the decision to end a stuck process until the process has ended, the other ranks don't time out
   (`Board::SetEnding`). Otherwise, they would fail because they wait for a rank that the controller is about to end.
   If that rank reaches the collective before it is ended, no wait is overdue any more, and the rank continues.

If the ranks are on several hosts, a rank waits for its host's inter-host transport. While no rank waits for the
transport, the transport counts as waiting for its host's ranks. While a rank waits for the transport, the transport
counts as waiting for the other hosts' transports, unless it is reported to wait for a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_ALL_TRANSPORTS = ""  # no host has this name
_SURE_S = 1.2
_LOOK_SHARE = 0.4  # the longest interval between a host's reports, as a fraction of `stuck_sure_s`


def stuck_sure_s(timeout_s: float) -> float:
    """Return the seconds during which every check must find a rank stuck. `timeout_s`: the timeout of a collective."""
    return min(_SURE_S, timeout_s / 8)


def told_each_s(period_s: float, timeout_s: float) -> float:
    """Return the interval in seconds at which a host reports on its ranks.

    The interval is `period_s`, or shorter, so that a host reports at least twice before a rank is confirmed as stuck.
    """
    return min(period_s, _LOOK_SHARE * stuck_sure_s(timeout_s))


def stuck_among(alive: Collection[K], waits: Iterable[tuple[K, K, bool]]) -> dict[K, list[K]]:
    """Return each stuck process, with the overdue processes that wait because of it.

    The running time is linear in the number of waits if one process is stuck.

    Args:
        alive: the processes that the launcher hasn't declared dead.
        waits: tuples (sleeping process, awaited process, whether the wait is overdue). Inter-host transports may be in
            `waits`, but are never in `alive`.
    """
    sleepers: dict[K, list[K]] = {}  # awaited process -> the processes that wait for it
    asleep: set[K] = set()
    overdue: dict[K, None] = {}
    for sleeper, awaited, is_overdue in waits:
        sleepers.setdefault(awaited, []).append(sleeper)
        asleep.add(sleeper)
        if is_overdue and sleeper in alive:
            overdue[sleeper] = None
    stuck: dict[K, list[K]] = {}
    for awaited in sleepers:
        if awaited in asleep or awaited not in alive or not overdue:
            continue
        passed, left = {awaited}, [awaited]
        while left:
            for sleeper in sleepers.get(left.pop(), ()):
                if sleeper not in passed:
                    passed.add(sleeper)
                    left.append(sleeper)
        if because_of_it := [each for each in overdue if each in passed]:
            stuck[awaited] = because_of_it
    return stuck


def waits_between_hosts(
    reports: Mapping[str, Sequence[tuple[int, int, bool]]], ranks: Mapping[str, Collection[int]]
) -> list[tuple[int | str, int | str, bool]]:
    """Return the waits in a cluster version that spans several hosts, in the format of `stuck_among`.

    If a transport waits for the other transports, the result says that the transport waits for `_ALL_TRANSPORTS`, and
    that `_ALL_TRANSPORTS` waits for each transport. So the result contains a few entries per host instead of one entry
    per pair of hosts.

    Args:
        reports: the waits that each host has reported for its own ranks. In a report, -1 is the host's
            transport. The result contains the host's name instead.
        ranks: the ranks of each host.
    """
    waits: list[tuple[int | str, int | str, bool]] = [(_ALL_TRANSPORTS, host, False) for host in reports]
    for host, own in reports.items():
        waits += [(host if a < 0 else a, host if b < 0 else b, is_overdue) for a, b, is_overdue in own]
        if any(sleeper < 0 for sleeper, *_ in own):
            continue
        # A transport has nothing to exchange before a rank on its host waits for it.
        is_idle = not any(awaited < 0 for _, awaited, _ in own)
        waits += [(host, other, False) for other in (ranks[host] if is_idle else (_ALL_TRANSPORTS,))]
    return waits


class StuckWatch(Generic[K]):
    """Report processes that were stuck in each check for `sure_s` seconds."""

    def __init__(self, sure_s: float) -> None:
        self._sure_s = sure_s
        self._since: dict[K, float] = {}

    def look(self, now: float, found: Collection[K]) -> list[K]:
        self._since = {each: self._since.get(each, now) for each in found}
        return [each for each, since in self._since.items() if now - since >= self._sure_s]


def stuck_reason(waiting: Sequence[int], variable: str, limit_s: float) -> str:
    """Return why the controller killed a worker that the ranks in `waiting` wait for.

    `variable`: the environment variable that sets the time limit `limit_s` of a wait.
    """
    ranks = ", ".join(map(str, waiting))
    wait = f"rank {ranks} waits" if len(waiting) == 1 else f"ranks {ranks} wait"
    limit = f"{limit_s:g} s of {variable}"
    return f"did not reach the collective in which {wait} and was killed before the {limit} were over"
