"""Define every message between the processes of a job.

`python -m ms_kungfu.launcher.wire.page` prints docs/messages.md from this module. A message is an object whose ``type``
names its class. A process accepts only the messages described here, within their limits. `wire.PROTOCOL` changes
whenever a change here makes messages unreadable for another version.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, Union

from msgspec import Meta, Struct

from ms_kungfu import job_events
from ms_kungfu.cluster import HOST, MAX_WORKERS_OF_HOSTS, Cluster, PeerID
from ms_kungfu.launcher.wire import PROTOCOL as PROTOCOL
from ms_kungfu.launcher.wire.codec import Reads

_PORT = "0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_MOST_HOSTS = 4096
_MOST_PROCESSES = 8192  # of one host, including those that have exited recently

Nonce16 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Proof32 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Word = Annotated[str, Meta(max_length=255)]
HostName = Annotated[str, Meta(pattern=rf"\A{HOST.pattern}\Z")]
Peer = Annotated[str, Meta(pattern=rf"\A{HOST.pattern}:{_PORT}\Z")]
LogName = Annotated[str, Meta(pattern=r"\A[^/\x00]{1,255}\Z")]
Sentence = Annotated[str, Meta(max_length=1 << 20)]
RawWord = Annotated[bytes, Meta(max_length=1 << 20)]
Count = Annotated[int, Meta(ge=0)]
Number = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Code = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Pid = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
SignalNumber = Annotated[int, Meta(ge=1, le=64)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_WORKERS_OF_HOSTS)]
Cores = Annotated[tuple[Number, ...], Meta(max_length=1 << 16)]
Command = Annotated[list[RawWord], Meta(min_length=1, max_length=1 << 16)]
Slots = Annotated[int, Meta(ge=0, le=99_999_999)]
Words = dict[Count, dict[Rank, Sentence]]
ACTIVITIES = ("", "data", "checkpoint", "evaluation", "compilation")
"""What a program does outside of its steps. A worker writes the index into shared memory."""
Loss = tuple[Rank, Sentence, bool, bool]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of messages."""


class Message(Part, tag=_tag, tag_field="type"):
    """A message."""


# ---- parts ----


class ClusterPart(Part, rename="pascal"):
    """A cluster version in KungFu's JSON: its workers in rank order."""

    workers: Annotated[tuple[Peer, ...], Meta(min_length=1, max_length=MAX_WORKERS_OF_HOSTS)]
    runners: Annotated[tuple[Peer, ...], Meta(max_length=_MOST_HOSTS)] = ()
    version: Count = 0
    slots: Optional[Annotated[dict[HostName, Slots], Meta(min_length=1, max_length=_MOST_HOSTS)]] = None
    placement: Literal["even", "fill"] = "even"

    def __post_init__(self) -> None:
        for peers in (self.workers, self.runners):
            if len(set(peers)) < len(peers):
                raise ValueError("a peer is listed twice")

    @classmethod
    def of(cls, cluster: Cluster) -> "ClusterPart":
        slots = None if cluster.slots is None else dict(cluster.slots)
        placement: Any = cluster.placement
        return cls(_texts(cluster.workers), _texts(cluster.runners), cluster.version, slots, placement)

    def cluster(self) -> Cluster:
        workers, runners = (tuple(map(PeerID.parse, peers)) for peers in (self.workers, self.runners))
        return Cluster(workers, runners, self.version, slots=self.slots, placement=self.placement)


def _texts(peers: Sequence[PeerID]) -> tuple[str, ...]:
    return tuple(map(str, peers))


class Device(Part, frozen=True):  # type: ignore[misc]
    """A device, as described to one worker. `visible` null: the worker sees all devices that its launcher sees."""

    name: Word
    device_id: Number
    visible: Optional[Sentence] = None


class CpuIsa(Part, frozen=True):  # type: ignore[misc]
    """The vector instructions that oneDNN uses on a host, by the names that ONEDNN_MAX_CPU_ISA accepts.

    `level`: the highest level that the host's workers should use. `native`: the highest level of the host's processor.
    `reason`: why `level` and `native` differ. `error`: why the host could not determine them. `is_users`: true if the
    user has set the variable on that host.
    """

    level: Word
    native: Word
    reason: Sentence = ""
    error: Sentence = ""
    is_users: bool = False


