"""Pass requests of a host's workers to the controller's broker, and pass the broker's answers back.

The relay adds what only this host has: the file descriptors that belong to a slot, the ID of the process that has the
slot, and the workers' model stores. Workers connect to a socket and keep the connection. Each worker makes one request
at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Protocol, Union

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.broker_protocol import MAX_MESSAGE_BYTES, close_all
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.agent.last_checkpoints import LastCheckpoints
from ms_kungfu.launcher.agent.stores import Stores
from ms_kungfu.launcher.channel import WorkerChannel
from ms_kungfu.launcher.handshake import OF_A_WORKER
from ms_kungfu.launcher.server import Server
from ms_kungfu.launcher.state.segment import Asker
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 1024
_REMIND_S = 1.0
_Process = tuple[PeerID, int]
_Asked = Union[m.ToJobBroker, m.PutStore, m.GetStore, m.AwaitEnd]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


class Request:
    """A worker's request that hasn't been answered. `pid`: the ID of the process that sent the request."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self.pid = channel.pid
        self.answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def send(self, message: m.FromBroker, fds: Sequence[int] = ()) -> None:
        """Send the answer. The caller still owns `fds`."""
        if not self.answered.done():
            self._channel.send(message, fds)
            self.answered.set_result(True)

    def end(self) -> None:
        """End the connection without an answer."""
        if not self.answered.done():
            self.answered.set_result(False)

    def note_waiting(self) -> None:
        """Notify the worker that its request is still waiting, so that the worker restarts its time limit."""
        self._channel.remind(m.Waiting())

    def note_end(self, number: int) -> None:
        """Notify the worker that the signal `number` is about to end the job."""
        self._channel.send(m.JobEnds(number))


class HandsOver(Protocol):
    """The shared memory of one cluster version on this host (`segments.HostSegment`)."""

    def hand_over(self, asker: Asker, message: m.Slot) -> None:
        """Send `message` with the file descriptors that the rank needs to join the cluster version.

        Raises:
            KeyError: the rank isn't on this host.
        """


