"""Accept connections for the launcher's servers, and limit how many connections are served.

1. The cost of an unauthenticated client is bounded. The client must prove within `HANDSHAKE_S` that it knows the job's
   secret, and can send only small messages until then. At most `most_unproved` unauthenticated connections are served.
   If another client connects, the server ends the oldest of these connections. A client whose connection is ended gets
   no answer, and can connect again.

2. If the process lacks descriptors or memory, a listener pauses briefly. In the meantime, clients wait in the
   listener's backlog.

3. An exception ends only the connection in which it occurs. Otherwise, the event loop's exception handler would end the
   job.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from typing import Any, Callable, Generic, TypeVar, Union

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._processes import connection_limit
from ms_kungfu.launcher.channel import LocalChannel, Stream
from ms_kungfu.launcher.handshake import Roles, challenge
from ms_kungfu.launcher.within import within

C = TypeVar("C", bound=Union[Stream, LocalChannel])
_log = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
_RETRY_S = 0.2


class Listener:
    """Call `accepted` in the event loop with each connection and its source address, from construction to `close`.

    The Listener owns the listening socket `listening`. `troubled` is called if no connection can be accepted.
    """

    def __init__(
        self,
        listening: socket.socket,
        accepted: Callable[[socket.socket, Any], None],
        troubled: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self._socket, self._accepted, self._troubled = listening, accepted, troubled
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self.resume()

    def rest(self) -> None:
        """Stop accepting connections until `resume` is called. In the meantime, clients wait in the backlog."""
        self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self.rest()
            self._socket.close()

    def _accept(self) -> None:
        try:
            connection, source = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._troubled(error)
            self.rest()
            self._loop.call_later(_RETRY_S, self.resume)
            return
        self._accepted(connection, source)


class Server(Generic[C]):
    """Authenticate connections, and serve the authenticated ones. Call all methods in the event loop."""

    most_unproved = 128
    most_proved = math.inf
    silent_s = HANDSHAKE_S  # if there are too many connections, end those that aren't authenticated after this time

    def __init__(self, secret: bytes, roles: Roles) -> None:
        self._secret, self._roles = secret, roles
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._unproved: dict[asyncio.Task[None], tuple[Stream, float]] = {}  # oldest first, each with its start time
        self._proved: set[asyncio.Task[None]] = set()
        self._troubles: set[str] = set()  # the errors that have been logged
        # If the process can open only a few descriptors, clients must not use all of them.
        self.most_unproved = connection_limit(self.most_unproved)

    # ---- methods that each kind of server defines ----

    def _open(self, connection: socket.socket) -> C:
        """Return a channel for a new connection. If this raises an exception, the caller closes the connection."""
        raise NotImplementedError

    async def _serve(self, channel: C) -> bool:
        """Serve an authenticated connection. Return whether another owner has taken the connection over."""
        raise NotImplementedError

    def _rejected(self, source: str, error: Exception) -> None:
        """Record that a connection was rejected, because it wasn't authenticated."""

    def _ended(self, source: str, error: Exception) -> None:
        """Record that an authenticated connection has ended because of a network, protocol or time-out error."""

    def _troubled(self, error: OSError) -> None:
        """Record that no connection can be accepted for now. This is called once for each reason."""

    # ---- methods common to all servers ----

    def listen(self, listening: socket.socket) -> None:
        self._listener = Listener(listening, self._on_accepted, self._on_trouble)

    def end(self) -> None:
        """End all connections, but don't wait until they have ended."""
        if self._listener is not None:
            self._listener.close()
        for task in (*self._unproved, *self._proved):
            task.cancel()

    async def close(self) -> None:
        """End all connections, and wait until they have ended."""
        self.end()
        await asyncio.gather(*self._unproved, *self._proved, return_exceptions=True)

    def serve_within(self, channel: C, source: str) -> None:
        """Serve a connection that needs no authentication."""
        task = asyncio.ensure_future(self._serve_proved(channel, source))
        self._proved.add(task)
        task.add_done_callback(self._forget)

    def _on_trouble(self, error: OSError) -> None:
        if str(error) not in self._troubles:
            self._troubles.add(str(error))
            self._troubled(error)
        self._make_room()

    def _on_accepted(self, connection: socket.socket, source: Any) -> None:
        if len(self._unproved) >= self.most_unproved:
            self._make_room()
        name = str(source[0]) if source else "this host"
        try:
            if len(self._proved) >= self.most_proved:
                raise ProtocolError(f"there are already {len(self._proved)} connections")
            channel = self._open(connection)
        except Exception as error:  # the connection has already ended, or memory is short
            connection.close()
            self._reject(name, error)
            return
        task = asyncio.ensure_future(self._meet(channel, name))
        self._unproved[task] = channel, self._loop.time()  # type: ignore[assignment]
        task.add_done_callback(self._forget)

    def _make_room(self) -> None:
        """End the oldest unauthenticated connection, and all connections that took too long to authenticate."""
        now = self._loop.time()
        for place, (task, (channel, since)) in enumerate(list(self._unproved.items())):
            if place == 0 or now - since > self.silent_s:
                del self._unproved[task]
                self._proved.add(task)  # `_forget` removes the task when the connection has ended
                channel.end()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproved.pop(task, None)
        self._proved.discard(task)

    def _reject(self, source: str, error: Exception) -> None:
        if not isinstance(error, (OSError, ProtocolError, asyncio.TimeoutError)):
            _log.error(
                'internal error: where=connection from=%s error="%r". The launcher closes the connection',
                source, error, exc_info=error,
            )  # fmt: skip
        self._rejected(source, error)

    async def _meet(self, channel: C, source: str) -> None:
        """Authenticate and serve a connection.

        If an exception occurs before the client has proved that it knows the secret, log it as a rejection. A later
        exception ends the connection and everything that `_serve` has begun.
        """
        assert isinstance(channel, Stream)
        task = asyncio.current_task()
        assert task is not None
        has_proved = False
        try:
            await within(HANDSHAKE_S, challenge(channel, self._secret, self._roles, lambda: self._note_proved(task)))
            has_proved = True
        except Exception as error:
            self._reject(source, error)
            await channel.hear_out()
            return
        finally:
            if not has_proved:
                channel.close()
        await self._serve_proved(channel, source)

    def _note_proved(self, task: asyncio.Task[None]) -> None:
        self._unproved.pop(task, None)
        self._proved.add(task)

    async def _serve_proved(self, channel: C, source: str) -> None:
        given_away = False
        try:
            given_away = await self._serve(channel)
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            self._ended(source, error)
        except Exception as error:
            _log.error(
                'internal error: where=connection from=%s error="%r". The launcher closes the connection',
                source, error, exc_info=error,
            )  # fmt: skip
        finally:
            if not given_away:
                channel.close()