class Registration(Part):
    """The description of a host that registers.

    `flags`: the flags that must be equal on all hosts, as text. `mindspore`: its version, or "" if it isn't installed.
    `logdir`: the path's bytes in base 64. `taken`: the cores of the host on which the user's other jobs run. `cpu_isa`:
    null if oneDNN has no such instructions on this host.
    """

    host: Word
    version: Word
    mindspore: Word
    flags: Annotated[dict[Word, Sentence], Meta(max_length=1024)]
    cores: Annotated[list[Number], Meta(min_length=1, max_length=1 << 16)]
    device_kind: Optional[Literal["GPU", "Ascend device"]] = None
    devices: Annotated[tuple[Device, ...], Meta(max_length=1024)] = ()
    logdir: RawWord = b""
    taken: Cores = ()
    cpu_isa: Optional[CpuIsa] = None


class Worker(Part):
    """A worker process, as its host reports it.

    `peer`: null for a standby. `code`: the exit code, if the process has exited. `standby`: the number of a prestarted
    process.
    """

    key: Count
    peer: Optional[Peer]
    incarnation: Count
    rank: Rank
    log_name: LogName
    device: Number
    pid: Optional[Pid] = None
    code: Optional[Code] = None
    error: Sentence = ""
    standby: Optional[Count] = None


class Doing(Part):
    """What a worker does at this moment.

    `activity`: outside of its steps; "" if nothing in particular; `seconds`: how long it has done that. `operations`:
    the collective operations in which its process stands still, if it has done that for long.
    """

    activity: Word = ""
    seconds: float = 0.0
    operations: Sentence = ""


class ResyncReport(Part):
    """A host's report to the next controller.

    `losses`: for each version on the host, the failures of which the host was notified, in order. Each entry has the
    rank, the reason, whether the others continue, and whether the process was reaped. `leaving`: the workers for which
    a leave request has succeeded. `slot_holders`: the processes that have a slot. `cores`: the number of cores of each
    worker, or 0 if the number isn't fixed. `cpu_isa`: the limit of the workers' vector instructions, or "" if there is
    no limit.
    """

    workers: Annotated[list[Worker], Meta(max_length=_MOST_PROCESSES)]
    losses: dict[Count, Annotated[list[Loss], Meta(max_length=MAX_WORKERS_OF_HOSTS)]]
    leaving: Annotated[list[Peer], Meta(max_length=_MOST_PROCESSES)]
    slot_holders: Annotated[list[tuple[Peer, Count]], Meta(max_length=_MOST_PROCESSES)] = []
    cores: Number = 0
    cpu_isa: Word = ""


# ---- handshake ----


class Nonce(Message, forbid_unknown_fields=False):
    """The first message that each end sends: 16 random bytes in hex, and the protocol version.

    Another protocol version may have more fields.
    """

    nonce: Nonce16
    protocol: Count


class Proof(Message):
    """The HMAC-SHA256, in hex, of a word for the sender's role and both nonces. The key is the job's secret."""

    proof: Proof32


class Error(Message):
    """Why the request or the connection is rejected."""

    error: Sentence


# ---- requests of a worker to its host's broker ----


class Software(Part):
    """The software versions of a joining worker, which must be equal on all workers.

    `mindspore`: "" if it isn't installed.
    """

    ms_kungfu: Word
    mindspore: Word


class SlotRequest(Message):
    """A member of version `member_of` requests its slot in `version`, on which its cluster has agreed.

    A joining worker sends neither field: it is ready, and the broker answers once a version that contains the worker is
    committed. `step`: the member's training step.
    """

    peer: Peer
    incarnation: Count
    member_of: Optional[Count] = None
    version: Optional[Count] = None
    step: Optional[Count] = None
    software: Optional[Software] = None


class StandbyRequest(Message):
    """A standby is ready. It waits until it gets a slot."""

    number: Count
    software: Optional[Software] = None


class LeaveRequest(Message):
    """A request that the cluster continue without `peer`. `terminated`: true if the worker got a SIGTERM."""

    peer: Peer
    terminated: bool = False


class FixCores(Message):
    """A request to give each worker of the host this many cores from now on, unless the number is already fixed."""

    each: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Expect(Message):
    """The members of `version` expect a cluster of `size` workers next. `joining` of these workers are new."""

    version: Count
    joining: Number
    size: Number


class ProgramEnded(Message):
    """The worker's program has ended without an exception; its interpreter is about to end."""

    peer: Peer
    incarnation: Count


class PutStore(Message):
    """The worker's model store. The message carries the store's read-only file descriptor."""

    peer: Peer
    incarnation: Count


