"""The documents that launchers write for other readers: the leader snapshot in etcd, and a job's status.

Readers validate documents like messages. Keys are never renamed, because other programs read the status, and the next
controller reads this controller's snapshot.
"""

from typing import Annotated, Literal, Optional

from msgspec import Meta

from ms_kungfu.cluster import MAX_WORKERS_OF_HOSTS
from ms_kungfu.job_events import Loss
from ms_kungfu.launcher.wire.codec import Reads
from ms_kungfu.launcher.wire.messages import (
    ClusterPart,
    Code,
    Count,
    HostName,
    Part,
    Peer,
    Pid,
    Rank,
    Sentence,
    Slots,
    Word,
)  # fmt: skip

# At most the last second of the year 9999, in seconds since 1970.
Seconds = Annotated[float, Meta(ge=0, le=253402300799)]
Span = Annotated[float, Meta(ge=0, le=1e12)]
Size = Annotated[int, Meta(ge=0, le=MAX_WORKERS_OF_HOSTS)]
MOST = 1 << 16  # the maximum number of versions, hosts or processes in a document
End = tuple[Code, Optional[Sentence]]


class Document(Part, omit_defaults=False, forbid_unknown_fields=False):
    """A document that is stored, or that other programs read."""


# ---- the leader snapshot ----


class Failure(Document, frozen=True):  # type: ignore[misc]
    """A worker's failure, from which the last message of the job is made.

    `is_of_launcher`: true if the launcher killed the worker, could not start the worker, or lost the worker's host.
    `key`: the key of the worker's process.
    """

    reason: Sentence
    exit_code: Code
    is_of_launcher: bool = False
    key: Optional[Count] = None


class Change(Document):
    """A change to a desired cluster version, and the state of that version.

    Times are seconds since 1970. `size_before`: the size before the change, or null for the first cluster. `why`: the
    reason for the change. `wanted_at`: when the change was requested. `chosen_at`: when the version was committed.
    `after_step`: the training step after which the members adopt the version. `refused`: the reason if the version was
    rejected.
    """

    version: Count
    size: Size
    size_before: Optional[Size]
    why: Sentence
    wanted_at: Seconds
    chosen_at: Optional[Seconds] = None
    after_step: Optional[Count] = None
    refused: Optional[Sentence] = None
    state: Literal["desired", "prepared", "committed", "superseded", "rejected"] = "desired"


Changes = Annotated[list[Change], Meta(max_length=1024)]


class Past(Document):
    """What the job's status reports about the time before the current controller. No decision depends on it.

    `began_at`: when the job began, in seconds since 1970.
    """

    began_at: Seconds
    changes: Changes


class Versions(Document):
    """The cluster versions in which workers may be members.

    `chosen`: the number of the committed version. `excluded`: for each peer ID, a list of versions. For each V in the
    list, a process that was started for version V or earlier isn't a member in version V or later. `ended`: for each
    peer ID, pairs [first, end]. The process that had this peer ID in the versions from `first` to `end` - 1 has
    exited. `lost`: pairs [host, version]. The host that had this name in the versions up to `version` has failed. If
    `version` is null, the host has failed in all versions.
    """

    clusters: Annotated[list[ClusterPart], Meta(max_length=MOST)]
    chosen: Optional[Count]
    excluded: Annotated[dict[Peer, Annotated[list[Count], Meta(max_length=MOST)]], Meta(max_length=MOST)]
    ended: Annotated[dict[Peer, Annotated[list[tuple[Count, Count]], Meta(max_length=MOST)]], Meta(max_length=MOST)]
    lost: Annotated[list[tuple[HostName, Optional[Count]]], Meta(max_length=MOST)]

    def __post_init__(self) -> None:
        if self.chosen is not None and self.chosen not in [cluster.version for cluster in self.clusters]:
            raise ValueError(f"cluster version {self.chosen} is committed, but not among the clusters")


