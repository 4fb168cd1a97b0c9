"""Define every event of a job's event log (docs/event-log.md).

Each line of `events.jsonl` is an instance of one of these classes, written as a JSON object. The line leaves out fields
that have their default value. `python -m ms_kungfu.launcher.wire.events_page` prints docs/events.md from this file.

`VERSION` changes only if programs that read the previous format would misread a line. A new event, or a new field with
a default value, doesn't change `VERSION`: programs skip events and fields that they don't know.
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

    `time`: seconds since 1970, by the controller's clock. `host`, `rank`: the host and rank that the event is about.
    Ranks are those of the cluster version that was committed at that time. `step`: the training step, counted from 1.
    `reason`: the cause, with the same words as in the log.
    """

    time: Optional[float] = None
    host: Optional[Word] = None
    rank: Optional[Count] = None
    step: Optional[Count] = None
    reason: Text = ""


# ---- the log and the job ----


class LogBegan(Event, kw_only=True):
    """The controller on `host` has begun to write this file. This event is the file's first line.

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
    """The host's launcher has received SIGTERM. The host's workers leave the job after their current step."""


class HostLeft(Event, kw_only=True):
    """The host has left the job, and none of its workers is running."""


class HostLost(Event, kw_only=True):
    """The host has failed or can't be reached. The job continues without it, or ends."""


class HostsDisconnected(Event, kw_only=True):
    """`host` has reported that it can't reach `other`, or can't exchange data with any other host."""

    other: Word = ""


class StoreLost(Event, kw_only=True):
    """The cluster store (a config server or etcd) doesn't answer.

    Training continues, but the cluster doesn't change until the store answers again.
    """


class StoreRestored(Event, kw_only=True):
    """The cluster store answers again."""


# ---- workers ----


class WorkerStarted(Event, kw_only=True):
    """A worker process has started. `standby`: the number of a standby, that is, a process without a slot."""

    pid: Count
    peer: Word = ""
    standby: Optional[Count] = None


class WorkerRegistered(Event, kw_only=True):
    """The worker is ready and waits for a slot in the next cluster version."""

    peer: Word = ""
    standby: Optional[Count] = None


class WorkerJoined(Event, kw_only=True):
    """A worker that joined the running job reports that it has received the training state."""

    workers: Count


class WorkerDraining(Event, kw_only=True):
    """The controller allows the worker to leave the cluster after its current step."""

    peer: Word


class WorkerRemoved(Event, kw_only=True):
    """The committed cluster version `version` no longer contains the worker. `rank`: the worker's last rank."""

    peer: Word
    version: Count


class WorkerExited(Event, kw_only=True):
    """The process has exited as expected.

    Its exit code was 0, or the launcher ended the process because it was no longer needed, or the job ended.
    """

    exit_code: Optional[Count] = None
    signal: Optional[Count] = None
    peer: Word = ""


class WorkerFailed(Event, kw_only=True):
    """A worker process failed, the controller killed it (see `reason`), or its host was lost.

    `exit_code` or `signal`: how the process ended; both are missing if its host was lost. `decision`: how the
    controller reacts. `standing`: the role of the process in relation to the committed cluster version.
    """

    exit_code: Optional[Count] = None
    signal: Optional[Count] = None
    peer: Word = ""
    pid: Optional[Count] = None
    decision: Literal["continue", "shrink", "replace", "fail", "finish"] = "continue"
    standing: Literal["member", "joining", "leaving", "standby"] = "member"


class FailureSeen(Event, kw_only=True):
    """The surviving ranks have finished the `step` in which they noticed that `rank` failed.

    The lowest living rank reports this event. `seconds`: how much longer that step took than the median of the recent
    steps. If compiling was at least half of this time, `seconds` doesn't include it. `survivors`: the living ranks,
    which waited for the step to end.
    """

    seconds: Seconds
    survivors: Ranks


class StepUndone(Event, kw_only=True):
    """The step doesn't count, and the workers repeat it."""


