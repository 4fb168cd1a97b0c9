"""Define every message between the processes of a job.

`python -m ms_kungfu.launcher.wire.page` prints docs/messages.md from this module. A message is a JSON object whose
field ``type`` names its class. A process accepts only the messages described here, with values within their limits.
Increment `wire.PROTOCOL` with each change that makes the messages unreadable for processes without the change.
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
_MOST_PROCESSES = 8192  # processes on one host, including those that have exited recently

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
ACTIVITIES = ("", "data", "checkpoint", "evaluation", "compilation", "callback")
"""What a program can do outside of its steps. A worker writes the index of its activity into shared memory."""
Loss = tuple[Rank, Sentence, bool, bool]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The base class of objects inside messages."""


class Message(Part, tag=_tag, tag_field="type"):
    """The base class of messages."""


# ---- parts ----


class ClusterPart(Part, rename="pascal"):
    """A cluster version in KungFu's JSON format. `workers`: the peer IDs of its workers in rank order."""

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
    """A device that a worker can use.

    `visible`: the value of the variable that limits which devices the worker sees. If it is null, the worker sees all
    devices that its launcher sees.
    """

    name: Word
    device_id: Number
    visible: Optional[Sentence] = None


class CpuIsa(Part, frozen=True):  # type: ignore[misc]
    """The vector instructions that oneDNN may use on a host. Levels have the names that ONEDNN_MAX_CPU_ISA accepts.

    `level`: the highest level that the host's workers should use. `native`: the highest level that the host's processor
    supports. `reason`: why `level` and `native` differ. `error`: why the host could not determine the levels.
    `is_users`: true if the user has set ONEDNN_MAX_CPU_ISA on the host.
    """

    level: Word
    native: Word
    reason: Sentence = ""
    error: Sentence = ""
    is_users: bool = False


class Registration(Part):
    """The description of a host that registers with the controller.

    `flags`: the flags that must have the same values on all hosts, as text. `version`: the version of ms_kungfu.
    `mindspore`: the version of MindSpore, or "" if it isn't installed. `cores`: the cores that the job may use on the
    host. `taken`: the cores on which the user's other jobs run. `logdir`: the bytes of the path in base 64. `cpu_isa`:
    the vector instructions that oneDNN may use on the host; null if the host's processor supports none of the levels
    that ONEDNN_MAX_CPU_ISA accepts.
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

    `peer`: null for a standby without a slot. `code`: the exit code, or null while the process runs. `standby`: the
    process's number if it was started as a standby.
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
    """What a worker is doing at this moment.

    `activity`: what the worker does outside of its steps, or "" for no particular activity. `seconds`: for how long
    the worker has been doing this. `operations`: the collective operations in which the worker has been waiting for a
    long time.
    """

    activity: Word = ""
    seconds: float = 0.0
    operations: Sentence = ""


class ResyncReport(Part):
    """The state that a host reports to the next controller of a running job.

    `losses`: for each cluster version on the host, the failures that the host was notified of, in order. Each entry
    contains the rank, the reason, whether the other members continue, and whether the process was reaped. `leaving`:
    the workers that have got permission to leave. `slot_holders`: the peer ID and incarnation of each process that has
    a slot. `cores`: the number of cores of each worker, or 0 if the number isn't fixed. `cpu_isa`: the highest level of
    vector instructions that the workers may use, or "" if there is no limit.
    """

    workers: Annotated[list[Worker], Meta(max_length=_MOST_PROCESSES)]
    losses: dict[Count, Annotated[list[Loss], Meta(max_length=MAX_WORKERS_OF_HOSTS)]]
    leaving: Annotated[list[Peer], Meta(max_length=_MOST_PROCESSES)]
    slot_holders: Annotated[list[tuple[Peer, Count]], Meta(max_length=_MOST_PROCESSES)] = []
    cores: Number = 0
    cpu_isa: Word = ""


# ---- handshake ----


class Nonce(Message, forbid_unknown_fields=False):
    """The first message that each end of a connection sends. It contains 16 random bytes in hex.

    `protocol`: the protocol version of the sender. In other protocol versions, this message may have more fields.
    """

    nonce: Nonce16
    protocol: Count


class Proof(Message):
    """The proof that the sender knows the job's secret.

    `proof`: an HMAC-SHA256 in hex, with the job's secret as the key. The HMAC's input is a word that names the
    sender's role, followed by both nonces.
    """

    proof: Proof32


class Error(Message):
    """The sender rejects the request or the connection. `error`: the reason."""

    error: Sentence


# ---- requests from a worker to its host's broker ----


class Software(Part):
    """The software versions that a joining worker uses. All workers must use the same versions.

    `mindspore`: "" if MindSpore isn't installed.
    """

    ms_kungfu: Word
    mindspore: Word


class SlotRequest(Message):
    """A worker requests its slot in a cluster version.

    A member of version `member_of` requests its slot in `version`, on which the members have agreed. `step`: the
    member's training step. A joining worker, which is now ready, sends neither `member_of` nor `version`. The broker
    answers a joining worker when a version that contains the worker is committed.
    """

    peer: Peer
    incarnation: Count
    member_of: Optional[Count] = None
    version: Optional[Count] = None
    step: Optional[Count] = None
    software: Optional[Software] = None


class StandbyRequest(Message):
    """A standby is ready, and waits until it gets a slot. `number`: the standby's number."""

    number: Count
    software: Optional[Software] = None


