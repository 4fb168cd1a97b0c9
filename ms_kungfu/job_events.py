"""Every event of a job's event log (docs/event-log.md). A line of `events.jsonl` is one of these as a JSON object.

`python -m ms_kungfu.launcher.wire.events_page` prints docs/events.md from this file. A field at its default is left out
of a line. `VERSION` changes if a reader of older logs would misread a line; a new event, and
a new field with a default, need none. A reader skips events and fields that it doesn't know.
"""

import re
from typing import Annotated, Any, Literal, Optional, Union

from msgspec import Meta, Struct

VERSION = 1
FILE_NAME = "events.jsonl"

Word = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
Code = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Ranks = Annotated[list[Count], Meta(max_length=4096)]
Loss = Union[None, float, Literal["nan", "inf", "-inf"]]
Values = Annotated[list[Optional[float]], Meta(max_length=4096)]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(Struct, tag=_tag, tag_field="event", omit_defaults=True, kw_only=True):
    """What all events have.

    `time`: seconds since 1970, by the controller's clock. `host`, `rank`: what the event is about; the rank is of the
    cluster version that was committed then. `step`: of the training, which counts steps from 1. `reason`: the cause, in
    the words of the log line.
    """

    time: Optional[float] = None
    host: Optional[Word] = None
    rank: Optional[Count] = None
    step: Optional[Count] = None
    reason: Text = ""


# ---- the log and the job ----


class LogBegan(Event, kw_only=True):
    """The first line of a controller, whose `host` this is. `version`: of the format."""

    version: Count
    job: Word
    ms_kungfu: Word


class JobStarted(Event, kw_only=True):
    """The first cluster version is committed, and its workers start. `command`: of each worker."""

    workers: Count
    hosts: Annotated[list[Word], Meta(max_length=4096)]
    command: Text


class JobEnded(Event, kw_only=True):
    """The controller ends the job with this exit code. `workers`: that were members then."""

    exit_code: Code
    workers: Count = 0


class LeaderChanged(Event, kw_only=True):
    """`host` has taken the job over. `before`: the host that controlled it."""

    before: Word


class LeaderLost(Event, kw_only=True):
    """The controller on `host` has stepped down; another host continues the log in a file of its own."""


# ---- hosts and network ----


class HostJoined(Event, kw_only=True):
    """A host has joined the running job. `rejoined`: it was a host of the job before."""

    slots: Count
    rejoined: bool = False


class HostDraining(Event, kw_only=True):
    """The host's launcher got a SIGTERM; its workers leave after their step."""


class HostLeft(Event, kw_only=True):
    """The host has left, and none of its workers is left."""


class HostLost(Event, kw_only=True):
    """The host has failed or isn't reachable. The job goes on without it, or ends."""


class HostsDisconnected(Event, kw_only=True):
    """`host` has reported that it doesn't reach `other`, or cannot exchange anything with the other hosts."""

    other: Word = ""


class StoreLost(Event, kw_only=True):
    """The cluster store (a config server or etcd) doesn't answer. Training goes on, changes wait."""


class StoreRestored(Event, kw_only=True):
    """The cluster store answers again."""


# ---- workers ----


class WorkerStarted(Event, kw_only=True):
    """The process runs. `standby`: its number, if it isn't started for a slot yet."""

    pid: Count
    peer: Word = ""
    standby: Optional[Count] = None


class WorkerRegistered(Event, kw_only=True):
    """The worker is ready: it waits for its slot in the next cluster version that contains it."""

    peer: Word = ""
    standby: Optional[Count] = None


class WorkerJoined(Event, kw_only=True):
    """A worker that was started for a running job has the training state, as it says itself."""

    workers: Count


class WorkerDraining(Event, kw_only=True):
    """The worker may leave the cluster after its step."""

    peer: Word


class WorkerRemoved(Event, kw_only=True):
    """The committed `version` doesn't contain the worker any more. `rank`: its last one."""

    peer: Word
    version: Count


class WorkerExited(Event, kw_only=True):
    """The process has exited as it was expected to: with 0, dismissed, or at the end of the job."""

    exit_code: Optional[Count] = None
    signal: Optional[Count] = None
    peer: Word = ""


class WorkerFailed(Event, kw_only=True):
    """The process has failed: by itself, or because the controller killed it (`reason`) or lost its host.

    `exit_code` or `signal` as the process ended; neither if its host was lost. `decision`: of the controller.
    `standing`: the process's relation to the committed version.
    """

    exit_code: Optional[Count] = None
    signal: Optional[Count] = None
    peer: Word = ""
    pid: Optional[Count] = None
    decision: Literal["continue", "shrink", "replace", "fail", "finish"] = "continue"
    standing: Literal["member", "joining", "leaving", "standby"] = "member"


class FailureSeen(Event, kw_only=True):
    """The survivors have ended the `step` in which they noticed that `rank` has failed, as the lowest living rank says.

    `seconds`: by how much that step took longer than the median of the last ones. `survivors`: the living ranks, which
    waited for it.
    """

    seconds: Seconds
    survivors: Ranks


class StepUndone(Event, kw_only=True):
    """The step doesn't count and is repeated."""


# ---- cluster versions ----


class ResizeRequested(Event, kw_only=True):
    """A cluster version is desired. `by`: the program (a schedule, a policy), the controller after a failure or a
    leave, `kungfu-run evict`, or another client such as `kungfu-run resize`."""

    version: Count
    workers: Count
    workers_before: Optional[Count]
    by: Literal["program", "controller", "evict", "client"]