class Relay:
    """The workers' requests and their answers. Used only in the agent's event loop.

    `send` sends a message to the controller. `segments` maps a cluster version to this host's segment of the version.
    """

    def __init__(
        self, send: Callable[[m.FromHost], None], segments: Mapping[int, HandsOver],
        is_alive: Callable[[int], bool] = is_alive,
    ) -> None:  # fmt: skip
        self._send, self._segments = send, segments
        self._is_alive = is_alive
        self._loop = asyncio.get_running_loop()
        self.stores = Stores()
        self.last_checkpoints = LastCheckpoints(lambda: self._send(m.Checkpointed()))
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Request, m.ToJobBroker]] = {}  # requests that haven't been answered
        self.cores = 0  # the fixed number of cores per worker; 0 if no worker of this host has been notified of it
        self._leaving: list[str] = []  # workers that may leave, as a worker on this host has requested
        self._holders: dict[_Process, int] = {}
        self._held = False  # whether the deadlines of requests are suspended
        self._reminder: asyncio.TimerHandle | None = None
        self._closed = False
        self.on_placed: Callable[[str, int, int | None], None] = lambda peer, incarnation, rank: None
        """A function that is called before a worker gets a rank. `rank` is None if the worker gets `Detached`."""

    # ---- commands of the controller ----

    def answer(self, number: int, message: m.FromJobBroker | None) -> None:
        """Answer the worker's request with this number. If `message` is None, end the request without an answer."""
        request, asked = self._asked.pop(number, (None, None))
        if request is None:  # the worker has withdrawn the request
            return
        if isinstance(asked, m.LeaveRequest) and isinstance(message, m.Leaving):
            self._leaving.append(asked.peer)
        if isinstance(asked, m.SlotRequest) and isinstance(message, (m.Slot, m.Detached)):
            self.on_placed(asked.peer, asked.incarnation, message.rank if isinstance(message, m.Slot) else None)
        if isinstance(message, m.CoresFixed):
            self.cores = message.each
        if isinstance(message, m.Slot):
            self._hand_over(request, message)
        elif message is None:
            request.end()
        else:
            request.send(message)

    def ask_again(self, send: Callable[[m.FromHost], None]) -> None:
        """Send the unanswered requests to another controller, to which `send` sends messages."""
        self._send = send
        for number, (_, asked) in self._asked.items():
            send(m.Asks(number, asked))

    def leaving(self) -> list[str]:
        return list(self._leaving)

    def slot_holders(self) -> list[_Process]:
        """Return the live processes on this host that have got a slot."""
        return list(self._holders)

    def hold_deadlines(self, held: bool) -> None:
        """Suspend the deadlines of requests if `held`, because the controller waits for the store; else resume them."""
        self._held = held
        self._remind()

    def _remind(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None
        if self._held and not self._closed:
            for request, _ in list(self._asked.values()):
                request.note_waiting()
            self._reminder = self._loop.call_later(_REMIND_S, self._remind)

    def forget_failed(self) -> None:
        """Remove the entries of processes that have exited."""
        self._holders = {process: pid for process, pid in self._holders.items() if self._is_alive(pid)}
        there = {str(peer) for peer, _ in self._holders}
        # A later process with the same peer ID has no permission to leave.
        self._leaving = [peer for peer in self._leaving if peer in there]
        self.stores.drop(self.is_out)

    def close(self) -> None:
        """End all requests without an answer, and close the stores."""
        self._closed = True
        self._remind()
        for request, _ in self._asked.values():
            request.end()
        self._asked.clear()
        self.stores.drop(lambda *_: True)

    # ---- requests of workers ----

    def serve(self, request: Request, asked: m.ToJobBroker) -> None:
        """Send a worker's request to the controller. If the request can't be sent, reject or end it immediately."""
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
        """Send a worker's report to the controller. The report is lost while this host waits for another controller."""
        if not self._closed:
            self._send(report)

    def withdraw(self, request: Request) -> None:
        """Drop a request whose worker no longer waits for the answer."""
        self.last_checkpoints.remove(request)
        for number, (each, _) in list(self._asked.items()):
            if each is request:
                del self._asked[number]
                self._send(m.HungUp(number))

    def _is_taken(self, peer: PeerID, incarnation: int, request: Request) -> bool:
        """Reject the request if the slot belongs to another process. Return whether the request was rejected.

        The requesting process is then a forked child of a worker. It has its parent's peer ID and secret, but not its
        parent's slot.
        """
        holder = self._holders.get((peer, incarnation))
        if holder is None or holder == request.pid or not self._is_alive(holder):
            return False
        own = f"process {request.pid} has no slot; communicate only in process {holder}"
        request.send(m.Error(f"the slot of {peer} belongs to process {holder}; {own}"))
        return True

    def _hand_over(self, request: Request, slot: m.Slot) -> None:
        version, peer = slot.cluster.version, PeerID.parse(slot.peer)
        # Two processes may have requested the slot before one of them got the slot.
        if self._is_taken(peer, slot.incarnation, request):
            return
        segment = self._segments.get(version)
        # If this host no longer has the version, a newer version has been committed since the controller answered. The
        # worker then requests its slot in the newer version.
        if segment is None:
            request.send(m.Error(f"cluster version {version} has been superseded"))
            return
        self._holders[peer, slot.incarnation] = request.pid
        try:
            with contextlib.suppress(KeyError):  # the controller assigned a rank that isn't on this host
                segment.hand_over(request, slot)
        except OSError as error:  # no file descriptor is free
            request.send(m.Error(f"the shared memory of cluster version {version} can't be passed on: {error}"))

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        return (peer, incarnation) not in self._holders


class BrokerServer(Server[WorkerChannel]):
    """Accept workers' connections on the abstract Unix socket `address`, from construction until `end`."""

    most_proved = _MAX_CONNECTIONS
    most_unproved = 512  # more than the number of a host's workers, because all of them may connect at once
    silent_s = 1.0  # a worker authenticates within milliseconds, and a rejected worker tries again

    def __init__(self, relay: Relay, secret: bytes) -> None:
        super().__init__(secret, OF_A_WORKER)
        self._relay = relay
        self.address = f"kungfu-{secrets.token_hex(8)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind("\0" + self.address)
        listening.listen(_MAX_CONNECTIONS)
        self.listen(listening)

    def connections(self) -> int:
        """Return how many processes are connected. Each process keeps its connection until it exits."""
        return len(self._proved) - len(self._relay.last_checkpoints)

    def _open(self, connection: socket.socket) -> WorkerChannel:
        return WorkerChannel(connection)

    def _troubled(self, error: OSError) -> None:
        _log.warning('accept failed: from=workers error="%s"', error)

    async def _serve(self, channel: WorkerChannel) -> bool:
        reading: asyncio.Task[tuple[_Asked, list[int]]] | None = None
        try:
            while True:
                try:
                    asked, fds = await (reading or self._read(channel))
                except ProtocolError as error:
                    channel.send(m.Error(str(error)))
                    await channel.hear_out()
                    return False
                reading = None  # the code that answers the request closes `fds`
                request = Request(channel)
                self._answer(request, asked, fds)
                reading = self._read(channel)  # the read also detects the exit of a waiting worker
                either: set[asyncio.Future[Any]] = {request.answered, reading}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not request.answered.done():
                    self._relay.withdraw(request)
                    return False
                if not request.answered.result():
                    return False
        except ConnectionError:
            return False
        finally:
            if reading is not None:
                await _stop(reading)

    def _read(self, channel: WorkerChannel) -> asyncio.Task[tuple[_Asked, list[int]]]:
        return asyncio.ensure_future(self._next_request(channel))

    async def _next_request(self, channel: WorkerChannel) -> tuple[_Asked, list[int]]:
        """Return the next request that needs an answer. Forward reports, which need no answer."""
        while True:
            asked, fds = await channel.receive_with_fds(m.TO_BROKER, MAX_MESSAGE_BYTES)
            if not isinstance(asked, m.Report):
                return asked, fds
            close_all(fds)
            self._relay.report(asked)

    def _answer(self, request: Request, asked: _Asked, fds: list[int]) -> None:
        if isinstance(asked, (m.PutStore, m.GetStore)):
            self._relay.stores.serve(request, asked, fds, self._relay.is_out)
            return
        close_all(fds)
        if isinstance(asked, m.AwaitEnd):
            self._relay.last_checkpoints.add(request)
        else:
            self._relay.serve(request, asked)


async def _stop(reading: asyncio.Task[tuple[_Asked, list[int]]]) -> None:
    """Stop reading from a connection that has ended. No more requests on it are answered."""
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        _, fds = await reading
        close_all(fds)
