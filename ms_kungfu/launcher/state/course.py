"""Track the state of a job and the outcome with which it ends. This module uses no clock and no I/O."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.policy import Action, Verdict
from ms_kungfu.launcher.state.states import JobState

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class JobCourse:
    """The state of a job, from its start to its end.

    If workers leave or are replaced, `on_change` is called with the reason. When the job ends, `on_end` is called once.
    The job ends with a `Verdict`, unless the job never started or another host now controls it.
    """

    on_change: Callable[[str], None]
    on_end: Callable[[], None]
    state: JobState = JobState.STARTING
    verdict: Verdict | None = None

    def to(self, state: JobState) -> None:
        if state is not self.state:
            self.state = self.state.to(state, "job")
            _log.debug("job: state=%s", state.value)

    @property
    def is_over(self) -> bool:
        return self.state is JobState.ENDING

    @property
    def has_ended_well(self) -> bool:
        """Return whether the job is complete. A complete job ends the workers that still run."""
        return self.verdict is not None and self.verdict.action is Action.FINISH

    def settle(self, verdict: Verdict) -> bool:
        """Apply a decision about an event to the job as a whole. Return whether the job continues."""
        if self.is_over:
            return False
        if verdict.action in (Action.FINISH, Action.FAIL):
            _log.info('job ends: exit_code=%d reason="%s"', verdict.exit_code, verdict.reason)
            self.end(verdict)
            return False
        if verdict.reason:
            _log.warning('recovery: action=%s reason="%s"', verdict.action.value, verdict.reason)
        if verdict.action in (Action.SHRINK, Action.REPLACE):
            self.on_change(verdict.reason)
        return True

    def end(self, verdict: Verdict | None) -> None:
        if not self.is_over:
            self.to(JobState.ENDING)
            self.verdict = verdict
            self.on_end()

    def interrupted(self, number: int, where: str = "") -> None:
        self.settle(policy.interrupted(number, where))

    def begins(self) -> None:
        """Record that the first cluster version is committed, perhaps by an earlier controller."""
        if not self.is_over:
            self.to(JobState.RUNNING)

    def resized(self, is_newest: bool) -> None:
        """Record that a cluster version is committed. `is_newest`: true if no newer version is desired."""
        if self.state in (JobState.RUNNING, JobState.RESIZING):
            self.to(JobState.RUNNING if is_newest else JobState.RESIZING)

    def resizes(self) -> None:
        """Record that a newer cluster version is desired."""
        self.resized(is_newest=False)

    def finishes(self) -> None:
        """Record that a member has completed the program."""
        if not self.is_over:
            self.to(JobState.FINISHING)