class GetStore(Message):
    """A request for the model store of another worker on the same host."""

    peer: Peer


class Report(Message):
    """What a worker reports for the event log. The broker doesn't answer.

    The host forwards the report to the controller. `events`: in the order in which they happened (docs/event-log.md).
    `steps`: sent about once a second.
    """

    peer: Peer
    incarnation: Count
    events: Annotated[list[job_events.WorkerEvent], Meta(max_length=64)] = []
    steps: Optional[job_events.StepReport] = None


class AwaitEnd(Message):
    """The worker will write a checkpoint when the job is about to end.

    The worker closes the connection once the checkpoint is written or isn't needed.
    """


# ---- answers of the broker ----


class Slot(Message):
    """A slot in a version. The message carries the file descriptor of the version's segment.

    If the version spans several hosts, the message carries three more descriptors: for the version's control block, for
    a socket to the inter-host transport, and for a socket to the model transport.
    """

    cluster: ClusterPart
    rank: Rank
    peer: Peer
    incarnation: Count


class Detached(Message, frozen=True):  # type: ignore[misc]
    """The committed version doesn't contain the worker.

    `evicted`: true if a user or another worker requested the removal.
    """

    evicted: bool = False


class Stay(Message, frozen=True):  # type: ignore[misc]
    """The agreed version was abandoned before any worker adopted it. Its members stay in their current version."""


class Leaving(Message):
    """The cluster will continue without the worker named in the leave request."""


class CoresFixed(Message):
    """The number of cores that each worker has; 0: the launcher doesn't pin workers."""

    each: Number


class Noted(Message):
    """The broker has read the report."""


class Store(Message):
    """Whether the requested model store exists, or whether the broker keeps the submitted one.

    If a requested store exists, the message carries its file descriptor.
    """

    found: bool


class JobEnds(Message):
    """The job is about to end by this signal. The worker gets the signal after its checkpoint."""

    number: SignalNumber


class Waiting(Message):
    """The launcher is waiting for the job's store. The time limit of the request starts again now."""


ToJobBroker = Union[SlotRequest, StandbyRequest, LeaveRequest, FixCores, Expect, ProgramEnded]
FromJobBroker = Union[Slot, Detached, Stay, Leaving, CoresFixed, Noted, Error]
ToBroker = Union[ToJobBroker, PutStore, GetStore, AwaitEnd, Report]
FromBroker = Union[FromJobBroker, Store, JobEnds, Waiting]


# ---- the first message of a connection between hosts, and its answer ----


class Agent(Message):
    """A host asks to take part in the job.

    `command`: the command that the host would run; a joining host sends none. `slots`: the slots of a host that joins a
    running job. `report`: the host's report to the next controller of a running job.
    """

    registration: Registration
    command: Optional[Command] = None
    slots: Optional[Slots] = None
    report: Optional[ResyncReport] = None


class Ask(Message):
    """A host that is about to join requests the job's terms."""

    host: Word
    slots: Slots
    version: Word
    mindspore: Word


class WaitingController(Message):
    """A launcher that waits for other hosts, as the head node, asks one of them for its state.

    `hosts`: the caller's -H.
    """

    host: Word
    hosts: Sentence


class TransportConnection(Message):
    """A connection for the inter-host transport of a version.

    `host` opens it as connection `number` in this `attempt` to set up the transport.
    """

    job: Word
    version: Count
    attempt: Count
    host: Word
    number: Number


class Registered(Message):
    """The host takes part in the job.

    `secret`: the secret of the job's brokers and config server, under -no-secret. `look_s`: the interval in seconds at
    which the host reports its heartbeats. `lease`: the revision at which the controller acquired the lease, if the
    controller can move. `warning`: a warning for the user.
    """

    job: Word
    look_s: float
    secret: Optional[Word] = None
    lease: Optional[Count] = None
    warning: Sentence = ""


class RegistrationRejected(Message):
    """Why the host can't take part in the job or join it."""

    reason: Sentence


class Terms(Message):
    """The job's terms, for a host that joins. `flags`: keyed by option name. `left_s`: the time left of -timeout."""

    command: Command
    hosts: Annotated[list[tuple[Word, Optional[Slots]]], Meta(max_length=_MOST_HOSTS)]
    head: Word
    most: Optional[Number]
    placement: Literal["even", "fill"]
    ports: Optional[tuple[Number, Number]]
    # No fixed tuple beside types with limits in a union: msgspec 0.20 to 0.22 crash at the next garbage collection.
    flags: Annotated[dict[Word, Union[None, bool, int, float, Word]], Meta(max_length=1024)]
    left_s: Optional[float]


