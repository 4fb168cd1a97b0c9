"""Every message between the processes of a job. `python -m ms_kungfu.launcher.wire.page` prints docs/messages.md.

A message is an object whose ``type`` names its class. A process accepts only what is described here, within its limits.
`wire.PROTOCOL` changes with each change here that another version can't read.
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
_MOST_PROCESSES = 8192  # of a host, with those that have exited lately

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
Loss = tuple[Rank, Sentence, bool, bool]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of messages."""


class Message(Part, tag=_tag, tag_field="type"):
    """A message."""


# ---- parts ----


class ClusterPart(Part, rename="pascal"):
    """A cluster version, in KungFu's JSON: its workers in the order of their ranks."""

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
    """A device, as described to one worker. `visible` null: the worker sees what its launcher sees."""

    name: Word
    device_id: Number
    visible: Optional[Sentence] = None


class CpuIsa(Part, frozen=True):  # type: ignore[misc]
    """The vector instructions of oneDNN on a host, by its names (ONEDNN_MAX_CPU_ISA).

    `level`: those that the host's workers should use at most; `native`: those of its processor. `reason`: why these
    differ. `error`: why the host could not find out. `is_users`: the user has set the variable there.
    """

    level: Word
    native: Word
    reason: Sentence = ""
    error: Sentence = ""
    is_users: bool = False


class Registration(Part):
    """A host.

    `flags`: those that have to be the same on all hosts, as text. `mindspore`: its version, "" without. `logdir`: the
    path's bytes, in base 64. `taken`: those of its cores on which other jobs of the user run. `cpu_isa`: null if the
    host has no such instructions.
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

    `peer` null: a standby. `code`: its exit code, if it has exited. `standby`: the number of one that was prestarted.
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


class ResyncReport(Part):
    """A host's report to the next controller.

    `losses`: of each version that it has, the failures of which it was notified, in order: rank, reason, whether the
    others continue, whether the process was reaped. `leaving`: the workers whose leave its workers have requested, with
    success. `slot_holders`: which processes have a slot. `cores`: how many each has, 0 unless that was fixed.
    `cpu_isa`: the cap of their vector instructions, "" without one.
    """

    workers: Annotated[list[Worker], Meta(max_length=_MOST_PROCESSES)]
    losses: dict[Count, Annotated[list[Loss], Meta(max_length=MAX_WORKERS_OF_HOSTS)]]
    leaving: Annotated[list[Peer], Meta(max_length=_MOST_PROCESSES)]
    slot_holders: Annotated[list[tuple[Peer, Count]], Meta(max_length=_MOST_PROCESSES)] = []
    cores: Number = 0
    cpu_isa: Word = ""


# ---- handshake ----


class Nonce(Message, forbid_unknown_fields=False):
    """The first message of each end: 16 random bytes in hex, and the version of all other messages.

    Another version may have more fields.
    """

    nonce: Nonce16
    protocol: Count


class Proof(Message):
    """HMAC-SHA256 of the job's secret over a word for the role and both nonces, in hex."""

    proof: Proof32


class Error(Message):
    """Why the request, or the connection, is rejected."""

    error: Sentence


# ---- requests of a worker to its host's broker ----


class Software(Part):
    """The versions that a joining worker uses: all workers of a job need the same ones. `mindspore`: "" without."""

    ms_kungfu: Word
    mindspore: Word


class SlotRequest(Message):
    """A member of version `member_of` requests its slot in `version`, on which its cluster has agreed.

    A joining worker names neither: it is ready, and gets its answer once a version that contains it is committed.
    `step`: of its training.
    """

    peer: Peer
    incarnation: Count
    member_of: Optional[Count] = None
    version: Optional[Count] = None
    step: Optional[Count] = None
    software: Optional[Software] = None


class StandbyRequest(Message):
    """A standby is ready, and waits until it gets a slot."""

    number: Count
    software: Optional[Software] = None


class LeaveRequest(Message):
    """The cluster is to continue without `peer`. `terminated`: because it got a SIGTERM."""

    peer: Peer
    terminated: bool = False


class FixCores(Message):
    """Each worker of the host is to have so many cores from now on, unless their number is fixed already."""

    each: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Expect(Message):
    """The members of `version` expect a cluster of `size` workers next, of which `joining` are new."""

    version: Count
    joining: Number
    size: Number


class ProgramEnded(Message):
    """The worker's program has ended without an exception; its interpreter is about to end."""

    peer: Peer
    incarnation: Count


class PutStore(Message):
    """The worker's model store; its descriptor, which can only read, comes with this."""

    peer: Peer
    incarnation: Count


class GetStore(Message):
    """A request for the model store of another worker of the host."""

    peer: Peer


