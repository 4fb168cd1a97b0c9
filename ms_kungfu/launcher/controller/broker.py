"""The broker grants each worker its place in the cluster version that it belongs to, and nobody else.

What a request is answered is decided by :class:`ClusterVersions`, which is pure; the broker adds the waiting. Requests
come by way of the worker's host (`relay`), which adds the shared memory.
"""

from __future__ import annotations

import concurrent.futures
import copy
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.segments import Segments
from ms_kungfu.launcher.state.ahead import Expected
from ms_kungfu.launcher.state.policy import would_be_left
from ms_kungfu.launcher.state.segment import Asker, MakeSegment, NotMadeYet, Progress, Segment
from ms_kungfu.launcher.state.software import JobsSoftware
from ms_kungfu.launcher.state.stuck import stuck_among
from ms_kungfu.launcher.state.versions import ClusterVersions, Grant, Refuse, Request, StandbyRequest, Wait
from ms_kungfu.launcher.wire import messages as m

_ANSWER_TIMEOUT_S = 10.0


@dataclass(eq=False)
class Broker:
    """Which process has which place, from construction to `close`. Every method is thread-safe.

    `on_unknown_version` is called when a member asks for a version that has not been admitted, `on_chosen` when a
    version has become the chosen one by a member's request, `on_ready` when a newcomer (peer ID and incarnation) or a
    standby (its number) is ready to join; all from the broker's threads, without its lock. `on_leave` is told who of
    the newest version has been granted to leave it, None where nobody may; `on_trouble` why the shared memory of a
    version can't be made: `announce` tries it again; `on_announced` which version the members are told of, as all that
    is new in it is ready. These three may be called with the lock held, and must not come back here. `on_cores` fixes
    how many cores each worker of the host has and returns that number, 0 where nobody is pinned; it may raise
    concurrent.futures.TimeoutError. `on_expected` is told whom the members expect next. `recovers`:
    members go on without those who die. Fewer than `min_size` members are never left by a leave. `on_choice`, where
    the choice of a version has to be written before anybody hears of it: called with the lock held, it must not come
    back here; `noted` has the answer. `may_announce`, likewise: whether the members may hear of a version; where they
    may later, `announce` is called then. `begun`: what a head before this one had chosen.
    """

    make_segment: MakeSegment
    on_unknown_version: Callable[[int], None]
    on_chosen: Callable[[Cluster, int | None], None]
    on_ready: Callable[[tuple[PeerID, int] | int], None]
    on_trouble: Callable[[str], None]
    on_leave: Callable[[PeerID], None] | None
    on_cores: Callable[[int], int] = lambda each: 0
    on_expected: Callable[[Expected], None] = lambda expected: None
    on_announced: Callable[[int], None] = lambda version: None
    recovers: bool = False
    min_size: int = 1
    on_choice: Callable[[int], None] | None = None
    may_announce: Callable[[int], bool] | None = None
    begun: ClusterVersions | None = None
    condition: Callable[[], threading.Condition] = threading.Condition

    def __post_init__(self) -> None:
        self._changed = self.condition()
        # Guarded by _changed:
        self._versions = ClusterVersions() if self.begun is None else self.begun
        self._segments = Segments(self._versions, self.recovers, self.make_segment)
        self._software = JobsSoftware()
        self._announced = -1
        self._noting: tuple[int, int | None] | None = None  # a version that is to be chosen, and after which step
        self._leaving: set[PeerID] = set()  # those of the newest version that may leave it, and haven't yet
        self._evicted: set[PeerID] = set()  # left out of the newest cluster by name
        self._told_to_end: set[PeerID] = set()  # members that may leave because they got a SIGTERM
        self._holders: set[tuple[PeerID, int]] = set()  # the processes that have got a place
        self._has_placed = False  # some process, ever
        self._counting: set[tuple[PeerID, int]] = set()  # processes of which a heartbeat has been seen
        self._ready_standbys: set[int] = set()
        self._identities: dict[int, tuple[PeerID, int]] = {}  # of standbys that are needed
        self._ending = False
        self._closed = False

    def admit(self, cluster: Cluster) -> None:
        """A version is known: members may choose it, and are told that it is wanted once its newcomers are ready."""
        with self._changed:
            self._versions.admit(cluster)
            self._leaving &= set(cluster.workers)
            self._evicted -= set(cluster.workers)
            self._segments.drop_unknown()
            self._announce()
            self._changed.notify_all()

    def note_evicted(self, peers: Iterable[PeerID]) -> None:
        """Somebody has asked that these leave, and not for a size."""
        with self._changed:
            self._evicted.update(peers)

    def announce(self) -> None:
        """Tries again to make the shared memory that could not be made, or had not been yet."""
        with self._changed:
            self._announce()
            self._changed.notify_all()

    def refuse(self, version: int, reason: str) -> None:
        """A version that this host can't run: members who ask for it are told why instead of waiting for it."""
        with self._changed:
            self._versions.refused[version] = reason
            self._changed.notify_all()

    def choose(self, version: int) -> None:
        """The launcher's own choice: the initial version. It must have been admitted.

        Raises what the runtime or the kernel has against its shared memory, or `NotMadeYet`; nothing is chosen then.
        """
        with self._changed:
            self._segments.of(self._versions.clusters[version])
            self._versions.choose(version)
            self._after_choice()

    def record(self, choice: int | None = None, lost: str | None = None) -> ClusterVersions:
        """What the next head has to know; as if `choice` were the chosen version, and the host `lost`."""
        with self._changed:
            versions = copy.deepcopy(self._versions)
        if choice is not None and versions.chosen != choice and choice in versions.clusters:
            versions.choose(choice)
        if lost is not None:
            versions.lose_host(lost)
        return versions

    def noted(self) -> bool:
        """The version that `on_choice` was called for is on record, and is chosen from now on. False where that can't
        be any more, because of who has died: nobody has heard of it, and `not_noted` is to follow."""
        with self._changed:
            assert self._noting is not None
            version, step = self._noting
            if not self._versions.may_be_chosen(version):
                return False
            self._noting = None
            self._versions.choose(version)
            self._after_choice()
            chosen = self._versions.clusters[version]
        self.on_chosen(chosen, step)
        return True

    def not_noted(self) -> None:
        """That version is on record no more."""
        with self._changed:
            self._noting = None
            self._changed.notify_all()

    def resume(
        self,
        segments: Mapping[int, Segment],
        losses: Mapping[int, Sequence[m.Loss]],
        placed: Iterable[tuple[PeerID, int]],
        newcomers: Mapping[PeerID, int],
        wanted: Cluster | None,
    ) -> None:
        """Goes on where another head has stopped: with the memory that the hosts have of the versions that are known,
        and the `losses` there, in the order that some host has heard, which all hear now; with the processes that have
        their places, and the `newcomers` that live (incarnations); and with the cluster that is `wanted`, if that is
        newer than the chosen one."""
        with self._changed:
            self._holders.update(placed)
            self._has_placed = True  # in all that the head before has seen, as far as this one can tell
            versions = self._versions
            self._segments.open.update(segments)
            for version, told in losses.items():
                for loss in told:
                    segments[version].mark_lost(*loss)
            for host, last in versions.lost_hosts.items():
                for version, segment in segments.items():
                    if version <= last and host in versions.clusters[version].hosts:
                        self._resume_without(host, version, segment)
            versions.newcomers = dict(newcomers)
            if wanted is not None:
                versions.admit(wanted)
            current = versions.current
            assert current is not None
            for rank, reason, recover, reaped in losses[current.version]:  # also in what is made from now on
                peer = current.workers[rank]
                self._segments.mark_lost(peer, versions.meant_by(peer, current.version), reason, recover, reaped)

    def _resume_without(self, host: str, version: int, segment: Segment) -> None:
        """The head before had it on record that this host is lost, and may not have told all others."""
        for rank, worker in enumerate(self._versions.clusters[version].workers):
            if worker.host == host:
                segment.mark_lost(rank, f"was on host {host}, which was lost", True, True)
                if version == self._versions.chosen:
                    self._versions.record_end(worker, self._versions.meant_by(worker, version))
        segment.lose_host(host)

    def exclude_everybody(self) -> None:
        """Everybody has finished: whoever is on his way joins nothing any more, and nobody has to be let go."""
        with self._changed:
            self._versions.exclude_everybody()
            self._leaving.clear()
            self._changed.notify_all()

    def current(self) -> Cluster | None:
        """The chosen cluster."""
        with self._changed:
            return self._versions.current

    def is_out(self, peer: PeerID, incarnation: int) -> bool:
        """Whether the process has ended, or a chosen version has excluded it."""
        with self._changed:
            return self._versions.is_out(peer, incarnation)

    def belongs(self, peer: PeerID, incarnation: int, version: int) -> bool:
        """Whether `version` means this process by its peer ID."""
        with self._changed:
            return self._versions.belongs(peer, incarnation, version)

    def ended_in(self, cluster: Cluster) -> list[PeerID]:
        """The workers of `cluster` whose processes have ended."""
        with self._changed:
            return self._versions.ended_in(cluster)

    def has_placed(self) -> bool:
        """Whether any process has ever got its place in the cluster."""
        with self._changed:
            return self._has_placed

    def is_ready(self, peer: PeerID, incarnation: int) -> bool:
        """Whether a newcomer waits for its first version, or has got it."""
        with self._changed:
            process = (peer, incarnation)
            return process in self._versions.ready or process in self._holders

    def ready_standbys(self) -> set[int]:
        with self._changed:
            return set(self._ready_standbys)

    def assign(self, standby: int, peer: PeerID, incarnation: int) -> None:
        """The standby is this peer from now on."""
        with self._changed:
            self._identities[standby] = (peer, incarnation)
            self._changed.notify_all()

    def mark_lost(
        self, peer: PeerID, reason: str, incarnation: int, recover: bool = False, reaped: bool = True
    ) -> None:
        """A process has ended: tells the members of every version that it belongs to, also of those to come.

        With `recover` they go on without it. It must have been `reaped`, or not have answered SIGKILL: what it
        publishes then is taken from nobody, and it can't come back.
        """
        with self._changed:
            self._versions.record_end(peer, incarnation)
            self._told_to_end.discard(peer)
            self._segments.mark_lost(peer, incarnation, reason, recover, reaped)
            self._announce()  # a version may have waited for it alone
            self._changed.notify_all()

    def lose_host(self, host: str, processes: Collection[tuple[PeerID, int]], reason: str) -> None:
        """A host is lost, with all of its `processes` that had not ended. The other members go on without them, and
        hear of both at once, in this order, in the memory of each version."""
        with self._changed:
            self._versions.lose_host(host)
            for peer, incarnation in processes:
                self._versions.record_end(peer, incarnation)
                self._told_to_end.discard(peer)
            for peer, incarnation in processes:
                self._segments.mark_lost(peer, incarnation, reason, recover=True, reaped=True)
            self._segments.lose_host(host)
            self._announce()
            self._changed.notify_all()

    def host_is_back(self, host: str) -> None:
        """One that was lost, or has left, takes part again, as a new one."""
        with self._changed:
            self._versions.host_is_back(host)

    def mark_reaped(self, peer: PeerID, incarnation: int) -> None:
        """A process that was marked lost without being reaped is gone at last: what it has bound is free."""
        with self._changed:
            self._segments.mark_reaped(peer, incarnation)

    def heartbeat(self, peer: PeerID, incarnation: int) -> tuple[int, ...]:
        """Counts that move for as long as the process runs; none before it has a place, or once it has left."""
        with self._changed:
            beats = tuple(segment.heartbeat(rank) for segment, rank in self._segments.places_of(peer, incarnation))
            process = (peer, incarnation)
            if any(beats):
                self._counting.add(process)
            elif process in self._counting or process not in self._holders:
                return ()  # it has left, or has no place yet
            return beats

    def progress(self, peer: PeerID, incarnation: int) -> Progress | None:
        """Where the process's training is, as it has told in the newest version in which it has."""
        with self._changed:
            places = list(self._segments.places_of(peer, incarnation))
            return next(filter(None, (segment.progress(rank) for segment, rank in reversed(places))), None)

    def gave_up(self, peer: PeerID, incarnation: int) -> str:
        """Why a process that lives can't go on, and its end is what the other members wait for; "" where it can."""
        with self._changed:
            places = self._segments.places_of(peer, incarnation)
            return next(filter(None, (segment.gave_up(rank) for segment, rank in places)), "")

    def stuck(self, alive: Collection[tuple[PeerID, int]]) -> dict[tuple[PeerID, int], list[int]]:
        """Of the processes that live those that keep others waiting for longer than these can (`stuck`), with the ranks
        of these."""
        with self._changed:
            awaited = {version: segment.awaited() for version, segment in self._segments.open.items()}
            if not any(is_overdue for told in awaited.values() for *_, is_overdue in told):
                return {}  # as long as a job is healthy
            rank_of: dict[tuple[PeerID, int], int] = {}
            waits: list[tuple[Any, Any, bool]] = []
            for version, told in awaited.items():
                cluster = self._versions.clusters[version]
                known: dict[int, tuple[PeerID, int]] = {}
                for process in alive:
                    rank = cluster.rank_of(process[0])
                    if rank is not None and self._versions.belongs(*process, version):
                        known[rank], rank_of[process] = process, rank
                for *ends, is_overdue in told:
                    sleeper, other = (known.get(end, end) if isinstance(end, int) else (version, end) for end in ends)
                    waits.append((sleeper, other, bool(is_overdue)))
            found = stuck_among(set(alive), waits)
            return {process: sorted(rank_of[each] for each in by) for process, by in found.items()}

    def set_ending(self, peer: PeerID, incarnation: int, ending: bool) -> None:
        """The process is about to be ended, or isn't after all."""
        with self._changed:
            for segment, rank in self._segments.places_of(peer, incarnation):
                segment.set_ending(rank, ending)

    def end(self) -> None:
        """The job is about to end: nobody may leave any more, or become somebody."""
        with self._changed:
            self._ending = True

    def close(self) -> None:
        """Closes the segments. Whoever waits for an answer gets none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._segments.close()

    # ---- answering, in a thread of the caller's ----

    def serve(self, connection: Asker, asked: m.ToHeadsBroker) -> bool:
        """Answers a request, when there is an answer. Whether there was one. The worker's host has seen to it that who
        asks for a place is nobody's child."""
        if isinstance(asked, (m.PlaceRequest, m.StandbyRequest)):
            return self._serve_place(connection, asked)
        answer = _ANSWERS[type(asked)](self, asked)
        connection.extend(_ANSWER_TIMEOUT_S)
        connection.send(answer)
        return True

    def _serve_place(self, connection: Asker, asked: m.PlaceRequest | m.StandbyRequest) -> bool:
        request = _request_from(asked)
        if isinstance(request, StandbyRequest) or request.member_of is None:
            who = f"standby {request.number}" if isinstance(request, StandbyRequest) else f"worker {request.peer}"
            with self._changed:
                refusal = self._software.objection_to(who, asked.software)
            if refusal:
                connection.send(m.Error(refusal))
                return True
        return self._answer(connection, request)

    def _fix_cores(self, asked: m.FixCores) -> m.FromHeadsBroker:
        try:
            return m.CoresFixed(self.on_cores(asked.each))
        except concurrent.futures.TimeoutError:
            return m.Error("the launcher didn't get to moving the workers to their cores")

    def _note_expected(self, asked: m.Expect) -> m.FromHeadsBroker:
        self.on_expected(Expected(asked.version, asked.newcomers, asked.size))
        return m.Noted()

    def _answer(self, connection: Asker, request: Request | StandbyRequest) -> bool:
        try:
            return self._answer_in_time(connection, request)
        finally:
            with self._changed:
                if isinstance(request, StandbyRequest):
                    self._ready_standbys.discard(request.number)
                    who = self._identities.get(request.number)
                else:
                    who = (request.peer, request.incarnation)
                if who is not None:
                    self._versions.ready.discard(who)

    def _answer_in_time(self, connection: Asker, asked: Request | StandbyRequest) -> bool:
        asked_for: int | None = None
        connection.extend(_ANSWER_TIMEOUT_S)
        while True:
            answer: Grant | m.Detached | m.Stay | Refuse | Wait = Wait()
            unknown: int | None = None
            chosen: Cluster | None = None
            news = False
            with self._changed:
                if self._closed:
                    return False
                request = self._identified(asked)
                if request is not None:
                    before = self._versions.chosen
                    if self._versions.would_choose(request) is not None and connection.is_closed():
                        return False  # it has died since it asked, and can't carry the state over
                    answer = self._answer_of(request)
                    if self._versions.chosen != before:
                        chosen = self._versions.current
                        self._after_choice()
                if isinstance(answer, Grant) and request is not None:
                    # Sent under the lock: mark_lost and the next choice must not close the descriptor meanwhile.
                    connection.extend(_ANSWER_TIMEOUT_S)
                    self._grant(connection, request, answer)
                elif isinstance(answer, Wait):
                    if answer.unknown is not None and answer.unknown != asked_for:
                        unknown = asked_for = answer.unknown
                    elif self._note_ready(asked, request):
                        news = True
                    else:
                        # Woken by every change; now and then to see whether the worker has given up.
                        self._changed.wait(1.0)
                        if connection.is_closed():
                            return False
            if chosen is not None:
                self.on_chosen(chosen, asked.step if isinstance(asked, Request) else None)
            if news:
                self.on_ready(asked.number if isinstance(asked, StandbyRequest) else (asked.peer, asked.incarnation))
            if isinstance(answer, Wait):
                if unknown is not None:
                    self.on_unknown_version(unknown)
                continue
            connection.extend(_ANSWER_TIMEOUT_S)
            if isinstance(answer, m.Detached):
                evicted = isinstance(asked, Request) and asked.peer in self._evicted
                connection.send(m.Detached(evicted))
            elif isinstance(answer, m.Stay):
                connection.send(answer)
            elif isinstance(answer, Refuse):
                connection.send(m.Error(answer.reason))
            return True

    def _let_leave(self, asked: m.LeaveRequest) -> m.FromHeadsBroker:
        refusal = self._objection_to_leave(PeerID.parse(asked.peer), asked.terminated)
        return m.Error(refusal) if refusal else m.Leaving()

    def _objection_to_leave(self, peer: PeerID, terminated: bool) -> str:
        """Grants it and passes it on; the reason where it can't be granted. Of several who ask at once those who came
        first may go."""
        with self._changed:
            newest = self._versions.newest
            if self._ending or newest is None:
                return "the job is ending"
            if peer not in newest.workers:  # it is leaving already
                if terminated and self.on_leave is not None:
                    self._told_to_end.add(peer)
                    self.on_leave(peer)  # it may have been taken back in meanwhile
                return ""
            left = self._versions.staying_without(peer, self._leaving)
            if left == 0:
                return f"{peer} is the last worker"
            if left < self.min_size:
                return f"{peer} can't leave: {would_be_left(left, self.min_size)}"
            if self.on_leave is None:
                return "this launcher does not follow changes of the cluster (-w)"
            self._leaving.add(peer)
            if terminated:
                self._told_to_end.add(peer)
            else:
                self._evicted.add(peer)
            # With the lock: before whoever asks next is refused, and ends because of it.
            self.on_leave(peer)
        return ""

    def stays(self, peer: PeerID) -> None:
        """Whoever was granted to leave stays after all: too few would be left by now."""
        with self._changed:
            self._leaving.discard(peer)
            self._evicted.discard(peer)
            self._told_to_end.discard(peer)

    def told_to_end(self) -> set[PeerID]:
        """The members that have been granted to leave because each of them got a SIGTERM."""
        with self._changed:
            return set(self._told_to_end)

    # ---- with the lock held ----

    def _identified(self, asked: Request | StandbyRequest) -> Request | None:
        if isinstance(asked, Request):
            return asked
        identity = self._identities.get(asked.number)
        return None if identity is None or self._ending else Request(*identity, member_of=None, version=None)

    def _note_ready(self, asked: Request | StandbyRequest, request: Request | None) -> bool:
        """Notes who waits for a first version. Whether that was news."""
        if request is None and isinstance(asked, StandbyRequest):
            known, who = len(self._ready_standbys), asked.number
            self._ready_standbys.add(who)
            return len(self._ready_standbys) != known
        if request is None or request.member_of is not None:
            return False
        process = (request.peer, request.incarnation)
        if process in self._versions.ready:
            return False
        self._versions.ready.add(process)
        self._announce()
        return True

    def _announce(self) -> None:
        """Tells the members of the chosen version. Those of the one before have agreed on it, and look no more."""
        version, chosen = self._versions.announceable(), self._versions.chosen
        if self._closed or version is None or chosen is None or version <= max(chosen, self._announced):
            return
        if self.may_announce is not None and not self.may_announce(version):
            return
        try:
            self._segments.of(self._versions.clusters[version])
        except NotMadeYet:
            return
        except Exception as error:  # whatever the runtime or the kernel has against it
            # The members would agree on a version that they can't go over to: better that they don't hear of it yet.
            self.on_trouble(_unmakeable(self._versions.clusters[version], error))
            return
        self._announced = version
        self._segments.open[chosen].announce(version)
        self.on_announced(version)

    def _answer_of(self, request: Request) -> Grant | m.Detached | m.Stay | Refuse | Wait:
        wanted = self._versions.would_choose(request)
        if wanted is not None:
            try:
                self._segments.of(wanted)
            except NotMadeYet:
                return Wait()
            except Exception as error:
                # Once and for all, so that all members are told the same.
                self._versions.refused[wanted.version] = _unmakeable(wanted, error)
        if self.on_choice is not None:
            if self._noting is not None and request.member_of is not None:
                return Wait()
            if self._versions.would_choose(request) is not None:
                assert wanted is not None
                self._noting = (wanted.version, request.step)
                self.on_choice(wanted.version)
                return Wait()
        return self._versions.answer(request)

    def _grant(self, connection: Asker, request: Request, grant: Grant) -> None:
        self._holders.add((request.peer, request.incarnation))
        self._has_placed = True
        message = m.Place(m.ClusterPart.of(grant.cluster), grant.rank, str(request.peer), request.incarnation)
        self._segments.open[grant.cluster.version].hand_over(connection, message, grant.rank)

    def _after_choice(self) -> None:
        self._segments.drop_unknown()
        self._segments.drop_unlisted_losses()
        self._holders = {who for who in self._holders if not self._versions.is_out(*who)}
        self._counting &= self._holders
        current = self._versions.current
        self._told_to_end &= set() if current is None else set(current.workers)
        # What was ready to be gone over to from the version before need not be so from this one: a peer in it may have
        # been a member that this choice has excluded, and is another process from now on.
        self._announced = -1
        self._announce()  # to the segment of the chosen one
        self._changed.notify_all()


_ANSWERS: dict[type, Callable[[Broker, Any], m.FromHeadsBroker]] = {  # to what is answered at once
    m.LeaveRequest: Broker._let_leave,
    m.FixCores: Broker._fix_cores,
    m.Expect: Broker._note_expected,
}


def _unmakeable(cluster: Cluster, error: Exception) -> str:
    size = counted(cluster.size, "worker")
    return f"the shared memory of cluster version {cluster.version} ({size}) can't be made: {error}"


def _request_from(asked: m.PlaceRequest | m.StandbyRequest) -> Request | StandbyRequest:
    if isinstance(asked, m.StandbyRequest):
        return StandbyRequest(asked.number)
    return Request(PeerID.parse(asked.peer), asked.incarnation, asked.member_of, asked.version, asked.step)