class Calls(Message):
    """What a host is doing, in answer to a waiting controller.

    `hosts`: the host's -H. `calls`: the controller that the host calls. `for_s`: the seconds for which it has been
    calling. `waits`: true if the host itself waits as the controller. `in_a_job`: true if the host already takes part
    in a job.
    """

    hosts: Sentence
    calls: Word
    for_s: float = 0.0
    waits: bool = False
    in_a_job: bool = False


class Connected(Message):
    """From now on the connection belongs to the inter-host transport."""


# ---- orders of the controller ----


class Launch(Message, frozen=True):  # type: ignore[misc]
    """Start a process.

    `key`: the key of the process between launcher and supervisor, unique in the job. `rank`: the rank before its
    output lines, and their colour. `held`: its output isn't shown until `assign`. `environment`: changes to the
    environment of the host's launcher; null removes a variable. `cores`: the cores that the process may run on;
    empty: all. `threads`: the number of OpenMP threads, unless the user sets it. `device`: the index among the
    host's devices. `needs`: the start is rejected unless the host has memory for this many workers.
    """

    key: Count
    log_name: LogName
    rank: Rank
    held: bool
    environment: Annotated[dict[Word, Optional[Sentence]], Meta(max_length=1024)]
    cores: Cores
    threads: Optional[Number]
    joins_later: bool
    device: Number = 0
    needs: Number = 0


class Signal(Message):
    """Send a signal to the process group of a worker; null: to those of all workers of the host."""

    number: SignalNumber
    key: Optional[Count] = None


class Checkpoint(Message):
    """The job is about to end by this signal. The workers that write checkpoints write one now."""

    number: SignalNumber


class Pin(Message):
    """Move a worker to these cores."""

    key: Count
    cores: Cores


class Assign(Message):
    """A standby gets this slot. Its output is shown from now on."""

    key: Count
    peer: Peer
    incarnation: Count
    rank: Rank


class Stack(Message):
    """Make a worker write its Python stacks to its output."""

    key: Count


class Make(Message):
    """Create this host's part of a version. `recovers`: true if members continue without failed workers."""

    attempt: Count
    cluster: ClusterPart
    recovers: bool


class Close(Message):
    """Close this host's part of a version."""

    version: Count


class Lost(Message):
    """A rank has failed.

    The host records the failure in the version's control block, and in its segment if the rank ran on this host.
    """

    version: Count
    rank: Rank
    reason: Sentence
    recover: bool
    reaped: bool


class VersionPrepared(Message):
    """The members of `version` may adopt version `newer`."""

    version: Count
    newer: Count


class Sync(Message):
    """The workers of all hosts have requested this many sync points."""

    version: Count
    number: Count


class Ending(Message):
    """A stuck rank is about to be ended, or won't be after all. The other ranks keep waiting meanwhile."""

    version: Count
    rank: Rank
    ending: bool


class LoseHost(Message):
    """The inter-host transport of the version continues without this host."""

    version: Count
    host: Word


class Answer(Message):
    """The answer to a request of a worker on this host; null: no answer. The host adds the file descriptors."""

    number: Count
    message: Optional[FromJobBroker]


class JobStatus(Message):
    """The job's status, for a caller on the host. The caller validates it (`documents.STATUS`)."""

    number: Count
    job: dict[str, Any]


class NewLease(Message):
    """The controller has acquired the expired lease again, at this revision."""

    since: Count


class WatchActivity(Message):
    """While `watched` is true, the host sends `activity` once a second, because a dashboard shows it."""

    watched: bool


class Hold(Message):
    """While `held` is true, the workers' deadlines are suspended."""

    held: bool


class End(Message):
    """The job has ended, or this host has `left` the job. Carries the exit code and the last message.

    `failed`: the key of the process whose failure ends the job, of which its host shows the last lines.
    """

    code: Code
    words: Optional[Sentence] = None
    left: bool = False
    failed: Optional[Count] = None


class Beat(Message):
    """A heartbeat, sent by both ends: the sender is running."""


# ---- reports of a host ----


class Started(Message):
    """A process has started."""

    key: Count
    pid: Pid


class Exited(Message):
    """A process has exited. `code`: negative for a signal. `error`: set if it never ran. `gave_up`: as in `looked`."""

    key: Count
    code: Code
    error: Sentence = ""
    gave_up: Words = {}


