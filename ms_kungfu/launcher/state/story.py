"""Describe in sentences what happened to a job, from the events in its log. This module uses no clock and no I/O.

The sentences contain only what the events say. A cause is the reason that the controller or a worker reported. A cost
is a time that a worker or the launcher measured. If no event contains a fact, the fact is null and the sentence omits
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from ms_kungfu import job_events as e
from ms_kungfu._words import counted
from ms_kungfu.launcher.state.account import JobAccount, spell, told

_SLOW_SHARE = 0.2  # a rank is a straggler if the others wait for it for at least this fraction of their time
_SLOW_S = 10.0  # the minimum duration of a straggler chapter in seconds, so that noise isn't reported
_LONG_EVALUATION_S = 1.0


class Chapter(Struct):
    """One part of the story: something that happened to the job.

    `kind`: job, failure, resize, stall, straggler, host, store, controller, checkpoint, evaluation, policy, runtime.
    `at_s`: seconds since the log began. `cost_s`: for how many seconds training was paused or slower. `waited`: the
    ranks that waited because of this event.
    """

    kind: str
    at_s: float
    text: str
    step: int | None = None
    rank: int | None = None
    cause: str | None = None
    decision: str | None = None
    cost_s: float | None = None
    waited: list[int] = field(default_factory=list)


def story_of(events: Sequence[e.Event]) -> list[Chapter]:
    """Return the chapters, sorted by the time at which they begin. `events`: one job's events, in order."""
    return _Teller(events).tell()