class ResizeRejected(Event, kw_only=True):
    """The desired version can't be run."""

    version: Count
    workers: Count


class VersionPrepared(Event, kw_only=True):
    """All that is new in the version is ready, and its members may adopt it. `seconds`: since it was requested."""

    version: Count
    seconds: Seconds


class VersionCommitted(Event, kw_only=True):
    """The members adopt the version, after this step. `seconds`: since it was requested."""

    version: Count
    workers: Count
    workers_before: Count
    seconds: Seconds


class Resized(Event, kw_only=True):
    """The members train in the new version, as its lowest rank says. `seconds`: how long they stood for it."""

    version: Count
    workers: Count
    workers_before: Count
    seconds: Seconds


# ---- training ----


class Statistics(Event, kw_only=True):
    """The job's training since the last such line.

    `seconds`: of wall time that the line covers. `steps`, `samples`: committed by the workers together. `loss`: of the
    lowest rank, if the program passes it. `p50`, `p99`: seconds of a step; the median over the ranks and the largest.
    `committed`: seconds of the line's wall time that went into committed steps. `computing`, `reduction`, `waiting`,
    `data`, `checkpoint`: shares of the ranks' time. `learning_rate` and `batch` (samples of a step) are there if they
    differ from the line before.
    """

    seconds: Seconds
    steps: Count = 0
    samples: Count = 0
    loss: Loss = None
    p50: Optional[Seconds] = None
    p99: Optional[Seconds] = None
    committed: Optional[Seconds] = None
    computing: Optional[Share] = None
    reduction: Optional[Share] = None
    waiting: Optional[Share] = None
    data: Optional[Share] = None
    checkpoint: Optional[Share] = None
    learning_rate: Optional[float] = None
    batch: Optional[Count] = None


class RankStatistics(Event, kw_only=True):
    """The same by rank: entry i of each list is of rank i, null if it hasn't reported. Once in as many seconds as there
    are ranks."""

    seconds: Seconds
    p50: Values
    p99: Values
    computing: Values
    waiting: Values
    data: Values
    checkpoint: Values


class StallBegan(Event, kw_only=True):
    """`waiting` ranks have slept in an operation for `rank` for so many `seconds`, and it has ended no step meanwhile.
    `reason`: what the launcher knows of it."""

    waiting: Ranks
    seconds: Seconds


class StallEnded(Event, kw_only=True):
    """They don't wait for `rank` any more: it came, or is out. `seconds`: since the launcher saw the first wait."""

    seconds: Seconds


class StepDelayed(Event, kw_only=True):
    """No rank failed in the step, and by so many `seconds` it took longer than the median of the last ones, as the
    lowest rank says. At least two seconds."""

    seconds: Seconds


class RuntimeMessage(Event, kw_only=True):
    """What the worker's runtime logs, such as which operation of which rank it has waited for how long."""


class CheckpointWritten(Event, kw_only=True):
    """A checkpoint is on the disk. `seconds`: in the background."""

    path: Text
    seconds: Seconds


class CheckpointFailed(Event, kw_only=True):
    """A checkpoint wasn't written. Training goes on, and earlier ones stay."""


class Resumed(Event, kw_only=True):
    """Training starts from a checkpoint."""

    path: Text


class Evaluated(Event, kw_only=True):
    """An evaluation is over, as the lowest rank says."""

    seconds: Seconds


class PolicyDecided(Event, kw_only=True):
    """A policy has decided. `changes`: as `name=value`."""

    changes: Text


class Compiled(Event, kw_only=True):
    """A joining worker has compiled what its first step needs, before the others had to wait for it."""

    seconds: Seconds


WorkerEvent = Union[
    WorkerJoined, FailureSeen, StepUndone, StepDelayed, Resized, RuntimeMessage, CheckpointWritten, CheckpointFailed,
    Resumed, Evaluated, PolicyDecided, Compiled,
]  # fmt: skip
"""Events that a worker sends."""

KINDS: tuple[type[Event], ...] = (
    LogBegan, JobStarted, JobEnded, LeaderChanged, LeaderLost, HostJoined, HostDraining, HostLeft, HostLost,
    HostsDisconnected, StoreLost, StoreRestored, WorkerStarted, WorkerRegistered, WorkerJoined, WorkerDraining,
    WorkerRemoved, WorkerExited, WorkerFailed, FailureSeen, StepUndone, ResizeRequested, ResizeRejected,
    VersionPrepared, VersionCommitted, Resized, Statistics, RankStatistics, StallBegan, StallEnded, StepDelayed,
    RuntimeMessage, CheckpointWritten, CheckpointFailed, Resumed, Evaluated, PolicyDecided, Compiled,
)  # fmt: skip

AnyEvent: Any = Union[KINDS]


class StepReport(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A worker's steps since its last report: about once a second.

    `ended`: how many steps; `seconds`: since the last report. `committed`: of those, in committed steps. `samples`: of
    this worker; `trained`: of all workers, if it knows. `collectives`, `data`, `checkpoint`: seconds in which the
    program waited for these; `data` null: it doesn't use an ElasticDataset.
    """

    step: Count
    seconds: Seconds
    ended: Count
    samples: Count
    committed: Seconds
    p50: Seconds
    p99: Seconds
    collectives: Seconds
    checkpoint: Seconds
    trained: Optional[Count] = None
    data: Optional[Seconds] = None
    loss: Loss = None
    learning_rate: Optional[float] = None
    batch: Optional[Count] = None