class LeaderSnapshotDocument(Document):
    """The state that the controller stores for the next controller.

    `job`: the name under which the launchers of the job write clusters. `head`: the host of the controller. `first`:
    the cluster that the job began with. `end`: the exit code and the last message, when the job has ended. `before`:
    the hosts of earlier controllers. `failures`: the first failure, and the first failure that the program caused.
    `alive`: the hosts of controllers that were alive when a controller gave up the lease. The next controller expects
    these hosts to register, but not the other hosts in `before`.
    """

    job: Word
    head: Word
    first: ClusterPart
    hosts: Annotated[list[tuple[HostName, Optional[Slots]]], Meta(max_length=MOST)]
    versions: Versions
    finishing: bool
    end: Optional[End]
    before: Annotated[tuple[Word, ...], Meta(max_length=MOST)]
    told: Optional[Past]
    failures: tuple[Optional[Failure], Optional[Failure]] = (None, None)
    alive: Annotated[tuple[Word, ...], Meta(max_length=MOST)] = ()


# ---- the status ----


class Launcher(Document):
    """The launcher that controls the job."""

    host: Word
    pid: Pid


class HostState(Document):
    """A host of the job."""

    name: Word
    lost: bool
    state: Literal["active", "draining", "removed"] = "active"


class Summary(Document):
    """A cluster version."""

    version: Count
    size: Size


class ProcessState(Document):
    """A worker process.

    `state`: the state of the process. `why`: the reason for this state, for example what the process waits for.
    `standing`: the membership of the process, which is a member of the committed cluster version, joining, leaving, or
    a standby. `joined_with`: the version for which the process was started.
    """

    rank: Optional[Rank]
    host: Word
    peer: Optional[Word]
    pid: Optional[Pid]
    state: Literal["starting", "running", "stuck", "failing", "overdue", "dismissed", "killed", "unkillable", "exited"]
    device: Optional[Word]
    step: Optional[Count]
    step_s: Optional[Span]
    step_ended_s_ago: Optional[Span]
    joined_with: Optional[Count] = None
    standing: Optional[Word] = None
    why: Sentence = ""


class TrainingState(Document):
    """The progress of the training. A field is null if its value isn't known. Rates cover the last ten seconds.

    `total_steps`: the number of the last step in this call of the training loop, predicted for the current batch size.
    `left_s`: the predicted number of seconds until that step has ended.
    """

    step: Optional[Count]
    total_steps: Optional[Count]
    epoch: Optional[Count]
    epochs: Optional[Count]
    loss: Loss
    steps_per_s: Optional[Span]
    samples_per_s: Optional[Span]
    left_s: Optional[Span]


class StallState(Document):
    """The ranks in `waiting` have been blocked in an operation for `seconds` seconds, because they wait for `rank`.

    `why`: what the launcher knows about the cause.
    """

    rank: Rank
    waiting: Annotated[list[Rank], Meta(max_length=MOST)]
    seconds: Span
    why: Sentence


class Status(Document):
    """The status of a job, as `kungfu-run status -json` prints it. `started_at`: the time in seconds since 1970."""

    state: Literal["starting", "running", "resizing", "finishing", "ending"]
    why: Sentence
    launcher: Launcher
    started_at: Seconds
    command: Annotated[list[Sentence], Meta(max_length=1 << 16)]
    follows_changes: bool
    config_server: Optional[Sentence]
    hosts: Annotated[list[HostState], Meta(max_length=MOST)]
    cluster: Optional[Summary]
    wanted: Optional[Summary]
    processes: Annotated[list[ProcessState], Meta(max_length=MOST)]
    changes: Changes
    job: Optional[Word] = None
    training: Optional[TrainingState] = None
    stalls: Annotated[list[StallState], Meta(max_length=MOST)] = []


LEADER_SNAPSHOT: Reads[LeaderSnapshotDocument] = Reads(LeaderSnapshotDocument)
STATUS: Reads[Status] = Reads(Status)