# ---- cluster versions ----


class ResizeRequested(Event, kw_only=True):
    """One of the following has requested a new cluster version; `by` says which.

    `program`: a schedule or policy of the program. `controller`: the controller, because a worker or host has failed or
    left. `evict`: `kungfu-run evict`. `client`: another client, such as `kungfu-run resize`.
    """

    version: Count
    workers: Count
    workers_before: Optional[Count]
    by: Literal["program", "controller", "evict", "client"]


class ResizeRejected(Event, kw_only=True):
    """The controller has rejected the requested cluster version, because that version isn't possible."""

    version: Count
    workers: Count


class VersionPrepared(Event, kw_only=True):
    """All new workers of the cluster version are ready, so the members may switch to it.

    `seconds`: the time since the request.
    """

    version: Count
    seconds: Seconds


class VersionCommitted(Event, kw_only=True):
    """The members switch to the cluster version after this step. `seconds`: the time since the request."""

    version: Count
    workers: Count
    workers_before: Count
    seconds: Seconds


class Resized(Event, kw_only=True):
    """The lowest rank reports that training continues in the new cluster version.

    `seconds`: how long training paused for the change.
    """

    version: Count
    workers: Count
    workers_before: Count
    seconds: Seconds


# ---- training ----


class Statistics(Event, kw_only=True):
    """Statistics of the job's training since the previous `statistics` event.

    `seconds`: the wall time that this event covers. `steps`, `samples`: how many steps and samples all workers together
    have committed. `loss`: the loss of the lowest rank, if the program reports it. `p50`: the median of the ranks'
    seconds per step. `p99`: the 99th percentile of a rank's seconds per step, for the rank with the largest value.
    `committed`: the wall time spent on committed steps. `computing`, `reduction`, `waiting`, `data`, `checkpoint`: what
    fraction of the ranks' time each of these took.

    The following fields are present only if they have changed since the previous event. `batch`: samples per step.
    `epoch` (counted from 1), `epochs`: the current epoch and the number of epochs in the current training call.
    `total_steps`: the last step of that call, predicted from the current batch size. `noise_scale`: the gradient noise
    scale in samples, if the program measures it. `learning_rate`: the learning rate.
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
    """The fields of `statistics` for each rank. A job with N ranks logs this event every N seconds.

    A job with one rank doesn't log it, because `statistics` then describes that rank.

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
    """The ranks in `waiting` have been blocked in an operation for `seconds`, because they wait for `rank`.

    `rank` hasn't finished a step in that time. `reason`: what the launcher knows about `rank`.
    """

    waiting: Ranks
    seconds: Seconds


class StallEnded(Event, kw_only=True):
    """The other ranks no longer wait for `rank`, because it has continued or was excluded.

    `seconds`: the time since the launcher noticed that the other ranks were waiting.
    """

    seconds: Seconds


class StepDelayed(Event, kw_only=True):
    """The step took `seconds` longer than the median of the recent steps.

    The lowest rank reports this event for delays of at least two seconds, unless a rank failed in the step. `reason`:
    for how long the lowest rank compiled, if that was at least half of the delay. The event is then reported even if a
    rank failed.
    """

    seconds: Seconds


class RuntimeMessage(Event, kw_only=True):
    """The worker's runtime has logged a message, for example that an operation has waited long for a rank."""


class CheckpointWritten(Event, kw_only=True):
    """A checkpoint is on the disk. `seconds`: how long the background write took."""

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
    """A joining worker has compiled the code for its first step. The other workers didn't wait for this."""

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
    """A worker's report about its steps since its last report. The worker sends it about once a second.

    `seconds`: the time since the last report. `ended`: how many steps have ended in that time. `committed`: how many of
    these seconds were spent on committed steps. `samples`: how many samples this worker used. `trained`: how many
    samples all workers used, if this worker knows the number. `collectives`, `data`, `checkpoint`: how many seconds the
    program waited for each of these. If `data` is null, the program doesn't use an ElasticDataset.
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
