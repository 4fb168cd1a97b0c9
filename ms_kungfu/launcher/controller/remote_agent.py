"""The controller's view of one host: an `AgentHandle` that exchanges messages with the host's launcher.

All messages to a host travel over one connection, in order. So if the answer to a worker depends on an event, the host
learns about the event before it gets the answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Protocol

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.hanging import HangingWorkers
from ms_kungfu.launcher.controller.prestarted import PrestartedWorkers
from ms_kungfu.launcher.controller.segments import SpreadSegment
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.registration import devices_of
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.log_files import log_paths
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_MAX_ASKING = 4096  # the maximum number of a host's worker requests that may wait for an answer
PARTING_S = 0.5  # time for a host's launcher to exit after the job; it needs a few hundredths of a second


class Workers(Protocol):
    """The object that manages the workers on the hosts. Call its methods in the event loop."""

    broker: Broker
    hanging: HangingWorkers
    prestarted: PrestartedWorkers

    def on_event(self, host: str, event: m.Started | m.Exited) -> None: ...
    def on_report(self, host: str, report: m.Report) -> None: ...
    def segment_was_made(self) -> None: ...


class NodeEvents(Protocol):
    """The receiver of the hosts' events."""

    @property
    def hosts(self) -> Hosts:
        """Return the hosts of the job."""
        ...

    @property
    def has_stood_still(self) -> bool:
        """Return whether the controller was paused a moment ago."""
        ...

    def left_s(self) -> float | None:
        """Return the seconds that are left until the job's -timeout."""
        ...

    def host_lost(self, name: str, reason: str) -> None:
        """Remove the host and its workers from the job. Called once per host."""

    def disconnected(self, host: str, other: str, reason: str) -> None:
        """Record that `host` has reported that it can't reach `other`, or any other host if `other` is ""."""

    def hosts_apart(self, reason: str) -> None:
        """End the job on all hosts, since it can't continue and no single host is at fault."""

    def interrupted(self, number: int, where: str) -> None:
        """Record that a host's launcher got the signal `number`. `where`: text that names the host."""

    def hurry(self) -> None:
        """Record that a host's launcher got a second signal, so the job has to end at once."""

    def host_leaves(self, name: str) -> None:
        """Record that a host's launcher got a SIGTERM. `RemoteHosts.let_go` follows later."""

    def objection_to(self, host: Host) -> str:
        """Return why the host can't join the job, or "" if it can."""
        ...

    def host_joined(self, host: Host, agent: AgentHandle) -> None:
        """Record that the host has joined and can start workers."""

    def status(self) -> dict[str, Any]:
        """Return the job's status document. Never raises."""
        ...


class Reachable(Protocol):
    def note_apart(self) -> None:
        """Record that a host has reported another host as unreachable."""

    def transport_failed(self, segment: SpreadSegment, why: str) -> None:
        """Record that a host can no longer exchange data with the other hosts of the segment."""


class Gathering(Protocol):
    news: asyncio.Event  # set when a host has registered or is confirmed


class Owner(Protocol):
    """The object that manages all hosts (`remote.RemoteHosts`)."""

    options: Options
    machine: Machine
    resumes: bool  # whether this controller continues a running job, so that the hosts report to it
    workers: asyncio.Future[Workers]

    @property
    def events(self) -> NodeEvents: ...

    def lose(self, agent: RemoteAgent, why: str) -> None:
        """Declare the host lost."""

    @property
    def reachability(self) -> Reachable: ...

    @property
    def gathering(self) -> Gathering: ...


