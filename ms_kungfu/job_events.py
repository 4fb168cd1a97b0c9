"""Define every event of a job's event log (docs/event-log.md).

A line of `events.jsonl` is one of these classes as a JSON object. `python -m ms_kungfu.launcher.wire.events_page`
prints docs/events.md from this file. A field that has its default value is left out of the line.

`VERSION` changes if a reader of older logs would misread a line. A new event, or a new field with a default, doesn't
change it. A reader skips events and fields that it doesn't know.
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
    """The fields of every event.

    `time`: seconds since 1970, by the controller's clock. `host`, `rank`: the host and rank that the event is about;
    the rank belongs to the cluster version that was committed at that time. `step`: the training step, counted from 1.
    `reason`: the cause, in the words of the log line.
    """

    time: Optional[float] = None
    host: Optional[Word] = None
    rank: Optional[Count] = None
    step: Optional[Count] = None
    reason: Text = ""


# ---- the log and the job ----


class LogBegan(Event, kw_only=True):
    """The first line that a controller writes; `host` is the controller's host.

    `version`: the version of the log format.
    """

    version: Count
    job: Word
    ms_kungfu: Word


class JobStarted(Event, kw_only=True):
    """The first cluster version is committed, and its workers start. `command`: the command that each worker runs."""

    workers: Count
    hosts: Annotated[list[Word], Meta(max_length=4096)]
    command: Text


class JobEnded(Event, kw_only=True):
    """The controller ends the job with this exit code. `workers`: the number of members at that time."""

    exit_code: Code
    workers: Count = 0


class LeaderChanged(Event, kw_only=True):
    """`host` has taken over control of the job. `before`: the host that controlled the job before."""

    before: Word


class LeaderLost(Event, kw_only=True):
    """The controller on `host` has stepped down. Another host continues the log in a new file."""


# ---- hosts and network ----


class HostJoined(Event, kw_only=True):
    """A host has joined the running job. `rejoined`: true if the host belonged to the job before."""

    slots: Count
    rejoined: bool = False


class HostDraining(Event, kw_only=True):
    """The host's launcher got a SIGTERM. Its workers leave after their current step."""


class HostLeft(Event, kw_only=True):
    """The host has left the job, and none of its workers is running."""


class HostLost(Event, kw_only=True):
    """The host has failed or isn't reachable. The job continues without it, or ends."""


class HostsDisconnected(Event, kw_only=True):
    """`host` has reported that it can't reach `other`, or can't exchange data with any other host."""

    other: Word = ""


class StoreLost(Event, kw_only=True):
    """The cluster store (a config server or etcd) doesn't answer. Training continues; cluster changes wait."""


class StoreRestored(Event, kw_only=True):
    """The cluster store answers again."""


# ---- workers ----


class WorkerStarted(Event, kw_only=True):
    """A worker process has started. `standby`: its number, if it was started without a slot."""

    pid: Count
    peer: Word = ""
    standby: Optional[Count] = None


class WorkerRegistered(Event, kw_only=True):
    """The worker is ready and waits for its slot in the next cluster version that contains it."""

    peer: Word = ""
    standby: Optional[Count] = None


class WorkerJoined(Event, kw_only=True):
    """A worker that was started for a running job reports that it has the training state."""

    workers: Count


class WorkerDraining(Event, kw_only=True):
    """The worker may leave the cluster after its current step."""

    peer: Word


class WorkerRemoved(Event, kw_only=True):
    """The committed `version` no longer contains the worker. `rank`: the last rank of the worker."""

    peer: Word
    version: Count


class WorkerExited(Event, kw_only=True):
    """The process has exited as expected: with exit code 0, after its dismissal, or at the end of the job."""

    exit_code: Optional[Count] = None
    signal: Optional[Count] = None
    peer: Word = ""


class WorkerFailed(Event, kw_only=True):
    """A worker process has failed, or the controller killed it (`reason`), or the controller lost its host.

    `exit_code` or `signal`: how the process ended; both are missing if its host was lost. `decision`: the controller's
    decision. `standing`: the relation of the process to the committed version.
    """

    exit_code: Optional[Count] = None
    signal: Optional[Count] = None
    peer: Word = ""
    pid: Optional[Count] = None
    decision: Literal["continue", "shrink", "replace", "fail", "finish"] = "continue"
    standing: Literal["member", "joining", "leaving", "standby"] = "member"


class FailureSeen(Event, kw_only=True):
    """The survivors have ended the `step` in which they noticed that `rank` failed.

    The lowest living rank reports this event. `seconds`: by how much that step took longer than the median of the
    recent steps. `survivors`: the number of living ranks, which waited for the step.
    """

    seconds: Seconds
    survivors: Ranks


class StepUndone(Event, kw_only=True):
    """The step doesn't count, and the workers repeat it."""


# ---- cluster versions ----


class ResizeRequested(Event, kw_only=True):
    """A new cluster version was requested.

    `by`: the requester. It is the program (a schedule or a policy), the controller after a failure or a leave,
    `kungfu-run evict`, or another client such as `kungfu-run resize`.
    """

    version: Count
    workers: Count
    workers_before: Optional[Count]
    by: Literal["program", "controller", "evict", "client"]


class ResizeRejected(Event, kw_only=True):
    """The desired version isn't possible, so the controller has rejected it."""

    version: Count
    workers: Count