class LeaveRequest(Message):
    """A worker asks that the cluster continue without worker `peer`. `terminated`: true if `peer` got a SIGTERM."""

    peer: Peer
    terminated: bool = False


class FixCores(Message):
    """A worker asks that each worker have `each` cores from now on, unless the number of cores is already fixed."""

    each: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Expect(Message):
    """The members of cluster version `version` expect that the next cluster has `size` workers.

    `joining`: how many of these workers are new.
    """

    version: Count
    joining: Number
    size: Number


class ProgramEnded(Message):
    """The worker's program has ended without an exception, and the worker's Python interpreter is about to exit."""

    peer: Peer
    incarnation: Count


class PutStore(Message):
    """The worker submits its model store. The message carries a read-only file descriptor of the store."""

    peer: Peer
    incarnation: Count


class GetStore(Message):
    """A worker requests the model store of `peer`, another worker on the same host."""

    peer: Peer


class Report(Message):
    """A worker's report for the event log. The host forwards the report to the controller and doesn't answer it.

    `events`: the worker's new events (docs/event-log.md), oldest first. `steps`: statistics about the worker's steps,
    which it sends about once per second.
    """

    peer: Peer
    incarnation: Count
    events: Annotated[list[job_events.WorkerEvent], Meta(max_length=64)] = []
    steps: Optional[job_events.StepReport] = None


class AwaitEnd(Message):
    """The worker wants to write a checkpoint when the job is about to end.

    The worker closes the connection when the checkpoint is written, or when none is needed any more.
    """


# ---- answers of the broker ----


class Slot(Message):
    """The worker gets a slot in a cluster version. The message carries the file descriptor of the version's segment.

    If the version has workers on several hosts, the message carries three more descriptors. They belong to
    the version's control block, to a socket of the inter-host transport, and to a socket of the model transport.
    """

    cluster: ClusterPart
    rank: Rank
    peer: Peer
    incarnation: Count


class Detached(Message, frozen=True):  # type: ignore[misc]
    """The worker is removed, because the committed cluster version doesn't contain it.

    `evicted`: true if a user or another worker requested the removal of this worker.
    """

    evicted: bool = False


class Stay(Message, frozen=True):  # type: ignore[misc]
    """The worker stays in its current cluster version.

    Either the version on which the members had agreed was abandoned before any worker adopted it, or the worker got a
    SIGTERM and may not leave, so the job ends.
    """