class Checkpointed(Message):
    """No worker of the host is still writing a checkpoint before the job ends."""


class NoMemory(Message):
    """A standby isn't started because the host lacks memory."""

    key: Count
    why: Sentence


class Guardless(Message):
    """The host's supervisor has ended, and its workers have ended with it."""


class Made(Message):
    """The host has created its part of a version, or reports why it can't."""

    version: Count
    attempt: Count
    error: Sentence = ""


class Asks(Message):
    """A request of a worker."""

    number: Count
    message: ToJobBroker


class HungUp(Message):
    """The worker that sent this request has ended."""

    number: Count


class Looked(Message):
    """What the host observes of its workers.

    Per version and rank: `beats`: heartbeats; `gave_up`: why a rank can't continue; `progress`: the step, the seconds
    that a step takes, and the seconds since the last step. `awaited`: per version, which rank sleeps while it waits for
    which rank (-1: the inter-host transport), and whether the wait is overdue. `stopped` and `starved`: the keys of
    processes that are stopped, and of processes that get no core. `now`: the host's clock. `cores`: the cores that the
    job currently has on the host. `taken`: those of `cores` on which the user's other jobs run.
    """

    now: float
    cores: Cores
    beats: dict[Count, dict[Rank, Count]]
    gave_up: Words = {}
    stopped: Annotated[list[Count], Meta(max_length=_MOST_PROCESSES)] = []
    starved: Annotated[list[Count], Meta(max_length=_MOST_PROCESSES)] = []
    progress: dict[Count, dict[Rank, tuple[Count, float, float]]] = {}
    awaited: dict[Count, Annotated[list[tuple[Code, Code, bool]], Meta(max_length=_MOST_PROCESSES)]] = {}
    taken: Cores = ()


class Activity(Message):
    """What the host's workers do at this moment, per version and rank, and the resident memory of each process."""

    doing: dict[Count, dict[Rank, Doing]]
    memory: Annotated[dict[Count, Count], Meta(max_length=_MOST_PROCESSES)]


class StatusQuestion(Message):
    """A process on the host asks for the job's status."""

    number: Count


class Syncs(Message):
    """The workers of the host have requested this many sync points."""

    version: Count
    number: Count


class Unreachable(Message):
    """The inter-host transport of the version no longer reaches this host, and why."""

    version: Count
    host: Word
    why: Sentence


class TransportFailed(Message):
    """Why the inter-host transport of the version has failed."""

    version: Count
    why: Sentence


class Interrupted(Message):
    """The host's launcher got a signal that ends the job. `again`: a further signal; the job ends at once."""

    number: SignalNumber
    again: bool = False


class Leave(Message):
    """The host's launcher got a SIGTERM, and the job runs with -w: the host leaves."""


class Ends(Message):
    """The host ends on its own, and why: it has received nothing for -host-timeout."""

    why: Sentence


# ---- what is expected where ----

FirstWords = Union[Agent, Ask, WaitingController, TransportConnection]
FromController = Union[
    Launch, Signal, Checkpoint, Pin, Assign, Stack, Make, Close, Lost, VersionPrepared, Sync, Ending, LoseHost, Answer,
    JobStatus, NewLease, WatchActivity, Hold, End, Beat,
]  # fmt: skip
FromHost = Union[
    Started, Exited, Checkpointed, NoMemory, Guardless, Made, Asks, HungUp, Report, Looked, Activity, StatusQuestion,
    Syncs, Unreachable, TransportFailed, Interrupted, Leave, Ends, Beat,
]  # fmt: skip

NONCE: Reads[Union[Nonce, Error]] = Reads(Union[Nonce, Error])
PROOF: Reads[Union[Proof, Error]] = Reads(Union[Proof, Error])
TO_BROKER: Reads[ToBroker] = Reads(ToBroker)
FROM_BROKER: Reads[FromBroker] = Reads(FromBroker)
FIRST_WORDS: Reads[FirstWords] = Reads(FirstWords)
REGISTERED: Reads[Union[Registered, RegistrationRejected]] = Reads(Union[Registered, RegistrationRejected])
TERMS: Reads[Union[Terms, RegistrationRejected]] = Reads(Union[Terms, RegistrationRejected])
CALLS: Reads[Calls] = Reads(Calls)
CONNECTED: Reads[Connected] = Reads(Connected)
FROM_CONTROLLER: Reads[FromController] = Reads(FromController)
FROM_HOST: Reads[FromHost] = Reads(FromHost)
