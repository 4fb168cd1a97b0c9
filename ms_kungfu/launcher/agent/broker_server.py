"""The socket for the requests of a host's workers, one at a time on each connection, which they keep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Protocol, Union

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.broker_protocol import MAX_MESSAGE_BYTES, close_all
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.agent.last_checkpoints import LastCheckpoints
from ms_kungfu.launcher.agent.stores import Stores
from ms_kungfu.launcher.channel import WorkerChannel
from ms_kungfu.launcher.handshake import OF_A_WORKER
from ms_kungfu.launcher.server import Server
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 1024
_Asked = Union[m.ToJobBroker, m.PutStore, m.GetStore, m.AwaitEnd]


class Request:
    """A worker's request that waits for its answer. `pid`: the requesting process."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self.pid = channel.pid
        self.answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def send(self, message: m.FromBroker, fds: Sequence[int] = ()) -> None:
        """Send the answer. `fds` stay the caller's."""
        if not self.answered.done():
            self._channel.send(message, fds)
            self.answered.set_result(True)

    def end(self) -> None:
        """End the connection without an answer."""
        if not self.answered.done():
            self.answered.set_result(False)

    def note_waiting(self) -> None:
        """Restart the worker's time limit."""
        self._channel.remind(m.Waiting())

    def note_end(self, number: int) -> None:
        """Notify the worker that the job is about to end by this signal."""
        self._channel.send(m.JobEnds(number))


class Serves(Protocol):
    """Answers requests (`relay`)."""

    stores: Stores
    last_checkpoints: LastCheckpoints

    def serve(self, request: Request, asked: m.ToJobBroker) -> None:
        """Answer `request`, now or later."""
        ...

    def report(self, report: m.Report) -> None:
        """Pass a worker's report on to the controller."""

    def withdraw(self, request: Request) -> None:
        """Forget a request whose worker doesn't wait for an answer any more."""
        ...

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Return whether the process has exited, or has no slot any more."""
        ...


class BrokerServer(Server[WorkerChannel]):
    """Listens on an abstract Unix socket, `address`, from construction to `end`."""

    most_proved = _MAX_CONNECTIONS
    most_unproved = 512  # more than a host's workers, all of which may connect in one moment
    silent_s = 1.0  # a worker proves itself within milliseconds; one that is rejected as unauthenticated connects again

    def __init__(self, broker: Serves, secret: bytes) -> None:
        super().__init__(secret, OF_A_WORKER)
        self._broker = broker
        self.address = f"kungfu-{secrets.token_hex(8)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind("\0" + self.address)
        listening.listen(_MAX_CONNECTIONS)
        self.listen(listening)

    def connections(self) -> int:
        """Return how many processes have connected; each keeps its connection."""
        return len(self._proved) - len(self._broker.last_checkpoints)

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
                reading = None  # `fds` are closed by whatever answers
                request = Request(channel)
                self._answer(request, asked, fds)
                reading = self._read(channel)  # also to notice the exit of a worker that waits
                either: set[asyncio.Future[Any]] = {request.answered, reading}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not request.answered.done():
                    self._broker.withdraw(request)
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
        """Return the next request. Reports, which have no answer, are passed on meanwhile."""
        while True:
            asked, fds = await channel.receive_with_fds(m.TO_BROKER, MAX_MESSAGE_BYTES)
            if not isinstance(asked, m.Report):
                return asked, fds
            close_all(fds)
            self._broker.report(asked)

    def _answer(self, request: Request, asked: _Asked, fds: list[int]) -> None:
        if isinstance(asked, (m.PutStore, m.GetStore)):
            self._broker.stores.serve(request, asked, fds, self._broker.is_out)
            return
        close_all(fds)
        if isinstance(asked, m.AwaitEnd):
            self._broker.last_checkpoints.add(request)
        else:
            self._broker.serve(request, asked)


async def _stop(reading: asyncio.Task[tuple[_Asked, list[int]]]) -> None:
    """Stop reading a connection that has ended: later requests aren't answered."""
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        _, fds = await reading
        close_all(fds)