class Leaving(Message):
    """The cluster will continue without the worker that the leave request named."""


class CoresFixed(Message):
    """The number of cores per worker is fixed. `each`: the number, or 0 if the launcher doesn't pin workers."""

    each: Number


class Noted(Message):
    """The broker has read the worker's message.

    The broker sends this acknowledgement if the message needs no other answer.
    """


class Store(Message):
    """The answer to a message that submits or requests a model store.

    `found`: for a request, whether the model store exists; for a submission, whether the broker keeps the model store.
    If a requested model store exists, the message carries its file descriptor.
    """

    found: bool


class JobEnds(Message):
    """The job is about to end because of signal `number`. The worker gets the signal after its checkpoint."""

    number: SignalNumber


class Waiting(Message):
    """The launcher is waiting for the job's store, so the time limit of the worker's request starts again now."""


ToJobBroker = Union[SlotRequest, StandbyRequest, LeaveRequest, FixCores, Expect, ProgramEnded]
FromJobBroker = Union[Slot, Detached, Stay, Leaving, CoresFixed, Noted, Error]
ToBroker = Union[ToJobBroker, PutStore, GetStore, AwaitEnd, Report]
FromBroker = Union[FromJobBroker, Store, JobEnds, Waiting]


# ---- the first message of a connection between hosts, and its answer ----


class Agent(Message):
    """A host asks to take part in the job.

    `command`: the command that the host's launcher was given. A host that joins a running job sends none. `slots`: the
    number of slots of a host that joins a running job. `report`: for a new controller, the resync report of a host
    that already takes part in the job.
    """

    registration: Registration
    command: Optional[Command] = None
    slots: Optional[Slots] = None
    report: Optional[ResyncReport] = None


class Ask(Message):
    """A host that wants to join the running job asks for the job's settings (`terms`)."""

    host: Word
    slots: Slots
    version: Word
    mindspore: Word


class WaitingController(Message):
    """The head node waits for the other hosts, and asks one of them what it is doing.

    `host`: the name of the head node. `hosts`: the value of its flag -H.
    """

    host: Word
    hosts: Sentence


class TransportConnection(Message):
    """A host opens a connection for the inter-host transport of a cluster version.

    `host`: the host that opens the connection. `attempt`: the number of this attempt to create the transport. `number`:
    the number of the connection among those that `host` opens to the receiver.
    """

    job: Word
    version: Count
    attempt: Count
    host: Word
    number: Number


class Registered(Message):
    """From now on, the host takes part in the job.

    `secret`: the secret of the job's brokers and config server. It is sent only with -no-secret. `look_s`: the
    interval in seconds at which the host reports its workers' heartbeats. `lease`: the etcd revision at which the
    controller acquired its lease, or null if no other host can take over. `warning`: a warning for the user.
    """

    job: Word
    look_s: float
    secret: Optional[Word] = None
    lease: Optional[Count] = None
    warning: Sentence = ""


class RegistrationRejected(Message):
    """The host can't take part in the job. `reason`: why not."""

    reason: Sentence


class Terms(Message):
    """The job's settings, for a host that wants to join.

    `flags`: the values of the job's flags, by option name. `left_s`: the number of seconds until the job's -timeout.
    """

    command: Command
    hosts: Annotated[list[tuple[Word, Optional[Slots]]], Meta(max_length=_MOST_HOSTS)]
    head: Word
    most: Optional[Number]
    placement: Literal["even", "fill"]
    ports: Optional[tuple[Number, Number]]
    # A union must not contain both a tuple of fixed length and types with limits. Otherwise, msgspec 0.20 to 0.22 crash
    # at the next garbage collection.
    flags: Annotated[dict[Word, Union[None, bool, int, float, Word]], Meta(max_length=1024)]
    left_s: Optional[float]


