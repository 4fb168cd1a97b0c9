"""The broker grants each slot of a cluster version only to the worker process to which the slot belongs.

:class:`ClusterVersions`, which has no side effects, decides how to answer a request. The broker stores the requests
that wait for an answer. A worker's host relays the worker's requests to the broker (`relay`), and adds the descriptors
of the shared memory to the answers.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.leave_requests import LeaveRequests
from ms_kungfu.launcher.controller.process_facts import ProcessFacts
from ms_kungfu.launcher.controller.segments import MakeSegment, NotMadeYet, Segments, SpreadSegment
from ms_kungfu.launcher.state.prestarted import Expected
from ms_kungfu.launcher.state.segment import Asker
from ms_kungfu.launcher.state.software import JobsSoftware
from ms_kungfu.launcher.state.versions import ClusterVersions, Grant, Refuse, Request, StandbyRequest, Wait
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
# Time limit for moving all workers' threads to their cores; shorter than a worker's wait for the answer.
_FIX_CORES_S = 8.0
Answer = Union[Grant, m.Detached, m.Stay, Refuse, Wait]


async def _no_cores(each: int) -> int:
    return 0


@dataclass(eq=False)
class Broker:
    """Record which process has which slot, from construction to `close`. Use a broker only in the event loop.

    1. After each change of the state, `requests` examines each waiting request again, as soon as the event loop's
       current callback has returned.
    2. Except for `may_prepare` and `on_cores`, the broker calls its callbacks only after the event loop's current
       callback has returned, so the state is consistent by then.

    Events:
    - `on_unknown_version`: a member has requested a cluster version that the broker doesn't know yet.
    - `on_commit`: the commit of this version must be written to the snapshot before any worker is notified. When the
      commit is written, the handler calls `noted`.
    - `on_committed`: the members have committed this cluster, and adopt it after the given step.
    - `on_prepared`: the members have been notified of this version, because all of its joining workers are ready.
    - `on_ready`: a worker (peer ID and incarnation) or a standby (its number) has joined, or is ready to join.
    - `on_leave`: this member of the newest version may leave. If `on_leave` is None, no worker may leave.
    - `on_last`: this member got a SIGTERM, but must not leave.
    - `on_trouble`: the shared memory of a version can't be made, for the given reason. `prepare` tries again.
    - `on_cores`: fixes the number of cores of each worker, and returns that number, or 0 if no worker is pinned.
    - `on_expected`: the members have reported which size they expect next.

    `recovers`: whether members continue without failed members. `min_size`: how many workers must remain when a worker
    leaves. `may_prepare` returns whether the members may be notified of a version. If `may_prepare` returns False, call
    `prepare` as soon as the members may be notified. `begun`: the versions that an earlier controller had committed.
    """

    make_segment: MakeSegment
    on_unknown_version: Callable[[int], None]
    on_committed: Callable[[Cluster, int | None], None]
    on_ready: Callable[[tuple[PeerID, int] | int], None]
    on_trouble: Callable[[str], None]
    on_leave: Callable[[PeerID], None] | None
    on_last: Callable[[PeerID], None]
    on_cores: Callable[[int], Awaitable[int]] = _no_cores
    on_expected: Callable[[Expected], None] = lambda expected: None
    on_prepared: Callable[[int], None] = lambda version: None
    recovers: bool = False
    min_size: int = 1
    on_commit: Callable[[int], None] | None = None
    may_prepare: Callable[[int], bool] | None = None
    begun: ClusterVersions | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.versions = ClusterVersions() if self.begun is None else self.begun
        self._segments = Segments(self.versions, self.recovers, self.make_segment)
        self.leaves = LeaveRequests(self.versions, self.min_size, self.on_leave, self.on_last)
        self.facts = ProcessFacts(self.versions, self._segments, lambda process: process in self._holders)
        self.requests = SlotRequests(self, self.versions, self.leaves)
        self._fixing: set[asyncio.Task[None]] = set()  # tasks that fix the number of cores of each worker
        self._prepared = -1
        # the version that is about to be committed, and the step after which members adopt it
        self._noting: tuple[int, int | None] | None = None
        self._holders: set[tuple[PeerID, int]] = set()  # the processes that have been granted a slot
        self._has_granted = False  # whether any process has ever been granted a slot
        self._closed = False

    def admit(self, cluster: Cluster) -> None:
        """Add a version. Members are notified of it, and may commit it, when its joining workers are ready."""
        self.versions.admit(cluster)
        self.leaves.follow(cluster)
        self._segments.drop_unknown()
        self._prepare()
        self.requests.look_soon()

    def prepare(self) -> None:
        """Try again to make the shared memory of the next version, and to notify the members of it."""
        self._prepare()
        self.requests.look_soon()

    def refuse(self, version: int, reason: str) -> None:
        """Reject a version that this job can't run. Members that request it get `reason` at once and don't wait."""
        self.versions.refused[version] = reason
        self.requests.look_soon()

    def commit_version(self, version: int) -> None:
        """Commit the first version.

        If the version's shared memory isn't made yet, raise `NotMadeYet`. If it can't be made, raise the error of the
        runtime or the kernel. In both cases, commit nothing.
        """
        self._segments.of(self.versions.clusters[version])
        self.versions.commit_version(version)
        self._after_commit()

    def snapshot(self, committing: int | None = None, lost: str | None = None) -> ClusterVersions:
        """Return the state that the next controller needs.

        The state is described as if version `committing` were committed already, and as if host `lost` were removed.
        """
        versions = copy.deepcopy(self.versions)
        if committing is not None and versions.committed != committing and committing in versions.clusters:
            versions.commit_version(committing)
        if lost is not None:
            versions.lose_host(lost)
        return versions

    def noted(self) -> bool:
        """Commit the version for which `on_commit` was called, now that the snapshot contains it.

        Return False if a failure has made the commit impossible. Then no worker has been notified, and the caller must
        call `not_noted`.
        """
        assert self._noting is not None
        version, step = self._noting
        if not self.versions.may_be_committed(version):
            return False
        self._noting = None
        self.versions.commit_version(version)
        self._after_members_choice(step)
        return True

    def not_noted(self) -> None:
        """Record that the snapshot no longer contains the commit for which `on_commit` was called."""
        self._noting = None
        self.versions.stop_committing()
        self._segments.drop_unknown()
        self.requests.look_soon()

    def resume(
        self,
        segments: Mapping[int, SpreadSegment],
        losses: Mapping[int, Sequence[m.Loss]],
        slot_holders: Iterable[tuple[PeerID, int]],
        joining: Mapping[PeerID, int],
        desired: Cluster | None,
    ) -> None:
        """Continue the job of an earlier controller with the state that the hosts report.

        `segments`: the shared memory of each known version. `losses`: for each version, the failures of which at least
        one host was notified, in the order of the notifications. `resume` notifies every host of these failures.
        `slot_holders`: the processes that have slots. `joining`: the live joining workers and their incarnations.
        `desired`: the desired cluster, if it is newer than the committed one.
        """
        self._holders.update(slot_holders)
        self._has_granted = True  # assume that the earlier controller has granted a slot
        versions = self.versions
        self._segments.resume(segments, losses)
        versions.joining = dict(joining)
        if desired is not None:
            versions.admit(desired)
        current = versions.current
        assert current is not None
        # Segments that are made later must contain the failures, too.
        for rank, reason, recover, reaped in losses[current.version]:
            peer = current.workers[rank]
            self._segments.mark_lost(peer, versions.meant_by(peer, current.version), reason, recover, reaped)

    def exclude_everybody(self) -> None:
        """Exclude all members, because all have finished. From now on, no worker can join, and none has to leave."""
        self.versions.exclude_everybody()
        self.leaves.leaving.clear()
        self.requests.look_soon()

    def has_granted(self) -> bool:
        """Return whether any process has ever been granted its slot."""
        return self._has_granted

    def is_ready(self, peer: PeerID, incarnation: int) -> bool:
        """Return whether a worker waits for its slot in its first version, or has been granted that slot."""
        process = (peer, incarnation)
        return process in self.versions.ready or process in self._holders

    def mark_lost(
        self, peer: PeerID, reason: str, incarnation: int, recover: bool = False, reaped: bool = True
    ) -> None:
        """Record that a process has exited. Notify the members of all present and later versions that contain it.

        If `recover` is set, the members continue without the process. The process must have been reaped (`reaped`), or
        SIGKILL must have had no effect on it. No rank reads what the process publishes afterwards, and the process
        can't come back.
        """
        self.versions.record_end(peer, incarnation)
        self.leaves.told_to_end.discard(peer)
        self._segments.mark_lost(peer, incarnation, reason, recover, reaped)
        self._prepare()  # perhaps the next version was waiting only for this process
        self.requests.look_soon()

    def lose_host(self, host: str, processes: Collection[tuple[PeerID, int]], reason: str) -> None:
        """Record the loss of a host.

        The members of each version are notified of the failure of the host's `processes` before they are notified of
        the loss of the host.
        """
        self.versions.lose_host(host)
        for peer, incarnation in processes:
            self.versions.record_end(peer, incarnation)
            self.leaves.told_to_end.discard(peer)
        for peer, incarnation in processes:
            self._segments.mark_lost(peer, incarnation, reason, recover=True, reaped=True)
        self._segments.lose_host(host)
        self._prepare()
        self.requests.look_soon()

    def mark_reaped(self, peer: PeerID, incarnation: int) -> None:
        """Record that a process that was marked lost has now exited, so its port is free."""
        self._segments.mark_reaped(peer, incarnation)

    def end(self) -> None:
        """From now on, let no worker leave, and assign no slot to a standby, because the job is about to end."""
        self.leaves.job_ends = True

    def close(self) -> None:
        """Close the segments. After that, the broker answers no request."""
        self._closed = True
        self.requests.close()
        for task in self._fixing:
            task.cancel()
        self._segments.close()

    # ---- requests ----

    def serve(self, asker: Asker, asked: m.ToJobBroker) -> None:
        """Answer the request `asked` from `asker`, now or later."""
        _SERVED[type(asked)](self, asker, asked)

    def _let_leave(self, asker: Asker, asked: m.LeaveRequest) -> None:
        peer = PeerID.parse(asked.peer)
        objection = self.leaves.objection(peer, asked.terminated)
        granted = m.Leaving() if peer in self.leaves.leaving else m.Stay()
        asker.send(m.Error(objection) if objection else granted)

    def _fix_cores(self, asker: Asker, asked: m.FixCores) -> None:
        async def fix() -> None:
            try:
                asker.send(m.CoresFixed(await within(_FIX_CORES_S, self.on_cores(asked.each))))
            except asyncio.TimeoutError:
                asker.send(m.Error(f"the launcher hasn't moved the workers to their cores within {_FIX_CORES_S:g} s"))

        task = asyncio.ensure_future(fix())
        self._fixing.add(task)
        task.add_done_callback(self._fixing.discard)

    def _note_expected(self, asker: Asker, asked: m.Expect) -> None:
        self._loop.call_soon(self.on_expected, Expected(asked.version, asked.joining, asked.size))
        asker.send(m.Noted())

    def answer_of(self, request: Request) -> Answer:
        """Return the answer to a request for a slot. The call may commit the version that the request names."""
        before = self.versions.committed
        answer = self._decide(request)
        if self.versions.committed != before:
            self._after_members_choice(request.step)
        return answer

    def _decide(self, request: Request) -> Answer:
        desired = self.versions.would_commit(request)
        if desired is not None:
            try:
                self._segments.of(desired)
            except NotMadeYet:
                return Wait()
            except Exception as error:
                # Reject this version permanently, so that all members get the same answer.
                self.refuse(desired.version, _unmakeable(desired, error))
        if self.on_commit is not None:
            if self._noting is not None and request.member_of is not None:
                return Wait()
            if self.versions.would_commit(request) is not None:
                assert desired is not None
                self._noting = (desired.version, request.step)
                self.versions.committing = desired.version
                self._loop.call_soon(self.on_commit, desired.version)
                return Wait()
        return self.versions.answer(request)

    def grant(self, asker: Asker, request: Request, grant: Grant) -> None:
        self._holders.add((request.peer, request.incarnation))
        self._has_granted = True
        # The worker's host adds the descriptors to this answer.
        asker.send(m.Slot(m.ClusterPart.of(grant.cluster), grant.rank, str(request.peer), request.incarnation))

    # ---- versions ----

    def _prepare(self) -> None:
        """If the workers of the next version are ready, notify the current members that they may adopt that version.

        Workers that haven't moved from the previous version to the committed one yet aren't notified. Such workers have
        agreed on the committed version, and don't check for further changes before adopting it.
        """
        version, committed = self.versions.preparable(), self.versions.committed
        if self._closed or version is None or committed is None or version <= max(committed, self._prepared):
            return
        if self.may_prepare is not None and not self.may_prepare(version):
            return
        try:
            self._segments.of(self.versions.clusters[version])
        except NotMadeYet:
            return
        except Exception as error:  # any error of the runtime or the kernel
            # Don't notify members of a version that they can't adopt.
            self._loop.call_soon(self.on_trouble, _unmakeable(self.versions.clusters[version], error))
            return
        self._prepared = version
        self._segments.open[committed].announce(version)
        self._loop.call_soon(self.on_prepared, version)

    def _after_members_choice(self, step: int | None) -> None:
        committed = self.versions.current
        assert committed is not None
        self._after_commit()
        self._loop.call_soon(self.on_committed, committed, step)

    def _after_commit(self) -> None:
        self._segments.drop_unknown()
        self._segments.drop_unlisted_losses()
        self._holders = {process for process in self._holders if not self.versions.is_out(*process)}
        current = self.versions.current
        self.leaves.told_to_end &= set() if current is None else set(current.workers)
        # A version that was prepared before this commit must be prepared again. One of its peer IDs may belong to a
        # member that this commit has excluded, and from now on that peer ID means a different process.
        self._prepared = -1
        self._prepare()  # this notifies the members through the segment of the newly committed version
        self.requests.look_soon()


_SERVED: dict[type, Callable[[Broker, Asker, Any], None]] = {
    m.SlotRequest: lambda broker, asker, asked: broker.requests.add(asker, asked),
    m.StandbyRequest: lambda broker, asker, asked: broker.requests.add(asker, asked),
    m.LeaveRequest: Broker._let_leave,
    m.FixCores: Broker._fix_cores,
    m.Expect: Broker._note_expected,
    m.ProgramEnded: lambda broker, asker, asked: broker.facts.note_program_end(asker, asked),
}


def _unmakeable(cluster: Cluster, error: Exception) -> str:
    size = counted(cluster.size, "worker")
    return f"the shared memory of cluster version {cluster.version} ({size}) can't be made: {error}"


@dataclass(eq=False)
class _Waiting:
    asker: Asker
    asked: Request | StandbyRequest
    # the unknown version for which this request has called `on_unknown_version`
    unknown: int | None = None


class SlotRequests:
    """The requests that wait for an answer from the broker. Call the methods only in the broker's event loop.

    `leaves` records whether the job is ending, and which peers were evicted.
    """

    def __init__(self, broker: Broker, versions: ClusterVersions, leaves: LeaveRequests) -> None:
        self._broker, self._versions, self._leaves = broker, versions, leaves
        self._loop = asyncio.get_running_loop()
        self._software = JobsSoftware()
        self._waiting: list[_Waiting] = []
        self._will_look = False
        self._closed = False
        self.ready_standbys: set[int] = set()
        self._identities: dict[int, tuple[PeerID, int]] = {}  # the peer and incarnation of each standby that has a slot

    def add(self, asker: Asker, asked: m.SlotRequest | m.StandbyRequest) -> None:
        """Add a request.

        The worker's host has already checked that the requesting process isn't a child of the process that has the
        slot.
        """
        request = _request_from(asked)
        if isinstance(request, StandbyRequest) or request.member_of is None:
            asking = f"standby {request.number}" if isinstance(request, StandbyRequest) else f"worker {request.peer}"
            objection = self._software.objection_to(asking, asked.software)
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
        """Forget a request if its worker no longer waits for an answer."""
        for waiting in self._waiting:
            if waiting.asker is asker:
                self._remove(waiting)
                return

    def close(self) -> None:
        """Stop answering requests."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.asker.end()

    def assign(self, standby: int, peer: PeerID, incarnation: int) -> None:
        """Assign the slot of `peer` to the standby."""
        self._identities[standby] = (peer, incarnation)
        self.look_soon()

    def look_soon(self) -> None:
        """Examine each waiting request after a change, as soon as the event loop's current callback has returned."""
        if not self._will_look:
            self._will_look = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._will_look = False
        for waiting in list(self._waiting):
            if waiting in self._waiting:
                try:
                    self._look_at(waiting)
                except Exception as error:  # this worker gets no answer, but the job continues
                    _log.error("internal error: a worker isn't answered: %r", error, exc_info=error)
                    self.withdraw(waiting.asker)
                    waiting.asker.end()

    def _look_at(self, waiting: _Waiting) -> None:
        """Answer a request if it can be answered now."""
        asked = waiting.asked
        request = self._identified(asked)
        answer = Wait() if request is None else self._broker.answer_of(request)
        if isinstance(answer, Wait):
            self._note_unknown(waiting, answer.unknown)
            self._note_ready(asked, request)
            return
        self._remove(waiting)
        if isinstance(answer, Grant):
            assert request is not None
            self._loop.call_soon(self._broker.on_ready, (request.peer, request.incarnation))
            self._broker.grant(waiting.asker, request, answer)
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
            self._loop.call_soon(self._broker.on_unknown_version, version)

    def _note_ready(self, asked: Request | StandbyRequest, request: Request | None) -> None:
        """Record that a process waits for a slot in its first version."""
        if request is None and isinstance(asked, StandbyRequest):
            if asked.number not in self.ready_standbys:
                self.ready_standbys.add(asked.number)
                self._loop.call_soon(self._broker.on_ready, asked.number)
        elif request is not None and request.member_of is None:
            process = (request.peer, request.incarnation)
            if process not in self._versions.ready:
                self._versions.ready.add(process)
                self._broker.prepare()
                ready = asked.number if isinstance(asked, StandbyRequest) else process
                self._loop.call_soon(self._broker.on_ready, ready)

    def _remove(self, waiting: _Waiting) -> None:
        """Forget a request. Its process is no longer ready to join."""
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
