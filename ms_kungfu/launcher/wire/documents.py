"""The documents that launchers write for other programs: the leader snapshot in etcd, and a job's status.

Documents are validated like messages. Keys are never renamed: other programs read the status, and the next controller
reads this controller's snapshot.
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

Seconds = Annotated[float, Meta(ge=0, le=253402300799)]  # the last second of year 9999, as a time since 1970
Span = Annotated[float, Meta(ge=0, le=1e12)]
Size = Annotated[int, Meta(ge=0, le=MAX_WORKERS_OF_HOSTS)]
MOST = 1 << 16  # limit for versions, hosts or processes
End = tuple[Code, Optional[Sentence]]


class Document(Part, omit_defaults=False, forbid_unknown_fields=False):
    """A document that is stored, or that other programs read."""


# ---- the leader snapshot ----


class Failure(Document, frozen=True):  # type: ignore[misc]
    """A failure, for the message that ends the job.

    `is_of_launcher`: true if the launcher killed the worker, could not start it, or lost its host. `key`: that of the
    worker's process.
    """

    reason: Sentence
    exit_code: Code
    is_of_launcher: bool = False
    key: Optional[Count] = None


class Change(Document):
    """A desired cluster version, and its current state.

    Times are seconds since 1970. `size_before`: null for the first cluster. `chosen_at`: when the members adopted the
    version; `after_step`: the training step after which they adopted it. `refused`: the reason if the version was
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
    """What the status reports about the time before this controller. No decision depends on it."""

    began_at: Seconds
    changes: Changes


class Versions(Document):
    """The versions that the members may be in.

    `excluded`: for each peer, the versions after which its process was no longer a member. `ended`: for each peer,
    pairs [incarnation, version]. From that incarnation up to that version, the peer is a process that has exited.
    `lost`: pairs [host, version]. Versions up to this one refer to the failed host; null means that all versions do.
    """

    clusters: Annotated[list[ClusterPart], Meta(max_length=MOST)]
    chosen: Optional[Count]
    excluded: Annotated[dict[Peer, Annotated[list[Count], Meta(max_length=MOST)]], Meta(max_length=MOST)]
    ended: Annotated[dict[Peer, Annotated[list[tuple[Count, Count]], Meta(max_length=MOST)]], Meta(max_length=MOST)]
    lost: Annotated[list[tuple[HostName, Optional[Count]]], Meta(max_length=MOST)]

    def __post_init__(self) -> None:
        if self.chosen is not None and self.chosen not in [cluster.version for cluster in self.clusters]:
            raise ValueError(f"version {self.chosen} is committed and not among the clusters")


class LeaderSnapshotDocument(Document):
    """What the controller stores for the next controller.

    `first`: the cluster that the job began with. `end`: exit code and last message. `before`: earlier controllers whose
    hosts aren't expected to register. `failures`: the first failure, and the first failure that the program caused.
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

    `state`: the state of the process; `why`: what the process does or waits for. `standing`: the relation of the
    process to the committed version. `joined_with`: the version that the process was started for.
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
    """How far the training is; null: not known. Rates are those of the last ten seconds.

    `total_steps`: the last step of this call of training, as predicted at the present batch size. `left_s`: the seconds
    that the steps until then take.
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
    """`waiting` ranks sleep in an operation because they wait for `rank`. `why`: what the launcher knows about it."""

    rank: Rank
    waiting: Annotated[list[Rank], Meta(max_length=MOST)]
    seconds: Span
    why: Sentence


class Status(Document):
    """The status of a job, as printed by `kungfu-run status -json`. `started_at`: seconds since 1970."""

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