class Calls(Message):
    """A host tells a waiting controller what it is doing.

    `hosts`: the value of the host's flag -H. `calls`: the host to which it tries to connect, because it expects the
    controller there. `for_s`: how long it has tried, in seconds. `waits`: true if the host is itself a head node that
    waits for other hosts. `in_a_job`: true if the host already takes part in a job.
    """

    hosts: Sentence
    calls: Word
    for_s: float = 0.0
    waits: bool = False
    in_a_job: bool = False


class Connected(Message):
    """The host accepts the connection, which belongs to the inter-host transport from now on."""


# ---- orders of the controller ----


class Launch(Message, frozen=True):  # type: ignore[misc]
    """Start a process.

    `key`: the number that identifies the process in the job. `rank`: the rank that is printed before the process's
    output lines, and that determines their colour. `held`: true if the host shows no output of the process before it
    gets `assign`. `environment`: the differences from the environment of the host's launcher. The value null removes a
    variable. `cores`: the cores that the process may run on. An empty list means all cores. `threads`: the number of
    OpenMP threads, unless the user sets it. `device`: the index of the process's device among the host's devices.
    `needs`: the host starts the process only if it has memory for this many workers.
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
    """Send signal `number` to the process group of a worker.

    `key`: the key of the worker's process. If it is null, send the signal to all workers on the host.
    """

    number: SignalNumber
    key: Optional[Count] = None


class Checkpoint(Message):
    """The job is about to end because of signal `number`. Each worker that uses checkpoints writes one now."""

    number: SignalNumber


class Pin(Message):
    """Move all threads of a worker to the given cores."""

    key: Count
    cores: Cores


class Assign(Message):
    """A standby gets the slot of peer ID `peer`. From now on, the host shows the standby's output."""

    key: Count
    peer: Peer
    incarnation: Count
    rank: Rank


class Stack(Message):
    """Make a worker write its Python stacks to its output."""

    key: Count


class Make(Message):
    """Create this host's part of a cluster version's shared memory and transports.

    `recovers`: true if the other workers continue after a worker has failed.
    """

    attempt: Count
    cluster: ClusterPart
    recovers: bool


class Close(Message):
    """Close this host's part of a cluster version's shared memory and transports."""

    version: Count


class Lost(Message):
    """Rank `rank` of cluster version `version` has failed.

    The host records the failure in the version's control block and, if the rank ran on this host, in the version's
    segment. `recover`: true if the other members continue without the rank. `reaped`: true if the process has exited
    and has been reaped.
    """

    version: Count
    rank: Rank
    reason: Sentence
    recover: bool
    reaped: bool


class VersionPrepared(Message):
    """The members of cluster version `version` may adopt cluster version `newer`."""

    version: Count
    newer: Count


class Sync(Message):
    """The workers of cluster version `version` have requested `number` sync points in total, on all hosts together."""

    version: Count
    number: Count


class Ending(Message):
    """The controller is about to end a stuck rank, or, if `ending` is false, won't end it after all.

    While the controller is about to end the rank, the ranks that wait for it don't time out.
    """

    version: Count
    rank: Rank
    ending: bool


class LoseHost(Message):
    """The inter-host transport of cluster version `version` continues without host `host`, which is lost."""

    version: Count
    host: Word


class Answer(Message):
    """The answer to request `number` from a worker on this host. The host adds the file descriptors to the answer.

    `message`: the answer, or null if the worker gets no answer.
    """

    number: Count
    message: Optional[FromJobBroker]


class JobStatus(Message):
    """The job's status, for the process on the host that requested the status. That process validates it."""

    number: Count
    job: dict[str, Any]


class NewLease(Message):
    """The controller's lease had expired, and the controller has acquired it again at etcd revision `since`."""

    since: Count


class WatchActivity(Message):
    """If `watched` is true, the host sends `activity` once per second from now on, because a dashboard shows it."""

    watched: bool