class RemoteAgent:
    """One host of the job."""

    def __init__(
        self, owner: Owner, channel: AnyChannel, registration: m.Registration, cores_per_worker: int | None
    ) -> None:
        self.name = registration.host
        self.devices = devices_of(registration)
        self.shares = Shares(registration.cores, cores_per_worker, registration.taken)
        self.cpu_isa = registration.cpu_isa
        self.segments: dict[int, SpreadSegment] = {}  # segments that the host holds, or is making
        self.lost = ""  # why the host is lost
        self.is_confirmed = False  # whether the host has sent a message since it registered
        self._farewell = ""  # why the host's launcher ends, as it has reported
        self._last_words: m.End | None = None  # the last message to a lost host, until the message is sent
        self.apart: dict[tuple[int, str], str] = {}  # (version, host that this host can't reach any more) -> reason
        # after `RemoteHosts.checkpoint`, set when the host's checkpoints are written or the host is lost
        self.checkpointed = asyncio.Event()
        self.is_watched = False  # whether the host reports its workers' activity
        self.memory: dict[int, int] = {}  # key of a process -> its resident memory in bytes, while it is watched
        self.early: list[m.FromHost] = []  # messages that arrived before `RemoteHosts.attend`
        self._owner = owner
        self._channel = channel
        self.accepted_at = 0.0
        self._logdir = Path(os.fsdecode(registration.logdir)) if registration.logdir else None
        self._asking: dict[int, _RemoteAsker] = {}
        self._watch = HangWatch(owner.options.peer_timeout_s or math.inf)

    # ---- orders ----

    def send(self, message: m.FromController) -> None:
        self._channel.send(message)

    def start(self, launch: m.Launch) -> None:
        self.send(launch)

    def signal(self, number: int, key: int | None = None) -> None:
        self.send(m.Signal(number, key))

    def pin(self, key: int, cores: Sequence[int]) -> None:
        self.send(m.Pin(key, tuple(cores)))

    def ask_for_stack(self, key: int) -> None:
        self.send(m.Stack(key))

    def assign(self, key: int, peer: PeerID, incarnation: int, rank: int) -> None:
        self.send(m.Assign(key, str(peer), incarnation, rank))

    def log_paths(self, log_name: str) -> list[Path]:
        return log_paths(self._logdir, log_name)

    @property
    def heard(self) -> float:
        """Return the time at which the host's last message arrived, or its registration was accepted.

        A host sends no heartbeat while its registration waits, e.g. for the hosts that a new controller expects.
        """
        return max(self._channel.heard, self.accepted_at)

    def give_up(self, why: str, has_left: bool = False, tells: bool = True) -> None:
        """Declare the host lost or removed, and ignore its messages from now on.

        If possible, notify the host of the reason: now if `tells` is set, and otherwise when the snapshot contains the
        loss and `tell_end` is called.
        """
        if self.lost:
            return
        self.lost = why
        self.checkpointed.set()
        asking, self._asking = self._asking, {}
        for asker in asking.values():
            self._owner.workers.result().broker.requests.withdraw(asker)
        for segment in list(self.segments.values()):
            segment.was_made(self.name, why, is_lost=True)
        goes_on = self._owner.workers.done() and self._owner.options.recover is not Recover.FAIL
        text = "the job goes on without this host" if goes_on else f"host {self.name} is lost"
        words = None if has_left else f"{PROGRAM}: {text}: {why}"
        self._last_words = m.End(0 if has_left else 1, words, has_left)
        if tells:
            self.tell_end()

    def tell_end(self) -> None:
        """Send the host its last message, unless that was sent before."""
        words, self._last_words = self._last_words, None
        if words is not None:
            self.send(words)
            asyncio.get_running_loop().call_later(PARTING_S, self._channel.end)

    def drop(self) -> None:
        """Close the connection at both ends."""
        self.lost = self.lost or "another controller controls the job"
        self._channel.end()

    async def part(self) -> None:
        """Return when the host's launcher has ended."""
        while not self.lost:
            await asyncio.sleep(0.01)

    # ---- messages ----

    async def listen(self) -> str:
        """Process the host's messages until the connection ends. Return why it has ended."""
        try:
            while True:
                said = await self._channel.receive(m.FROM_HOST)
                if self.lost:
                    continue
                if not self.is_confirmed:
                    self.is_confirmed = True
                    self._owner.gathering.news.set()
                if type(said) in _AT_ANY_TIME:
                    _AT_ANY_TIME[type(said)](self, said)
                elif self._owner.workers.done():
                    self.hear(self._owner.workers.result(), said)
                elif self._owner.resumes:  # at the start of a job, a host has nothing to report
                    self.early.append(said)
        except OSError as error:
            if self._farewell:
                return f"{self._farewell}; it has ended its workers"
            return f"{PROGRAM} on host {self.name} has ended ({error.strerror or error}), and so have its workers"
        except asyncio.CancelledError:
            self.give_up("the job is over")
            raise
        except Exception as error:
            return self.trouble_with(error)

    def trouble_with(self, error: Exception) -> str:
        """Return the reason with which to declare this host lost, because one of its messages caused `error`."""
        if isinstance(error, ProtocolError):
            return f"{PROGRAM} on host {self.name} sent an invalid message: {error}"
        _log.error(
            'internal error: where=message from=%s error="%r". The launcher closes the connection',
            self.name, error, exc_info=error,
        )  # fmt: skip
        return f"internal error: message from {PROGRAM} on host {self.name}: {error!r}"

    def hear(self, workers: Workers, said: m.FromHost) -> None:
        """Process a message. Raise ProtocolError if the host must not send that message now."""
        if type(said) in _OF_A_VERSION:
            segment = self.segments.get(said.version)  # type: ignore[union-attr]
            if segment is not None:
                _OF_A_VERSION[type(said)](self, segment, said)
        else:
            _OF_WORKERS[type(said)](self, workers, said)

    def _hear_interrupted(self, said: m.Interrupted) -> None:
        self._owner.events.interrupted(said.number, f" on host {self.name}")
        if said.again:
            self._owner.events.hurry()

    def _hear_end(self, said: m.Ends) -> None:
        self._farewell = said.why

    def _hear_exited(self, workers: Workers, said: m.Exited) -> None:
        self._note_words(said.gave_up)
        workers.on_event(self.name, said)

    def _hear_looked(self, workers: Workers, said: m.Looked) -> None:
        self._note_words(said.gave_up)
        self.shares.cores, self.shares.taken = said.cores, said.taken
        for version, segment in self.segments.items():
            segment.beats.update(said.beats.get(version, {}))
            for rank, progress in said.progress.get(version, {}).items():
                segment.note_progress(rank, progress)
            if version in said.awaited:
                segment.note_waits(self.name, said.awaited[version])
        workers.hanging.look_at(self.name, self._watch, said.now, set(said.stopped), set(said.starved).__contains__)

    def watch_activity(self, watched: bool) -> None:
        """Make the host start or stop reporting its workers' activity and memory."""
        if watched != self.is_watched:
            self.is_watched, self.memory = watched, {}
            self.send(m.WatchActivity(watched))

    def _hear_activity(self, workers: Workers, said: m.Activity) -> None:
        self.memory = said.memory
        for version, segment in self.segments.items():
            for rank, doing in said.doing.get(version, {}).items():
                segment.note_doing(rank, doing)

    def _note_words(self, gave_up: m.Words) -> None:
        for version, words in gave_up.items():
            if version in self.segments:
                self.segments[version].words.update(words)

    def _hear_hung_up(self, workers: Workers, said: m.HungUp) -> None:
        asker = self._asking.pop(said.number, None)
        if asker is not None:
            workers.broker.requests.withdraw(asker)

    def _hear_guardless(self, workers: Workers, said: m.Guardless) -> None:
        self._owner.lose(self, f"the guard process on host {self.name} was killed, and so were the workers there")

    def _hear_made(self, segment: SpreadSegment, said: m.Made) -> None:
        if segment.attempt == said.attempt:
            segment.was_made(self.name, said.error)

    def _hear_unreachable(self, segment: SpreadSegment, said: m.Unreachable) -> None:
        self.apart[said.version, said.host] = said.why
        self._owner.events.disconnected(self.name, said.host, said.why)
        self._owner.reachability.note_apart()

    def _hear_transport_failed(self, segment: SpreadSegment, said: m.TransportFailed) -> None:
        self._owner.events.disconnected(self.name, "", said.why)
        self._owner.reachability.transport_failed(segment, said.why)

    def _serve(self, workers: Workers, said: m.Asks) -> None:
        broker, number, message = workers.broker, said.number, said.message
        if number in self._asking:
            raise ProtocolError(f"request {number} exists already")
        # a host may send requests only for its own workers
        named = message.peer if isinstance(message, m.SlotRequest) else ""
        if named and PeerID.parse(named).host != self.name:
            self.send(m.Answer(number, m.Error(f"{named} is not on host {self.name}")))
            return
        if len(self._asking) >= _MAX_ASKING:
            self.send(
                m.Answer(number, m.Error(f"{_MAX_ASKING} worker requests on this host wait already; retry later"))
            )
            return
        asker = self._asking[number] = _RemoteAsker(self, number)
        try:
            broker.serve(asker, message)
        except Exception as error:  # the worker gets no answer, but the host and the job continue
            _log.error("internal error: where=answer to=%s", self.name, exc_info=error)
            asker.end()

    def answer(self, number: int, message: m.FromJobBroker | None) -> None:
        """Answer a request from a worker on the host. If `message` is None, the worker gets no answer."""
        if self._asking.pop(number, None) is not None:
            self.send(m.Answer(number, message))


