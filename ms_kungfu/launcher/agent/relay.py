"""Pass requests of a host's workers to the controller's broker, and its answers back.

The relay adds what only this host has: the descriptors of a slot, the process that has it, and model stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from typing import Callable, Protocol

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.agent.last_checkpoints import LastCheckpoints
from ms_kungfu.launcher.agent.plain_segment import HostSegment
from ms_kungfu.launcher.agent.stores import Stores
from ms_kungfu.launcher.state.segment import Asker
from ms_kungfu.launcher.wire import messages as m

_REMIND_S = 1.0
_Process = tuple[PeerID, int]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


class Request(Asker, Protocol):
    """A worker's request (`broker_server.Request`)."""

    pid: int

    def note_waiting(self) -> None:
        """Restart the worker's time limit."""

    def note_end(self, number: int) -> None:
        """Notify the worker that the job is about to end by this signal."""


class Relay:
    """Requests and answers, in the agent's event loop.

    `send` brings a message to the controller. Owns the host's segments.
    """

    def __init__(self, send: Callable[[m.FromHost], None], is_alive: Callable[[int], bool] = is_alive) -> None:
        self._send = send
        self._is_alive = is_alive
        self._loop = asyncio.get_running_loop()
        self.stores = Stores()
        self.last_checkpoints = LastCheckpoints(lambda: self._send(m.Checkpointed()))
        self._numbers = itertools.count(1)
        self._segments: dict[int, HostSegment] = {}
        self._asked: dict[int, tuple[Request, m.ToJobBroker]] = {}  # requests without an answer
        self.cores = 0  # how many each worker has, if a worker of this host knows that the number is fixed
        self._leaving: list[str] = []  # workers that may leave because a worker of this host requested it
        self._holders: dict[_Process, int] = {}
        self._held = False  # the workers' deadlines
        self._reminder: asyncio.TimerHandle | None = None
        self._closed = False

    # ---- orders of the controller ----

    def answer(self, number: int, message: m.FromJobBroker | None) -> None:
        """Answer a request; None: without an answer."""
        request, asked = self._asked.pop(number, (None, None))
        if request is None:  # withdrawn
            return
        if isinstance(asked, m.LeaveRequest) and isinstance(message, m.Leaving):
            self._leaving.append(asked.peer)
        if isinstance(message, m.CoresFixed):
            self.cores = message.each
        if isinstance(message, m.Slot):
            self._hand_over(request, message)
        elif message is None:
            request.end()
        else:
            request.send(message)

    def ask_again(self, send: Callable[[m.FromHost], None]) -> None:
        """Send the requests without an answer to another controller. `send` brings a message there."""
        self._send = send
        for number, (_, asked) in self._asked.items():
            send(m.Asks(number, asked))

    def leaving(self) -> list[str]:
        return list(self._leaving)

    def slot_holders(self) -> list[_Process]:
        """Return the live processes of this host that have got a slot."""
        return list(self._holders)

    def hold_deadlines(self, held: bool) -> None:
        """Hold the deadlines of this host's workers while `held`: they wait for the job's store."""
        self._held = held
        for segment in self._segments.values():
            segment.hold_deadlines(held)
        self._remind()

    def _remind(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None
        if self._held and not self._closed:
            for request, _ in list(self._asked.values()):
                request.note_waiting()
            self._reminder = self._loop.call_later(_REMIND_S, self._remind)

    def add(self, version: int, segment: HostSegment) -> None:
        segment.hold_deadlines(self._held)
        self._segments[version] = segment

    def segment(self, version: int) -> HostSegment | None:
        return self._segments.get(version)

    def segments(self) -> dict[int, HostSegment]:
        return dict(self._segments)

    def drop(self, version: int) -> None:
        segment = self._segments.pop(version, None)
        if segment is not None:
            segment.close()

    def forget_failed(self) -> None:
        """Forget what was kept for a process that has exited."""
        self._holders = {who: pid for who, pid in self._holders.items() if self._is_alive(pid)}
        there = {str(peer) for peer, _ in self._holders}
        # the next process of its name hasn't requested it
        self._leaving = [peer for peer in self._leaving if peer in there]
        self.stores.drop(self.is_out)

    def close(self) -> None:
        """Answer no request any more."""
        self._closed = True
        self._remind()
        for request, _ in self._asked.values():
            request.end()
        self._asked.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self.stores.drop(lambda *_: True)

    # ---- requests of workers ----

    def serve(self, request: Request, asked: m.ToJobBroker) -> None:
        """`request` gets its answer, now or later."""
        if isinstance(asked, m.SlotRequest) and self._is_taken(PeerID.parse(asked.peer), asked.incarnation, request):
            return
        if self._closed:
            request.end()
        else:
            number = next(self._numbers)
            self._asked[number] = request, asked
            if self._held:
                request.note_waiting()
            self._send(m.Asks(number, asked))

    def report(self, report: m.Report) -> None:
        """Pass a report on. It is lost while this host waits for another controller."""
        if not self._closed:
            self._send(report)

    def withdraw(self, request: Request) -> None:
        """Forget a request: its worker doesn't wait any more."""
        self.last_checkpoints.remove(request)
        for number, (each, _) in list(self._asked.items()):
            if each is request:
                del self._asked[number]
                self._send(m.HungUp(number))

    def _is_taken(self, peer: PeerID, incarnation: int, request: Request) -> bool:
        """Reject the request of a forked child: it has its parent's name and secret, but not its slot."""
        holder = self._holders.get((peer, incarnation))
        if holder is None or holder == request.pid or not self._is_alive(holder):
            return False
        own = f"process {request.pid} has no slot of its own and can't communicate; do that in process {holder}"
        request.send(m.Error(f"the slot of {peer} belongs to process {holder}; {own}"))
        return True

    def _hand_over(self, request: Request, slot: m.Slot) -> None:
        version, peer = slot.cluster.version, PeerID.parse(slot.peer)
        if self._is_taken(peer, slot.incarnation, request):  # both have asked before one of them got it
            return
        segment = self._segments.get(version)
        if segment is None:  # a newer version has been committed since, and the worker will request its slot
            request.send(m.Error(f"cluster version {version} is over"))
            return
        self._holders[peer, slot.incarnation] = request.pid
        try:
            with contextlib.suppress(KeyError):  # the controller assigned a rank that isn't here
                segment.hand_over(request, slot, slot.rank)
        except OSError as error:  # no descriptors
            request.send(m.Error(f"the shared memory of cluster version {version} can't be handed over: {error}"))

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        return (peer, incarnation) not in self._holders
