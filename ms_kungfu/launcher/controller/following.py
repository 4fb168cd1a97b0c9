"""Warnings, with likely reasons, about programs that don't join the job or don't adopt a prepared cluster version."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Callable

from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.policy import Standing

_log = logging.getLogger(__name__)
_UNFOLLOWED_S = 30.0  # time for members to adopt a change; their first step may take that long
_MUST_JOIN_S = 60.0
_TRAINS_S = 2.0  # a job that ends earlier hasn't trained, because importing MindSpore alone takes that long


@dataclass(eq=False)
class FollowWatch:
    """The part of a `WorkerManager` that warns if members don't adopt a change. It runs in the manager's event loop.

    It watches only the job's first change. Once a change has been committed, it logs no more warnings.
    """

    broker: Broker
    processes: ProcessTable
    is_over: Callable[[], bool]
    awaits_store: Callable[[], bool]
    _follows: bool = False  # whether the members have ever adopted a change
    _steps_before: list[int] = field(default_factory=list)  # each member's last step when the change was prepared
    _timer: asyncio.TimerHandle | None = None

    def committed(self) -> None:
        self._follows = True

    def prepared(self, version: int) -> None:
        if self._timer is None and not self._follows:
            self._steps_before = self._steps_of_members()
            self._look_later(version, frozenset())

    def _look_later(self, version: int, logged: frozenset[str]) -> None:
        """Look again after `_UNFOLLOWED_S`. `logged`: the workers that an earlier warning has listed as not joined."""
        self._timer = asyncio.get_running_loop().call_later(_UNFOLLOWED_S, self._look, version, logged)

    def _look(self, version: int, logged: frozenset[str]) -> None:
        if self._follows or self.is_over():
            return
        # the members can't adopt the version before the store answers, and the outage is logged already
        if self.awaits_store():
            self._look_later(version, logged)
            return
        absent = frozenset(process.who for process in self._members_yet_to_join())
        if absent - logged:
            _log.warning(
                'change waits: version=%d not_joined="%s". These members of the current cluster have not '
                "joined it yet. A worker joins at its first collective, or when it begins to train",
                version, ", ".join(sorted(absent)),
            )  # fmt: skip
        if absent:  # no member can check for a change before all have joined
            self._look_later(version, logged | absent)
            return
        steps = self._steps_of_members()
        if steps and max(steps) == max(self._steps_before, default=0):
            _log.warning(
                'change waits: version=%d seconds=%g step=%d. No worker has finished a step in this time. '
                "Workers adopt a change at the end of a step. The first step includes the compilation. The event "
                "\"outside steps\" in a worker's log names the line that its program is running",
                version, _UNFOLLOWED_S, max(steps),
            )  # fmt: skip
        elif steps:
            _log.warning(
                "change waits: version=%d seconds=%g step=%d. The workers have not adopted it. Workers adopt a change "
                "at the end of a step. With ElasticTraining.epochs() and no dataset=, they adopt it at the end of "
                "each epoch except the last; in a loop under --msrun, at the end of a pass: docs/elastic-training.md",
                version, _UNFOLLOWED_S, max(steps),
            )  # fmt: skip
        else:
            _log.warning(
                "change waits: version=%d seconds=%g. No worker has reported a step. %s A program adopts changes if "
                "KungFuElasticCallback, ElasticTraining or --msrun counts its steps; otherwise it may train, but new "
                "workers wait until the job ends, or until `kungfu-run resize` requests the current size again: "
                "docs/change-a-program.md. If the program is still preparing, the event \"outside steps\" in a "
                "worker's log names its line",
                version, _UNFOLLOWED_S, policy.FORGOTTEN,
            )  # fmt: skip

    def _steps_of_members(self) -> list[int]:
        """Return the last step of each member that has begun to train, or 0 if it hasn't finished a step."""
        members = [p for p in self.processes.of_standing(Standing.MEMBER) if p.peer is not None]
        found = [self.broker.facts.progress(p.peer, p.incarnation) for p in members if p.peer is not None]
        return [progress[0] for progress in found if progress is not None]

    def _members_yet_to_join(self) -> list[Process]:
        members = self.processes.of_standing(Standing.MEMBER)
        return [p for p in members if p.peer is not None and not self.broker.is_ready(p.peer, p.incarnation)]


@dataclass(eq=False)
class CopiesWatch:
    """Warn once if several workers run and none has joined the job.

    Then either each worker trains separately, or all workers are still starting. Workers that exit too early to have
    trained cause no warning, because `kungfu-run -np 4 hostname` is not a mistake.
    """

    is_over: Callable[[], bool]
    has_granted: Callable[[], bool] = lambda: True  # whether any worker has joined
    size: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    _since: float | None = None  # when the workers were started, or None if the warning has been logged

    def begin(self, broker: Broker, size: Callable[[], int]) -> asyncio.TimerHandle:
        """Start the timer of the warning, because the workers have been started."""
        self.has_granted, self.size, self._since = broker.has_granted, size, self.clock()
        return asyncio.get_running_loop().call_later(_MUST_JOIN_S, self.warn)

    def warn(self, ended: bool = False) -> None:
        if self.is_over() or self._since is None or self.has_granted():
            return
        size, seconds = self.size(), self.clock() - self._since
        if size > 1 and seconds >= _TRAINS_S:
            self._since = None
            _log.warning("misuse: check=join. %s", policy.copies(size, seconds, ended))