@dataclass(eq=False)
class _RemoteAsker:
    """A worker that waits, on its host, for an answer."""

    agent: RemoteAgent
    number: int

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        self.agent.answer(self.number, message)

    def end(self) -> None:
        self.agent.answer(self.number, None)


# The messages that a host may send, and the functions that receive them.
_AT_ANY_TIME: dict[type, Callable[[RemoteAgent, Any], None]] = {
    m.Interrupted: RemoteAgent._hear_interrupted,
    m.Checkpointed: lambda agent, said: agent.checkpointed.set(),
    m.Leave: lambda agent, said: agent._owner.events.host_leaves(agent.name),
    m.Ends: RemoteAgent._hear_end,
    m.StatusQuestion: lambda agent, said: agent.send(m.JobStatus(said.number, agent._owner.events.status())),
    m.Beat: lambda agent, said: None,
}
_OF_WORKERS: dict[type, Callable[[RemoteAgent, Workers, Any], None]] = {
    m.Started: lambda agent, workers, said: workers.on_event(agent.name, said),
    m.Exited: RemoteAgent._hear_exited,
    m.NoMemory: lambda agent, workers, said: workers.prestarted.no_memory(agent.name, said.key, said.why),
    m.Looked: RemoteAgent._hear_looked,
    m.Activity: RemoteAgent._hear_activity,
    m.Asks: RemoteAgent._serve,
    m.HungUp: RemoteAgent._hear_hung_up,
    m.Report: lambda agent, workers, said: workers.on_report(agent.name, said),
    m.Guardless: RemoteAgent._hear_guardless,
}
_OF_A_VERSION: dict[type, Callable[[RemoteAgent, SpreadSegment, Any], None]] = {
    m.Made: RemoteAgent._hear_made,
    m.TransportFailed: RemoteAgent._hear_transport_failed,
    m.Syncs: lambda agent, segment, said: segment.pass_on_sync_points(said.number),
    m.Unreachable: RemoteAgent._hear_unreachable,
}