class Hold(Message):
    """If `held` is true, the workers' deadlines are suspended until the next `hold` message."""

    held: bool


class End(Message):
    """The host's launcher has to exit, because the job has ended or goes on without this host.

    `code`: the launcher's exit code. `words`: the last message that the launcher prints. `left`: true if this host has
    left the job. `failed`: the key of the process whose failure ends the job. The host of that process shows the last
    lines of its output.
    """

    code: Code
    words: Optional[Sentence] = None
    left: bool = False
    failed: Optional[Count] = None


class Beat(Message):
    """A heartbeat, which shows that the sender is running. Both ends of a connection send heartbeats."""


# ---- reports of a host ----


class Started(Message):
    """The host has started a process."""

    key: Count
    pid: Pid


class Exited(Message):
    """A process has exited.

    `code`: the exit code, or -n if signal n killed the process. `error`: why the process never ran, or "" if it ran.
    `gave_up`: see `looked`.
    """

    key: Count
    code: Code
    error: Sentence = ""
    gave_up: Words = {}


class Checkpointed(Message):
    """On the host, every worker that had to write a final checkpoint has written it."""


class NoMemory(Message):
    """The host hasn't started a standby, because it has too little memory."""

    key: Count
    why: Sentence


class Guardless(Message):
    """The host's supervisor process has ended, and all workers on the host have ended with it."""


class Made(Message):
    """The host has created its part of a cluster version's shared memory and transports, or reports why it can't.

    `error`: the reason, or "" if the host has created its part.
    """

    version: Count
    attempt: Count
    error: Sentence = ""


class Asks(Message):
    """The host forwards a request from one of its workers. `number`: the number of the request on the host."""

    number: Count
    message: ToJobBroker


class HungUp(Message):
    """The worker that sent request `number` has closed its connection, so it needs no answer."""

    number: Count


class Looked(Message):
    """What the host has observed about its workers.

    `now`: the time on the host's clock. Three fields contain values by cluster version and rank. `beats` contains the
    rank's heartbeat count. `gave_up` says why the rank can't continue. `progress` contains the rank's last step, the
    seconds that a step takes, and the seconds since the last step.

    `awaited`: for each version, a list of waits. A wait contains the rank that sleeps, the rank for which it waits, and
    whether the wait will soon time out. Rank -1 is the inter-host transport. `stopped`: the keys of processes that a
    signal has stopped. `starved`: the keys of processes that get no core. `cores`: the cores that the job currently has
    on the host. `taken`: those of the `cores` on which the user's other jobs run.
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
    """What the workers on the host are doing at this moment.

    `doing`: each rank's activity, by cluster version and rank. `memory`: each process's resident memory in bytes, by
    the process's key.
    """

    doing: dict[Count, dict[Rank, Doing]]
    memory: Annotated[dict[Count, Count], Meta(max_length=_MOST_PROCESSES)]


class StatusQuestion(Message):
    """A process on the host asks for the job's status."""

    number: Count


class Syncs(Message):
    """The workers on the host have requested `number` sync points in cluster version `version`."""

    version: Count
    number: Count


class Unreachable(Message):
    """The sender's inter-host transport for cluster version `version` no longer reaches host `host`.

    `why`: the reason.
    """

    version: Count
    host: Word
    why: Sentence


class TransportFailed(Message):
    """The sender's inter-host transport for cluster version `version` has failed. `why`: the reason."""

    version: Count
    why: Sentence


class Interrupted(Message):
    """The host's launcher got signal `number`, which ends the job.

    `again`: true if this is a second signal, after which the job ends at once.
    """

    number: SignalNumber
    again: bool = False


class Leave(Message):
    """The host's launcher got a SIGTERM in a job that runs with -w, so the host wants to leave the job."""


class Ends(Message):
    """The host ends its workers and exits, because it has received no message for -host-timeout.

    `why`: the reason as text.
    """

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
