"""Find live workers that block the others because of an endless loop or a deadlock in the program. Pure.

A worker with a heartbeat doesn't hang (`hangs`), but may never reach the collective in which the others wait. Each
sleeping rank writes to shared memory for which rank it waits. When most of its deadline has passed, it also writes
that it is overdue.

1. A *stuck* process is alive, isn't waiting itself, and is at the end of a chain of waits that begins with an overdue
   process. If ranks wait for each other in a circle, they have called different operations, and none of them is stuck.
   (`test_circle_has_no_stuck_rank`.)

2. The controller acts only if, for some time, every look has found the process stuck. So a rank that arrives in that
   time isn't considered stuck. A host's report expires within that time, so a host whose launcher gets no core can't
   confirm that a rank is stuck. (`test_rank_that_arrives_is_not_confirmed`, `test_single_report_confirms_no_rank`.)

3. From the decision until the process has ended, the other ranks don't time out (`Board::SetEnding`). Otherwise they
   would fail because of a rank that is being ended. If that rank arrives before it is ended, no wait is overdue any
   more, and the rank continues.

Between hosts, ranks wait for their host's inter-host transport. If no rank of its host waits for a transport, the
transport waits for its own ranks. If it doesn't wait for a rank of its host, it waits for the other transports.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_ALL_TRANSPORTS = ""  # no host has this name
_SURE_S = 1.2
_FRESH = 0.4  # a report is valid for this fraction of the time for which a rank must stay stuck


def stuck_sure_s(timeout_s: float) -> float:
    """Return for how many seconds every look has to find a rank stuck. `timeout_s`: the timeout of a collective."""
    return min(_SURE_S, timeout_s / 8)


def told_each_s(period_s: float, timeout_s: float) -> float:
    """Return the interval at which a host reports on its ranks: `period_s`, or less if reports would expire sooner."""
    return min(period_s, _FRESH * stuck_sure_s(timeout_s))


def stuck_among(alive: Collection[K], waits: Iterable[tuple[K, K, bool]]) -> dict[K, list[K]]:
    """Return the stuck processes, each with the overdue processes that wait because of it.

    If one process is stuck, the cost is linear in the number of waits.

    Args:
        alive: the processes that the launcher hasn't declared dead.
        waits: (sleeper, the process that it waits for, whether the wait is overdue). Inter-host transports occur in
            `waits`, but never in `alive`.
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
    """Return the waits in a version that spans several hosts.

    `reports`: what each host has reported about its own ranks. In a report, -1 is the host's transport; the result
    uses the host's name instead. `ranks`: the ranks of each host. A transport that waits for other transports waits
    for `_ALL_TRANSPORTS`, which waits for each transport. So there is one pair per host, not one per pair of hosts.
    """
    waits: list[tuple[int | str, int | str, bool]] = [(_ALL_TRANSPORTS, host, False) for host in reports]
    for host, own in reports.items():
        waits += [(host if a < 0 else a, host if b < 0 else b, is_overdue) for a, b, is_overdue in own]
        if any(sleeper < 0 for sleeper, *_ in own):
            continue
        # A transport has nothing to exchange until a rank of its host arrives and waits for it.
        is_idle = not any(awaited < 0 for _, awaited, _ in own)
        waits += [(host, other, False) for other in (ranks[host] if is_idle else (_ALL_TRANSPORTS,))]
    return waits


class StuckWatch(Generic[K]):
    """Report the processes that every look for `sure_s` has found stuck."""

    def __init__(self, sure_s: float) -> None:
        self._sure_s = sure_s
        self._since: dict[K, float] = {}

    def look(self, now: float, found: Collection[K]) -> list[K]:
        self._since = {each: self._since.get(each, now) for each in found}
        return [each for each, since in self._since.items() if now - since >= self._sure_s]


def stuck_reason(waiting: Sequence[int], variable: str, limit_s: float) -> str:
    """Return why the controller killed a worker for which these ranks wait.

    `variable`: the environment variable that sets the limit of their wait.
    """
    ranks = ", ".join(map(str, waiting))
    wait = f"rank {ranks} waits" if len(waiting) == 1 else f"ranks {ranks} wait"
    limit = f"{limit_s:g} s of {variable}"
    return f"did not reach the collective in which {wait} and was killed before the {limit} were over"
