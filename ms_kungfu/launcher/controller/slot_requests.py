"""The workers' requests for a slot that wait for their answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Callable, Protocol, Union

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.controller.leave_requests import LeaveRequests
from ms_kungfu.launcher.state.segment import Asker
from ms_kungfu.launcher.state.software import JobsSoftware
from ms_kungfu.launcher.state.versions import ClusterVersions, Grant, Refuse, Request, StandbyRequest, Wait
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
Answer = Union[Grant, m.Detached, m.Stay, Refuse, Wait]


class Slots(Protocol):
    """What the broker does for requests."""

    @property
    def on_unknown_version(self) -> Callable[[int], None]: ...
    @property
    def on_ready(self) -> Callable[[tuple[PeerID, int] | int], None]: ...

    def answer_of(self, request: Request) -> Answer:
        """Return the answer now."""
        ...

    def grant(self, asker: Asker, request: Request, grant: Grant) -> None: ...

    def prepare(self) -> None:
        """Try to prepare versions: a joining worker is ready."""


@dataclass(eq=False)
class _Waiting:
    asker: Asker
    asked: Request | StandbyRequest
    unknown: int | None = None  # the version that it requests, once that has been looked for


class SlotRequests:
    """The broker's waiting requests, in its event loop.

    `leaves` knows whether the job ends, and which peers were evicted.
    """

    def __init__(self, slots: Slots, versions: ClusterVersions, leaves: LeaveRequests) -> None:
        self._slots, self._versions, self._leaves = slots, versions, leaves
        self._loop = asyncio.get_running_loop()
        self._software = JobsSoftware()
        self._waiting: list[_Waiting] = []
        self._will_look = False
        self._closed = False
        self.ready_standbys: set[int] = set()
        self._identities: dict[int, tuple[PeerID, int]] = {}  # of standbys that have a slot

    def add(self, asker: Asker, asked: m.SlotRequest | m.StandbyRequest) -> None:
        """Add a request. The worker's host has made sure that the process is no child of the one that has the slot."""
        request = _request_from(asked)
        if isinstance(request, StandbyRequest) or request.member_of is None:
            who = f"standby {request.number}" if isinstance(request, StandbyRequest) else f"worker {request.peer}"
            objection = self._software.objection_to(who, asked.software)
            if objection:
                asker.send(m.Error(objection))
                return
        if self._closed:
            asker.end()
            return
        waiting = _Waiting(asker, request)
        self._waiting.append(waiting)
        self._look_at(waiting)

    def withdraw(self, asker: Asker) -> None:
        """Forget a request whose worker doesn't wait for an answer any more."""
        for waiting in self._waiting:
            if waiting.asker is asker:
                self._remove(waiting)
                return

    def close(self) -> None:
        """Answer no request any more."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.asker.end()

    def assign(self, standby: int, peer: PeerID, incarnation: int) -> None:
        """Make the standby this peer from now on."""
        self._identities[standby] = (peer, incarnation)
        self.look_soon()

    def look_soon(self) -> None:
        """Examine each request after a change, once the present callback is over."""
        if not self._will_look:
            self._will_look = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._will_look = False
        for waiting in list(self._waiting):
            if waiting in self._waiting:
                try:
                    self._look_at(waiting)
                except Exception as error:  # this worker gets no answer; the job goes on
                    _log.error("internal error: a worker isn't answered: %r", error, exc_info=error)
                    self.withdraw(waiting.asker)
                    waiting.asker.end()

    def _look_at(self, waiting: _Waiting) -> None:
        """Answer a request if there is an answer now."""
        asked = waiting.asked
        request = self._identified(asked)
        answer = Wait() if request is None else self._slots.answer_of(request)
        if isinstance(answer, Wait):
            self._note_unknown(waiting, answer.unknown)
            self._note_ready(asked, request)
            return
        self._remove(waiting)
        if isinstance(answer, Grant):
            assert request is not None
            self._loop.call_soon(self._slots.on_ready, (request.peer, request.incarnation))
            self._slots.grant(waiting.asker, request, answer)
        elif isinstance(answer, m.Detached):
            waiting.asker.send(m.Detached(isinstance(asked, Request) and asked.peer in self._leaves.evicted))
        elif isinstance(answer, Refuse):
            waiting.asker.send(m.Error(answer.reason))
        else:
            waiting.asker.send(answer)

    def _identified(self, asked: Request | StandbyRequest) -> Request | None:
        if isinstance(asked, Request):
            return asked
        identity = self._identities.get(asked.number)
        return None if identity is None or self._leaves.job_ends else Request(*identity, member_of=None, version=None)

    def _note_unknown(self, waiting: _Waiting, version: int | None) -> None:
        if version is not None and version != waiting.unknown:
            waiting.unknown = version
            self._loop.call_soon(self._slots.on_unknown_version, version)

    def _note_ready(self, asked: Request | StandbyRequest, request: Request | None) -> None:
        """Note that a process waits for its first version."""
        if request is None and isinstance(asked, StandbyRequest):
            if asked.number not in self.ready_standbys:
                self.ready_standbys.add(asked.number)
                self._loop.call_soon(self._slots.on_ready, asked.number)
        elif request is not None and request.member_of is None:
            process = (request.peer, request.incarnation)
            if process not in self._versions.ready:
                self._versions.ready.add(process)
                self._slots.prepare()
                ready = asked.number if isinstance(asked, StandbyRequest) else process
                self._loop.call_soon(self._slots.on_ready, ready)

    def _remove(self, waiting: _Waiting) -> None:
        """Forget a request; its process isn't ready any more."""
        self._waiting.remove(waiting)
        asked = waiting.asked
        if isinstance(asked, StandbyRequest):
            self.ready_standbys.discard(asked.number)
            process = self._identities.get(asked.number)
        else:
            process = (asked.peer, asked.incarnation)
        if process is not None:
            self._versions.ready.discard(process)


def _request_from(asked: m.SlotRequest | m.StandbyRequest) -> Request | StandbyRequest:
    if isinstance(asked, m.StandbyRequest):
        return StandbyRequest(asked.number)
    return Request(PeerID.parse(asked.peer), asked.incarnation, asked.member_of, asked.version, asked.step)