class Report(Message):
    """What a worker reports for the event log. There is no answer.

    A host passes it on to the controller. `events`: in their order (docs/event-log.md). `steps`: about once a second.
    """

    peer: Peer
    incarnation: Count
    events: Annotated[list[job_events.WorkerEvent], Meta(max_length=64)] = []
    steps: Optional[job_events.StepReport] = None


class AwaitEnd(Message):
    """The worker writes a checkpoint when the job is about to end. It hangs up once that is done, or not needed."""


# ---- answers of the broker ----


class Slot(Message):
    """A slot in a version, with the descriptor of its segment.

    If the version is over several hosts, three more come with it: of its control block, and of sockets to the
    inter-host transport and the model transport.
    """

    cluster: ClusterPart
    rank: Rank
    peer: Peer
    incarnation: Count


class Detached(Message, frozen=True):  # type: ignore[misc]
    """The committed version doesn't contain the worker. `evicted`: a user or another worker has named it."""

    evicted: bool = False


class Stay(Message, frozen=True):  # type: ignore[misc]
    """The agreed version was given up before any worker adopted it: its members stay in theirs."""


class Leaving(Message):
    """The cluster continues without that worker."""


class CoresFixed(Message):
    """Each worker has so many cores; 0: the launcher pins none."""

    each: Number


class Noted(Message):
    """The broker has read the report."""


class Store(Message):
    """Whether there is such a store, whose descriptor comes with this, or whether the broker keeps it."""

    found: bool


class JobEnds(Message):
    """The job is about to end by this signal, which the worker gets after its checkpoint."""

    number: SignalNumber


class Waiting(Message):
    """The launcher waits for the job's store: the time limit of the request counts from now."""


ToJobBroker = Union[SlotRequest, StandbyRequest, LeaveRequest, FixCores, Expect, ProgramEnded]
FromJobBroker = Union[Slot, Detached, Stay, Leaving, CoresFixed, Noted, Error]
ToBroker = Union[ToJobBroker, PutStore, GetStore, AwaitEnd, Report]
FromBroker = Union[FromJobBroker, Store, JobEnds, Waiting]


# ---- the first message of a connection between hosts, and its answer ----


class Agent(Message):
    """A host takes part in the job.

    `command`: what it is to run, unless it joins. `slots`: of a host that joins a running job. `report`: to the next
    controller of a running job.
    """

    registration: Registration
    command: Optional[Command] = None
    slots: Optional[Slots] = None
    report: Optional[ResyncReport] = None


class Ask(Message):
    """A host that is about to join asks for the job's terms."""

    host: Word
    slots: Slots
    version: Word
    mindspore: Word


class WaitingController(Message):
    """A host that waits as the head node for the others asks one of them what it does. `hosts`: its -H."""

    host: Word
    hosts: Sentence


class TransportConnection(Message):
    """A connection for the inter-host transport of a version.

    It is connection `number` of `host`, for this `attempt` to make the transport.
    """

    job: Word
    version: Count
    attempt: Count
    host: Word
    number: Number


class Registered(Message):
    """The host takes part.

    `secret`: of the job's brokers and config server, under -no-secret. `look_s`: how often the host reports its
    heartbeats. `lease`: the revision at which the controller has taken the lease, if the controller moves. `warning`:
    for the user.
    """

    job: Word
    look_s: float
    secret: Optional[Word] = None
    lease: Optional[Count] = None
    warning: Sentence = ""


class RegistrationRejected(Message):
    """Why the host can't take part, or join."""

    reason: Sentence


class Terms(Message):
    """The job's terms, for a host that joins it. `flags`: by the names of their options; `left_s`: of -timeout."""

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
    """What the host does, for a controller that asks.

    `hosts`: its -H; `calls`: the controller that it calls; `for_s`: for how long by now; `waits`: it waits itself, as
    the controller; `in_a_job`: it takes part in one.
    """

    hosts: Sentence
    calls: Word
    for_s: float = 0.0
    waits: bool = False
    in_a_job: bool = False


class Connected(Message):
    """The connection belongs to the inter-host transport from now on."""


# ---- orders of the controller ----


class Launch(Message, frozen=True):  # type: ignore[misc]
    """Start a process.

    `key`: its name between launcher and supervisor, in the whole job. `rank`: for the colour of its lines. `held`: its
    output isn't shown before `assign`. `environment`: changes to that of the host's launcher; null removes. `cores`:
    those that it may run on, none: all. `threads`: of OpenMP, unless the user says. `device`: its index among the
    host's. `needs`: the start is rejected unless the host has memory for so many workers.
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
    """Send a signal to the process group of a worker; null: of each worker of the host."""

    number: SignalNumber
    key: Optional[Count] = None


class Checkpoint(Message):
    """The job is about to end by this signal: the workers with checkpoints write one."""

    number: SignalNumber


class Pin(Message):
    """Move a worker to these cores."""

    key: Count
    cores: Cores


class Assign(Message):
    """A standby has this slot. Show its output from now on."""

    key: Count
    peer: Peer
    incarnation: Count
    rank: Rank


class Stack(Message):
    """Have a worker write its Python stacks to its output."""

    key: Count


class Make(Message):
    """Make this host's part of a version. `recovers`: members continue without failed ones."""

    attempt: Count
    cluster: ClusterPart
    recovers: bool