class _Teller:
    def __init__(self, events: Sequence[e.Event]) -> None:
        self.events = events
        self.first = next((event.time for event in events if event.time is not None), 0.0)
        self.account = JobAccount()
        self.delays: dict[int, e.StepDelayed] = {}  # index of a stall's event -> the long step that the stall caused
        for place, event in enumerate(events):
            if isinstance(event, e.StallBegan) and (delay := _delay(event, self._later(place))) is not None:
                self.delays[place] = delay
        self.explained = {id(delay) for delay in self.delays.values()}

    def _later(self, place: int) -> Iterator[e.Event]:
        """Yield the events after index `place`, one by one, so that a caller can stop early."""
        return (self.events[each] for each in range(place + 1, len(self.events)))

    def tell(self) -> list[Chapter]:
        chapters: list[Chapter] = []
        for place, event in enumerate(self.events):
            self.account.add(event)
            teller = _TELLERS.get(type(event))
            if teller is not None and (chapter := teller(self, event, place)) is not None:
                chapters.append(chapter)
        chapters += self._stragglers()
        return sorted(chapters, key=lambda chapter: chapter.at_s)

    def at_s(self, event: e.Event) -> float:
        return round((event.time or self.first) - self.first, 3)

    # ---- the job ----

    def began(self, event: e.JobStarted, place: int) -> Chapter:
        where = f" on {counted(len(event.hosts), 'host')}" if len(event.hosts) > 1 else ""
        return Chapter("job", self.at_s(event), f"The job started with {counted(event.workers, 'worker')}{where}.")

    def ended(self, event: e.JobEnded, place: int) -> Chapter:
        goodput = self.account.goodput
        share = "" if goodput is None else f" {goodput:.0%} of its time went into committed steps."
        steps = f" after step {self.account.steps}" if self.account.steps else ""
        return Chapter(
            "job", self.at_s(event),
            f"The job ended with exit code {event.exit_code}{steps}: {event.reason}.{share}",
            step=self.account.steps or None, cause=event.reason, decision=f"exit code {event.exit_code}",
        )  # fmt: skip

    def leader(self, event: e.LeaderChanged, place: int) -> Chapter:
        text = f"Host {event.host} took over the job, which {event.before} had controlled."
        return Chapter("controller", self.at_s(event), text, cause=f"{event.before} controlled it before")

    def stepped_down(self, event: e.LeaderLost, place: int) -> Chapter:
        text = f"The controller on {event.host} stepped down: {event.reason}. The next controller has its own log."
        return Chapter("controller", self.at_s(event), text, cause=event.reason)

    # ---- failures ----

    def failed(self, event: e.WorkerFailed, place: int) -> Chapter:
        reply = self._reply(event, self._later(place))
        seen = reply if isinstance(reply, e.FailureSeen) else None
        who = f"rank {event.rank}" if event.rank is not None else "a standby"
        where = f" on {event.host}" if event.host and not event.reason.startswith("was on host") else ""
        which = {"member": "", "joining": ", which was joining,", "leaving": ", which had left,", "standby": ""}
        text = f"{_capital(who)}{where}{which[event.standing]} {event.reason}."
        step = event.step if seen is None else seen.step
        if seen is not None:
            longer = f", which took {spell(seen.seconds)} longer than usual" if seen.seconds else ""
            text += f" The others noticed it in step {seen.step}{longer}."
        elif step is not None:
            text += f" Its last step that the controller knew of was {step}."
        elif reply is not None and (step := reply.step) is not None:
            text += f" The cluster changed after step {step}."
        text += f" {_DECISIONS[event.decision]}"
        waited = [] if seen is None or not seen.seconds else [rank for rank in seen.survivors if rank != event.rank]
        if waited:
            text += f" {_capital(told(waited))} waited."
        return Chapter(
            "failure", self.at_s(event), text, step=step, rank=event.rank, cause=event.reason, decision=event.decision,
            cost_s=None if seen is None else seen.seconds, waited=waited,
        )  # fmt: skip

    @staticmethod
    def _reply(event: e.WorkerFailed, later: Iterable[e.Event]) -> e.FailureSeen | e.VersionCommitted | None:
        """Return the survivors' report of this failure, or the next committed version if it came before that report.

        Return None if the same rank fails again first.
        """
        for each in later:
            if isinstance(each, e.VersionCommitted) or (isinstance(each, e.FailureSeen) and each.rank == event.rank):
                return each
            if isinstance(each, e.WorkerFailed) and each.rank == event.rank:
                return None
        return None

    def undone(self, event: e.StepUndone, place: int) -> Chapter:
        text = f"Step {event.step} was undone and repeated: {event.reason}."
        return Chapter("failure", self.at_s(event), text, step=event.step, cause=event.reason, decision="repeat")

    # ---- changes ----

    def resize(self, event: e.ResizeRequested, place: int) -> Chapter:
        version = event.version
        commits = (x for x in self._later(place) if isinstance(x, e.VersionCommitted))
        committed = next((x for x in commits if x.version >= version), None)
        resized = next((x for x in self._later(place) if isinstance(x, e.Resized) and x.version == version), None)
        change = f"{event.workers_before} -> {counted(event.workers, 'worker')} (version {version})"
        text = f"Change {change}: {event.reason}."
        if committed is None:
            outcome, step = "It was not adopted before the log ended.", None
        elif committed.version > version:
            outcome, step = f"Version {committed.version} replaced it before it was adopted.", None
        else:
            step = committed.step
            behind = "" if step is None else f" after step {step}"
            outcome = f"It was adopted{behind}, {spell(committed.seconds)} after the request."
        if resized is not None:
            outcome += f" Training paused for {spell(resized.seconds)}."
        return Chapter(
            "resize", self.at_s(event), f"{text} {outcome}", step=step, cause=f"{event.by}: {event.reason}",
            decision=f"{event.workers_before} -> {event.workers}", cost_s=None if resized is None else resized.seconds,
        )  # fmt: skip

    def rejected(self, event: e.ResizeRejected, place: int) -> Chapter:
        text = f"Version {event.version} with {counted(event.workers, 'worker')} was rejected: {event.reason}."
        return Chapter("resize", self.at_s(event), text, cause=event.reason, decision="rejected")

    def draining(self, event: e.WorkerDraining, place: int) -> Chapter:
        text = f"Rank {event.rank} leaves after its step: {event.reason}."
        return Chapter("resize", self.at_s(event), text, rank=event.rank, cause=event.reason, decision="shrink")

    # ---- hosts and the store ----

    def host(self, event: e.Event, place: int) -> Chapter:
        words = {
            e.HostLost: "was lost", e.HostLeft: "has left the job", e.HostJoined: "joined the job",
            e.HostDraining: "is leaving: its launcher got a SIGTERM",
        }  # fmt: skip
        why = f": {event.reason}" if event.reason and not isinstance(event, e.HostDraining) else ""
        text = f"Host {event.host} {words[type(event)]}{why}."
        return Chapter("host", self.at_s(event), text, cause=event.reason or None)

    def disconnected(self, event: e.HostsDisconnected, place: int) -> Chapter:
        other = f"host {event.other}" if event.other else "the other hosts"
        text = f"Host {event.host} did not reach {other}: {event.reason}."
        return Chapter("host", self.at_s(event), text, cause=event.reason)

    def store(self, event: e.StoreLost, place: int) -> Chapter:
        back = next((x for x in self._later(place) if isinstance(x, (e.StoreRestored, e.StoreLost))), None)
        until = "until the log ended"
        if isinstance(back, e.StoreRestored):
            until = f"for {spell(round(self.at_s(back) - self.at_s(event), 3))}"
        elif back is not None:
            until = "for an unknown time"  # another controller has taken over the job
        text = f"The cluster store did not answer {until}; training went on, and changes waited: {event.reason}."
        return Chapter("store", self.at_s(event), text, cause=event.reason)

    # ---- training ----

    def delayed(self, event: e.StepDelayed, place: int) -> Chapter | None:
        """Describe a step that took longer than usual; None if a stall is the cause."""
        if id(event) in self.explained:
            return None
        why = f": {event.reason}" if event.reason else ""
        text = f"Step {event.step} took {spell(event.seconds)} longer than usual{why}."
        cause = event.reason or None
        return Chapter("stall", self.at_s(event), text, step=event.step, cause=cause, cost_s=event.seconds)

    def stall(self, event: e.StallBegan, place: int) -> Chapter:
        end, heard, is_known = self._end_of(event, self._later(place))
        delay = self.delays.get(place)
        waited = _capital(told(event.waiting)) + (" waits" if len(event.waiting) == 1 else " wait")
        since = "" if event.step is None else f", whose last step is {event.step}"
        why = f" It is {event.reason}." if event.reason else ""
        until = "It had not reached the operation when the log ended."
        if end is not None:
            until = f"That lasted for about {end.seconds:.0f} s."
        elif not is_known:
            until = "The log does not contain its end."
        cost_s = None if delay is None else delay.seconds
        if delay is not None and end is not None and delay.seconds < end.seconds / 2:
            cost_s = end.seconds  # the rank that measured the delay was itself paused, so `delay` is too short
        elif delay is not None:
            until += f" Step {delay.step} took {spell(delay.seconds)} longer than usual."
        said = "" if heard is None else f" Rank {heard.rank} logged: {heard.reason}."
        return Chapter(
            "stall", round(self.at_s(event) - event.seconds, 3),
            f"{waited} for rank {event.rank}{since}.{why} {until}{said}",
            step=event.step if delay is None else delay.step, rank=event.rank, cause=event.reason or None,
            cost_s=cost_s, waited=list(event.waiting),
        )  # fmt: skip

    @staticmethod
    def _end_of(
        stall: e.StallBegan, later: Iterable[e.Event]
    ) -> tuple[e.StallEnded | None, e.RuntimeMessage | None, bool]:
        """Return the end of a stall, the first message of a waiting rank, and whether the log may contain the end.

        The log lacks the end if the same rank's next stall begins first: another controller has taken over
        the job.
        """
        end, heard = None, None
        for each in later:
            if isinstance(each, e.StallBegan) and each.rank == stall.rank:
                return end, heard, end is not None
            if end is not None and (each.time or 0) > (end.time or 0):
                break
            if isinstance(each, e.StallEnded) and each.rank == stall.rank:
                end = end or each
            elif isinstance(each, e.RuntimeMessage) and each.rank in stall.waiting:
                heard = heard or each
        return end, heard, True

    def checkpoint(self, event: e.CheckpointFailed, place: int) -> Chapter:
        text = f"The checkpoint of step {event.step} was not written, and training went on: {event.reason}."
        return Chapter("checkpoint", self.at_s(event), text, step=event.step, rank=event.rank, cause=event.reason)

    def resumed(self, event: e.Resumed, place: int) -> Chapter:
        return Chapter("checkpoint", self.at_s(event), f"Training started from the checkpoint {event.path}.")

    def evaluation(self, event: e.Evaluated, place: int) -> Chapter | None:
        if event.seconds < _LONG_EVALUATION_S:
            return None
        text = f"An evaluation took {spell(event.seconds)}, during which no step was trained."
        return Chapter("evaluation", self.at_s(event), text, cost_s=event.seconds, cause="an evaluation")

    def policy(self, event: e.PolicyDecided, place: int) -> Chapter:
        text = f"After step {event.step} a policy decided {event.changes}: {event.reason}."
        return Chapter("policy", self.at_s(event), text, event.step, cause=event.reason, decision=event.changes)

    # ---- stragglers ----

    def _stragglers(self) -> list[Chapter]:
        """Describe each rank for which the others waited in consecutive rank statistics of a cluster version."""
        chapters: list[Chapter] = []
        run: list[e.RankStatistics] = []
        kinds = (e.RankStatistics, e.VersionCommitted)  # in another version, the rank may be another worker
        for each in [*(x for x in self.events if isinstance(x, kinds)), None]:
            event = each if isinstance(each, e.RankStatistics) else None
            if run and (event is None or _slowest(event) != _slowest(run[0])):
                rank = _slowest(run[0])
                if rank is not None and sum(each.seconds for each in run) >= _SLOW_S:
                    chapters.append(self._straggler(rank, run))
                run = []
            if event is not None:
                run.append(event)
        return chapters

    def _straggler(self, rank: int, run: Sequence[e.RankStatistics]) -> Chapter:
        seconds = sum(each.seconds for each in run)
        waiting = sum(_others(each, rank) * each.seconds for each in run) / seconds
        data = [each.data[rank] for each in run if each.data[rank] is not None]
        share = sum(filter(None, data)) / len(data) if data else None
        is_data = share is not None and share >= _SLOW_SHARE
        why = f" It spent {share:.0%} of its own time waiting for data." if is_data else ""
        others = sorted({i for each in run for i, part in enumerate(each.waiting) if part is not None} - {rank})
        text = (
            f"For {spell(seconds)} rank {rank} was the slowest: {told(others)} waited for {waiting:.0%} of the time."
            f"{why}"
        )
        return Chapter(
            "straggler", self.at_s(run[0]), text, rank=rank, waited=others, cost_s=round(waiting * seconds, 3),
            cause=f"data {share:.0%}" if is_data else None,
        )  # fmt: skip