class VersionPrepared(Event, kw_only=True):
    """All new workers of the version are ready, and its members may adopt it. `seconds`: the time since the request."""

    version: Count
    seconds: Seconds


class VersionCommitted(Event, kw_only=True):
    """The members adopt the version after this step. `seconds`: the time since the request."""

    version: Count
    workers: Count
    workers_before: Count
    seconds: Seconds


class Resized(Event, kw_only=True):
    """The lowest rank reports that the members train in the new version.

    `seconds`: how long training paused for the change.
    """

    version: Count
    workers: Count
    workers_before: Count
    seconds: Seconds


# ---- training ----


class Statistics(Event, kw_only=True):
    """The job's training since the previous event of this kind.

    `seconds`: the wall time that this event covers. `steps`, `samples`: the number that the workers committed together.
    `loss`: the loss of the lowest rank, if the program passes it. `p50`, `p99`: seconds per step: the median over the
    ranks, and the largest. `committed`: the seconds of wall time that went into committed steps. `computing`,
    `reduction`, `waiting`, `data`, `checkpoint`: shares of the ranks' time. `epoch`, counted from 1, and `epochs` are
    of the present call of training. `total_steps`: the last step of that call, as predicted at the present batch size.
    `noise_scale`: the gradient noise scale in samples, if the program measures it. These four, `learning_rate` and
    `batch` (samples per step) are present if they differ from the previous event.
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
    epoch: Optional[Count] = None
    epochs: Optional[Count] = None
    total_steps: Optional[Count] = None
    noise_scale: Optional[float] = None


class RankStatistics(Event, kw_only=True):
    """The fields of `statistics` for each rank, sent once in as many seconds as the job has ranks.

    Entry i of each list belongs to rank i. The entry is null if rank i hasn't reported.
    """

    seconds: Seconds
    p50: Values
    p99: Values
    computing: Values
    waiting: Values
    data: Values
    checkpoint: Values


class StallBegan(Event, kw_only=True):
    """`waiting` ranks have slept in an operation for `seconds` because they wait for `rank`.

    `rank` has ended no step meanwhile. `reason`: what the launcher knows about `rank`.
    """

    waiting: Ranks
    seconds: Seconds


class StallEnded(Event, kw_only=True):
    """The other ranks no longer wait for `rank`: it continued, or it was excluded.

    `seconds`: the time since the launcher saw the first wait.
    """

    seconds: Seconds


class StepDelayed(Event, kw_only=True):
    """The step took `seconds` longer than the median of the recent steps, although no rank failed.

    The lowest rank reports this event for delays of at least two seconds.
    """

    seconds: Seconds


class RuntimeMessage(Event, kw_only=True):
    """A message that the worker's runtime logs, for example, that an operation has waited for a rank for some time."""


class CheckpointWritten(Event, kw_only=True):
    """A checkpoint is on the disk. `seconds`: how long the write took in the background."""

    path: Text
    seconds: Seconds


class CheckpointFailed(Event, kw_only=True):
    """A checkpoint could not be written. Training continues, and earlier checkpoints are kept."""


class Resumed(Event, kw_only=True):
    """Training starts from a checkpoint."""

    path: Text


class Evaluated(Event, kw_only=True):
    """The lowest rank reports that an evaluation is complete."""

    seconds: Seconds


class PolicyDecided(Event, kw_only=True):
    """A policy has made a decision. `changes`: the changed values, as `name=value`."""

    changes: Text


class Compiled(Event, kw_only=True):
    """A joining worker has compiled the code for its first step, before the other workers had to wait for it."""

    seconds: Seconds


WorkerEvent = Union[
    WorkerJoined, FailureSeen, StepUndone, StepDelayed, Resized, RuntimeMessage, CheckpointWritten, CheckpointFailed,
    Resumed, Evaluated, PolicyDecided, Compiled,
]  # fmt: skip
"""The events that a worker sends."""

KINDS: tuple[type[Event], ...] = (
    LogBegan, JobStarted, JobEnded, LeaderChanged, LeaderLost, HostJoined, HostDraining, HostLeft, HostLost,
    HostsDisconnected, StoreLost, StoreRestored, WorkerStarted, WorkerRegistered, WorkerJoined, WorkerDraining,
    WorkerRemoved, WorkerExited, WorkerFailed, FailureSeen, StepUndone, ResizeRequested, ResizeRejected,
    VersionPrepared, VersionCommitted, Resized, Statistics, RankStatistics, StallBegan, StallEnded, StepDelayed,
    RuntimeMessage, CheckpointWritten, CheckpointFailed, Resumed, Evaluated, PolicyDecided, Compiled,
)  # fmt: skip

AnyEvent: Any = Union[KINDS]


class StepReport(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A worker's steps since its last report, sent about once a second.

    `ended`: the number of steps; `seconds`: the time since the last report. `committed`: the part of `seconds` spent in
    committed steps. `samples`: the samples of this worker; `trained`: the samples of all workers, if this worker knows
    the number. `collectives`, `data`, `checkpoint`: the seconds for which the program waited for each. `data` null: the
    program doesn't use an ElasticDataset.
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
    epoch: Optional[Count] = None
    epochs: Optional[Count] = None
    total_steps: Optional[Count] = None
    noise_scale: Optional[float] = None
