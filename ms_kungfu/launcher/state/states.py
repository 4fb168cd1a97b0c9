"""Define the states of a job, worker, host and cluster version, and the allowed transitions.

The object that owns a state changes it with `to`. A transition that isn't in the table `_NEXT` is a bug in the
launcher, and raises an error that names both states.
"""

from __future__ import annotations

import enum
from typing import TypeVar

S = TypeVar("S", bound="State")


class IllegalTransitionError(RuntimeError):
    """A state must not change as requested, because the transition isn't in the table `_NEXT`."""


class State(enum.Enum):
    """A state. Its value appears in the status document and in the log."""

    def to(self: S, new: S, what: str) -> S:
        """Return `new`, the next state of the object that `what` names.

        Raises:
            IllegalTransitionError: `new` can't follow this state.
        """
        if new not in _NEXT[self]:
            raise IllegalTransitionError(f"{what}: {type(self).__name__} {self.name} -> {new.name}")
        return new


class JobState(State):
    STARTING = "starting"  # agents register, or a new controller takes over
    RUNNING = "running"
    RESIZING = "resizing"  # the desired cluster version is newer than the committed version
    FINISHING = "finishing"  # a member has completed the program: no worker joins any more
    ENDING = "ending"


class WorkerState(State):
    STARTING = "starting"  # the agent hasn't reported the process yet
    RUNNING = "running"
    STUCK = "stuck"  # other ranks have waited too long for the worker, so the launcher has requested its stack
    FAILING = "failing"  # the worker has reported that it can't continue, and is expected to exit
    OVERDUE = "overdue"  # removed from the cluster, and still running after -leave-grace
    DISMISSED = "dismissed"  # no longer needed: SIGTERM has been sent
    KILLED = "killed"  # SIGKILL has been sent
    UNKILLABLE = "unkillable"  # SIGKILL had no effect: the other workers continue without it
    EXITED = "exited"


class NodeState(State):
    ACTIVE = "active"
    DRAINING = "draining"  # its agent got SIGTERM: its workers leave, and no new worker starts on the host
    REMOVED = "removed"  # the host has failed or left


class VersionState(State):
    DESIRED = "desired"  # in the cluster store: its new workers start
    PREPARED = "prepared"  # all its new workers are ready, and its members are notified
    COMMITTED = "committed"  # a member has adopted the version, and the other members follow
    SUPERSEDED = "superseded"  # a newer version takes its place, so it is never committed
    REJECTED = "rejected"  # the job's hosts can't run it


_J, _W, _N, _V = JobState, WorkerState, NodeState, VersionState
_END_OF_WORKER = {_W.OVERDUE, _W.DISMISSED, _W.KILLED, _W.EXITED}
_NEXT: dict[State, set[State]] = {
    _J.STARTING: {_J.RUNNING, _J.ENDING},
    _J.RUNNING: {_J.RESIZING, _J.FINISHING, _J.ENDING},
    _J.RESIZING: {_J.RUNNING, _J.FINISHING, _J.ENDING},
    _J.FINISHING: {_J.ENDING},
    _J.ENDING: set(),
    _W.STARTING: {_W.RUNNING, *_END_OF_WORKER},
    _W.RUNNING: {_W.STUCK, _W.FAILING, *_END_OF_WORKER},
    _W.STUCK: {_W.RUNNING, _W.FAILING, *_END_OF_WORKER},  # RUNNING: no rank waits for the worker any more
    _W.FAILING: {_W.STUCK, *_END_OF_WORKER},  # STUCK: the worker's exit takes so long that others would time out
    _W.OVERDUE: {_W.DISMISSED, _W.KILLED, _W.EXITED},
    _W.DISMISSED: {_W.EXITED},
    _W.KILLED: {_W.UNKILLABLE, _W.EXITED},
    _W.UNKILLABLE: {_W.EXITED},
    _W.EXITED: set(),
    _N.ACTIVE: {_N.DRAINING, _N.REMOVED},
    _N.DRAINING: {_N.REMOVED},
    _N.REMOVED: {_N.ACTIVE},  # a host may come back with -join
    _V.DESIRED: {_V.PREPARED, _V.COMMITTED, _V.SUPERSEDED},
    _V.PREPARED: {_V.COMMITTED, _V.SUPERSEDED},
    _V.COMMITTED: set(),
    _V.SUPERSEDED: set(),
    _V.REJECTED: set(),
}