def _delay(stall: e.StallBegan, later: Iterable[e.Event]) -> e.StepDelayed | None:
    """Return the lowest rank's report that the step with this stall took longer than usual; None if there is none.

    The step with the stall is the next step that ends.
    """
    for each in later:
        if isinstance(each, e.StepDelayed):
            return each
        if isinstance(each, (e.FailureSeen, e.Resized, e.StallBegan)) or (
            isinstance(each, e.Statistics) and each.steps and (each.time or 0) - (stall.time or 0) > each.seconds
        ):
            return None
    return None


def _slowest(line: e.RankStatistics) -> int | None:
    """Return the rank for which the others waited; None if they spent only a small fraction of their time waiting."""
    known = {rank: part for rank, part in enumerate(line.waiting) if part is not None}
    if len(known) < 2:
        return None
    rank = min(known, key=lambda each: known[each])
    return rank if _others(line, rank) >= _SLOW_SHARE else None


def _others(line: e.RankStatistics, rank: int) -> float:
    """Return the mean fraction of time that the ranks other than `rank` spent waiting."""
    parts = [part for i, part in enumerate(line.waiting) if i != rank and part is not None]
    return sum(parts) / len(parts) if parts else 0.0


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_DECISIONS = {
    "continue": "The job went on.",
    "shrink": "The job went on without it.",
    "replace": "The job went on, and a new worker replaced it.",
    "fail": "This ended the job.",
    "finish": "The job ended with it.",
}
_TELLERS: dict[type[e.Event], Any] = {
    e.JobStarted: _Teller.began, e.JobEnded: _Teller.ended, e.LeaderChanged: _Teller.leader,
    e.LeaderLost: _Teller.stepped_down, e.WorkerFailed: _Teller.failed, e.StepUndone: _Teller.undone,
    e.ResizeRequested: _Teller.resize, e.ResizeRejected: _Teller.rejected, e.WorkerDraining: _Teller.draining,
    e.HostLost: _Teller.host, e.HostLeft: _Teller.host, e.HostJoined: _Teller.host, e.HostDraining: _Teller.host,
    e.HostsDisconnected: _Teller.disconnected, e.StoreLost: _Teller.store, e.StallBegan: _Teller.stall,
    e.StepDelayed: _Teller.delayed,
    e.CheckpointFailed: _Teller.checkpoint, e.Resumed: _Teller.resumed, e.Evaluated: _Teller.evaluation,
    e.PolicyDecided: _Teller.policy,
}  # fmt: skip