class Close(Message):
    """Close this host's part of a version."""

    version: Count


class Lost(Message):
    """A rank has failed: for the control block of the version, and if it is of this host for its segment."""

    version: Count
    rank: Rank
    reason: Sentence
    recover: bool
    reaped: bool


class VersionPrepared(Message):
    """The members of the version may adopt a newer one."""

    version: Count
    newer: Count


class Sync(Message):
    """The workers of all hosts have requested so many sync points."""

    version: Count
    number: Count


class Ending(Message):
    """A rank is stuck and about to be ended, or isn't after all: the others don't give up meanwhile."""

    version: Count
    rank: Rank
    ending: bool


class LoseHost(Message):
    """The inter-host transport of the version continues without that host."""

    version: Count
    host: Word


class Answer(Message):
    """The answer to a request of a worker of the host; null: there is none. The host adds the descriptors."""

    number: Count
    message: Optional[FromJobBroker]


class JobStatus(Message):
    """The job's status, for a caller on that host, which checks it (`documents.STATUS`)."""

    number: Count
    job: dict[str, Any]


class NewLease(Message):
    """The controller has taken the lease again after its expiry, at this revision."""

    since: Count


class Hold(Message):
    """While it is `held` no deadline of a worker runs."""

    held: bool


class End(Message):
    """The job has ended, or this host has `left` it: exit code and last message."""

    code: Code
    words: Optional[Sentence] = None
    left: bool = False


class Beat(Message):
    """The sender runs. Both ends send this."""


# ---- reports of a host ----


class Started(Message):
    """A process runs."""

    key: Count
    pid: Pid


class Exited(Message):
    """A process has exited. `code` is negative for a signal; `error`: it never ran. `gave_up`: as in `looked`."""

    key: Count
    code: Code
    error: Sentence = ""
    gave_up: Words = {}


class Checkpointed(Message):
    """No worker of the host writes a checkpoint before the end any more."""


class NoMemory(Message):
    """A standby isn't started for lack of memory."""

    key: Count
    why: Sentence


class Guardless(Message):
    """The host's supervisor has ended, and with it its workers."""


class Made(Message):
    """The host has its part of a version, or why it can't."""

    version: Count
    attempt: Count
    error: Sentence = ""


class Asks(Message):
    """A worker's request."""

    number: Count
    message: ToJobBroker


class HungUp(Message):
    """The worker with this request has ended."""

    number: Count


class Looked(Message):
    """What the host sees of its workers.

    By version and rank: heartbeats; why ranks can't continue; step, seconds of a step, and seconds since then; which
    rank sleeps for which (-1: the inter-host transport), and whether that is overdue. By keys: which are stopped, and
    which get no core. `now`: the host's clock. `cores`: those that it has for the job by now; `taken`: those of them on
    which other jobs of the user run.
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


class StatusQuestion(Message):
    """A process on that host asks for the job's status."""

    number: Count


class Syncs(Message):
    """The workers of that host have requested so many sync points."""

    version: Count
    number: Count


class Unreachable(Message):
    """The inter-host transport of the version doesn't reach that host any more, and why."""

    version: Count
    host: Word
    why: Sentence


class TransportFailed(Message):
    """Why the inter-host transport of the version has failed."""

    version: Count
    why: Sentence


class Interrupted(Message):
    """The host's launcher got a signal that ends the job, or `again` one, after which the job ends at once."""

    number: SignalNumber
    again: bool = False


class Leave(Message):
    """The host's launcher got a SIGTERM, and the job watches: the host leaves."""


class Ends(Message):
    """The host ends by itself, and why: it has received nothing for -host-timeout."""

    why: Sentence


# ---- what is expected where ----

FirstWords = Union[Agent, Ask, WaitingController, TransportConnection]
FromController = Union[
    Launch, Signal, Checkpoint, Pin, Assign, Stack, Make, Close, Lost, VersionPrepared, Sync, Ending, LoseHost, Answer,
    JobStatus, NewLease, Hold, End, Beat,
]  # fmt: skip
FromHost = Union[
    Started, Exited, Checkpointed, NoMemory, Guardless, Made, Asks, HungUp, Report, Looked, StatusQuestion, Syncs,
    Unreachable, TransportFailed, Interrupted, Leave, Ends, Beat,
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
