"""What a host's workers ask: it is asked of the head's broker, and answered by it.

What only this host has is added here: the descriptors that belong to a place, whose place it is, and model stores.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from typing import Callable

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.agent.plain_segment import HostSegment
from ms_kungfu.launcher.agent.stores import Stores
from ms_kungfu.launcher.state.segment import Asker
from ms_kungfu.launcher.wire import messages as m

_LOOK_S = 1.0  # whether who asks has given up
_ANSWER_TIMEOUT_S = 10.0
_Process = tuple[PeerID, int]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


class Relay:
    """Thread-safe. `send` brings a message to the head. Owns the host's segments."""

    def __init__(
        self,
        send: Callable[[m.FromHost], None],
        condition: Callable[[], threading.Condition] = threading.Condition,
        is_alive: Callable[[int], bool] = is_alive,
    ) -> None:
        self._send = send
        self._is_alive = is_alive
        self.stores = Stores()
        self._numbers = itertools.count(1)
        self._changed = condition()
        # Guarded by _changed:
        self._segments: dict[int, HostSegment] = {}
        self._answers: dict[int, m.FromHeadsBroker | None] = {}
        self._asked: dict[int, m.ToHeadsBroker] = {}
        self.cores = 0  # how many each worker has, where one of this host has heard that it is fixed
        self._leaving: list[str] = []  # who was granted to leave because a worker of this host had asked for it
        self._holders: dict[_Process, int] = {}
        self._held = False  # the workers' deadlines
        self._closed = False

    # ---- what the head tells ----

    def answer(self, number: int, message: m.FromHeadsBroker | None) -> None:
        """To a request. None: there is no answer."""
        with self._changed:
            if number in self._asked:
                self._answers[number] = message
                self._changed.notify_all()

    def ask_again(self, send: Callable[[m.FromHost], None]) -> None:
        """Another head has the job: what has no answer yet is asked of it. `send` brings a message there."""
        with self._changed:
            self._send = send
            for number, message in self._asked.items():
                if number not in self._answers:
                    send(m.Asks(number, message))

    def leaving(self) -> list[str]:
        with self._changed:
            return list(self._leaving)

    def placed(self) -> list[_Process]:
        """Those of this host that have got a place, and live."""
        with self._changed:
            return list(self._holders)

    def hold_deadlines(self, held: bool) -> None:
        """While it is `held` no deadline of this host's workers runs: what they wait for waits for the job's store."""
        with self._changed:
            self._held = held
            for segment in self._segments.values():
                segment.hold_deadlines(held)
            self._changed.notify_all()

    def add(self, version: int, segment: HostSegment) -> None:
        with self._changed:
            segment.hold_deadlines(self._held)
            self._segments[version] = segment

    def segment(self, version: int) -> HostSegment | None:
        with self._changed:
            return self._segments.get(version)

    def segments(self) -> dict[int, HostSegment]:
        with self._changed:
            return dict(self._segments)

    def drop(self, version: int) -> None:
        with self._changed:
            segment = self._segments.pop(version, None)
            if segment is not None:
                segment.close()

    def forget_the_dead(self) -> None:
        """A process has ended: what was kept for it goes."""
        with self._changed:
            self._holders = {who: pid for who, pid in self._holders.items() if self._is_alive(pid)}
            holders = set(self._holders)
            there = {str(peer) for peer, _ in holders}
            self._leaving = [peer for peer in self._leaving if peer in there]  # the next of its name hasn't asked
            self._changed.notify_all()  # what the dead have asked is taken back
        self.stores.drop(lambda peer, incarnation: (peer, incarnation) not in holders)

    def close(self) -> None:
        """Whoever waits for an answer gets none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
        self.stores.drop(lambda *_: True)

    # ---- for a worker, in a thread of its connection's ----

    def serve(self, connection: Asker, request: m.ToHeadsBroker, pid: int) -> bool:
        connection.extend(_ANSWER_TIMEOUT_S)
        refusal = self._refusal_of(request, pid) if isinstance(request, m.PlaceRequest) else ""
        answer = m.Error(refusal) if refusal else self._ask(connection, request)
        if answer is None:
            return False
        connection.extend(_ANSWER_TIMEOUT_S)
        if isinstance(answer, m.Place):
            self._hand_over(connection, answer, pid)
        else:
            connection.send(answer)
        return True

    def _refusal_of(self, request: m.PlaceRequest, pid: int) -> str:
        """A forked child has its parent's name and secret, but not its place."""
        peer = PeerID.parse(request.peer)
        with self._changed:
            holder = self._holders.get((peer, request.incarnation))
        if holder is None or holder == pid or not self._is_alive(holder):
            return ""
        return f"the place of {peer} belongs to process {holder}; process {pid} has no place of its own"

    def _ask(self, connection: Asker, message: m.ToHeadsBroker) -> m.FromHeadsBroker | None:
        with self._changed:
            number = next(self._numbers)
            self._asked[number] = message
            self._send(m.Asks(number, message))
        try:
            while True:
                with self._changed:
                    # Woken by every answer; now and then to see whether the worker has given up.
                    if not self._closed and number not in self._answers:
                        self._changed.wait(_LOOK_S)
                    if number in self._answers:
                        answer = self._answers[number]
                        if isinstance(message, m.LeaveRequest) and isinstance(answer, m.Leaving):
                            self._leaving.append(message.peer)
                        if isinstance(answer, m.CoresFixed):
                            self.cores = answer.each
                        return answer
                    if self._closed:
                        return None
                    held = self._held
                if connection.is_closed() or (held and not _hears_to_wait(connection)):
                    self._send(m.HungUp(number))
                    return None
        finally:
            with self._changed:
                self._asked.pop(number, None)
                self._answers.pop(number, None)

    def _hand_over(self, connection: Asker, place: m.Place, pid: int) -> None:
        version = place.cluster.version
        with self._changed:  # the segment must not be closed meanwhile
            segment = self._segments.get(version)
            if segment is None:  # a newer one has been chosen since, of which it will ask for its place
                connection.send(m.Error(f"cluster version {version} is over"))
                return
            self._holders[PeerID.parse(place.peer), place.incarnation] = pid
            with contextlib.suppress(KeyError):  # the head gave a rank that isn't here
                segment.hand_over(connection, place, place.rank)

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        with self._changed:
            return (peer, incarnation) not in self._holders


def _hears_to_wait(connection: Asker) -> bool:
    """Has the worker's limit count from now. Whether the worker is there."""
    try:
        connection.extend(_ANSWER_TIMEOUT_S)
        connection.send(m.Waiting())
    except OSError:
        return False
    return True
