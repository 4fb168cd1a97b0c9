"""What the launcher does when something happens to a worker or to itself. Pure: an event and a state give a verdict."""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.wire.documents import Failure

MOST_LATE = 2  # joining workers in a row in one place
EXIT_TIMEOUT = 124  # as timeout(1) has it


class Standing(enum.Enum):
    """A process's relation to the committed cluster version."""

    MEMBER = "member"
    JOINING = "joining"  # started for a version that has not been chosen yet
    LEAVING = "leaving"  # a committed version does not contain it any more
    STANDBY = "standby"  # a spare one, for whoever is needed


class Recover(enum.Enum):
    """What a death in watch mode leads to (``-recover``)."""

    SHRINK = "shrink"
    REPLACE = "replace"
    FAIL = "fail"


@dataclass(frozen=True)
class WorkerExited:
    """`code` is negative for a signal. `who` names the worker to a person, `error` says why it never ran or was killed.

    `logs` names its log files, "" without -logdir. `restarts`: how often its place was filled anew lately. `late`: how
    many joining workers in a row, with this one, weren't ready to join in time there.
    """

    who: str
    standing: Standing
    code: int
    error: str = ""
    logs: str = ""
    restarts: int = 0
    late: int = 0


@dataclass(frozen=True)
class WorkerWorksOn:
    """A worker left the cluster with `version`, and still works after its grace."""

    who: str
    version: int
    grace_s: float


@dataclass
class Headcount:
    """The members, those who leave, and of the members those who are about to because they were told to end (SIGTERM).

    Only those that somebody waits for: not those that left longer ago than -leave-grace, or can't be killed.
    """

    members: int = 0
    leaving: int = 0
    terminated: int = 0


@dataclass
class Situation(Headcount):
    """After the event: how many processes are still running, what was asked for, and what has happened before."""

    recover: Recover = Recover.FAIL
    min_size: int = 1
    max_restarts: int = 0
    first_failure: Failure | None = None  # of those that the job has survived
    program_failure: Failure | None = None  # the first of those in which a program failed by itself
    finished: bool = False  # a member has come to the end of its program
    first_to_finish: str = ""  # the first one that has, before this event


class Action(enum.Enum):
    CONTINUE = "continue"
    FINISH = "finish"  # everybody is done
    SHRINK = "shrink"  # the others go on without the worker
    REPLACE = "replace"  # the same, and a new worker takes its place
    FAIL = "fail"  # the job ends with the verdict's exit code


@dataclass(frozen=True)
class Verdict:
    action: Action
    reason: str
    exit_code: int = 0
    signal_to_workers: int = signal.SIGTERM


def interrupted(number: int, where: str = "") -> Verdict:
    return Verdict(Action.FAIL, f"interrupted by {signal_name(number)}{where}", 128 + number, number)


def timed_out(limit_s: float) -> Verdict:
    return Verdict(Action.FAIL, f"the job was still running after -timeout {limit_s:g} s", EXIT_TIMEOUT)


def not_begun(limit_s: float, why: str) -> str:
    """Of a job that ends by -timeout before all hosts have met."""
    return f"the job has not begun within -timeout {limit_s:g} s: {why}"


def host_lost(reason: str, exit_code: int | None = None) -> Verdict:
    """And the others don't go on without it. `exit_code`: of the first worker that has ended by it."""
    return Verdict(Action.FAIL, reason, 1 if exit_code is None else exit_code)


def hosts_leave(hosts: str, left: int, min_size: int) -> Verdict:
    """`hosts` are to leave, because each one's launcher got a SIGTERM, and `left` members stay. Where that is too few
    the job ends, as one host's does where so many of its workers get the signal."""
    if left < max(1, min_size):
        return interrupted(signal.SIGTERM, f" on host {hosts}, without which {would_be_left(left, min_size)}")
    return Verdict(Action.CONTINUE, "")


def leaves(who: str, left: int, min_size: int) -> Verdict:
    """A worker is going to leave: it got a SIGTERM, or a policy of the program's says so. `left` members stay."""
    if left < min_size:
        # It was granted, and others have died since.
        return Verdict(Action.CONTINUE, f"{who} stays: {would_be_left(left, min_size)}")
    return Verdict(Action.SHRINK, f"{who} is leaving; the others go on")


def decide(event: WorkerExited | WorkerWorksOn, state: Situation) -> Verdict:
    """What to do about `event`, and the sentence that says why. An empty reason is not worth a line."""
    if isinstance(event, WorkerWorksOn):
        reason = (
            f"{event.who} is not in cluster version {event.version} any more and still works after {event.grace_s:g} s "
            "(-leave-grace); no other worker waits for it, and it is ended when its slot is needed or the job ends"
        )
        return after_end(reason, state) or Verdict(Action.CONTINUE, reason)

    how = event.error or how_it_ended(event.code)
    named = f", see {event.logs}" if event.logs else ""
    if event.standing is Standing.STANDBY:
        reason = f"{event.who} {how} before it was needed"
        if event.restarts < state.max_restarts:
            return Verdict(Action.REPLACE, f"{reason}; another one is started")
        others = counted(event.restarts, "other")
        return Verdict(Action.SHRINK, f"{reason}, like {others} lately; it was the last{named}")
    if event.standing is Standing.JOINING and event.code == 0:
        reason = f"{event.who} exited before it joined the cluster; does the program call ms_kungfu.init()?"
        return after_end(reason, state) or Verdict(Action.SHRINK, reason)
    if event.code == 0:
        return after_end("", state) or Verdict(Action.CONTINUE, "")
    if event.standing is Standing.LEAVING:
        # The cluster goes on without it anyway.
        reason = f"{event.who} had left the cluster and then {how}"
        return after_end(reason, state) or Verdict(Action.CONTINUE, reason)
    return _after_death(event, Failure(f"{event.who} {how}", exit_code_of(event.code)), state)


def after_end(reason: str, state: Situation) -> Verdict | None:
    """The job's end, where nobody is left. `reason`: what has just happened, if anything."""
    if state.members or state.leaving:
        return None
    if state.first_failure is not None and not state.finished:
        # A worker that was leaving is the last to go: the others died before they could go on without it.
        first = _cause(state.first_failure, state.program_failure)
        return Verdict(Action.FAIL, f"no worker is left, the first that failed: {first.reason}", first.exit_code)
    done = f"{reason}; " if reason else ""
    if state.program_failure is not None:
        failed = state.program_failure
        return Verdict(Action.FAIL, f"{done}the other workers have finished, but {failed.reason}", failed.exit_code)
    return Verdict(Action.FINISH, f"{done}all workers have finished")


def _cause(first: Failure, of_program: Failure | None) -> Failure:
    """Whose failure is named for all."""
    return of_program if first.is_of_launcher and of_program is not None else first


def _after_death(event: WorkerExited, failure: Failure, state: Situation) -> Verdict:
    # Whoever ends first leaves the others in an operation that can't end; theirs is not the cause.
    before = f"; {state.first_to_finish} was the first to end, with code 0" if state.first_to_finish else ""
    if state.recover is Recover.FAIL:
        return Verdict(Action.FAIL, failure.reason + before, failure.exit_code)
    if event.standing is Standing.JOINING and state.finished:  # it would have found nobody
        return after_end(failure.reason, state) or Verdict(Action.CONTINUE, failure.reason)
    own = failure if not event.error and fails_by_itself(event.code) else None
    first = _cause(state.first_failure or failure, state.program_failure or own)
    by_sigterm = exit_code_of(event.code) == 128 + signal.SIGTERM
    terminated = state.terminated if by_sigterm else 0
    if state.members == terminated:
        # Or all were told to end at once: whoever has been granted to leave would stay alone otherwise, and train on.
        if first != failure:
            before = f"; no worker is left, the first that failed: {first.reason}{before}"
        elif by_sigterm:
            before = f"; no worker is left without a SIGTERM{before}"
        return Verdict(Action.FAIL, failure.reason + before, first.exit_code)
    if state.members - terminated < state.min_size:
        reason = f"{failure.reason}; {would_be_left(state.members - terminated, state.min_size)}"
        return Verdict(Action.FAIL, reason, first.exit_code)
    if state.recover is Recover.REPLACE and not state.finished:  # a joining worker would find nobody any more
        if event.late >= MOST_LATE:  # the next would be as slow
            return Verdict(
                Action.SHRINK,
                f"{failure.reason}, like the one before it; the others go on without it: raise KUNGFU_JOIN_TIMEOUT "
                "above the time that a worker takes to start and compile, then request the size again",
            )
        if event.restarts < state.max_restarts:
            return Verdict(Action.REPLACE, f"{failure.reason}; the others go on, and a new worker is started")
        named = f", see {event.logs}" if event.logs else ""
        return Verdict(
            Action.SHRINK,
            f"{failure.reason}; the others go on without it: its place was filled {counted(event.restarts, 'time')} "
            f"lately (-max-restarts {state.max_restarts}){named}",
        )
    return Verdict(Action.SHRINK, f"{failure.reason}; the others go on without it")


def would_be_left(left: int, min_size: int) -> str:
    """Why somebody may not leave, or the job ends."""
    return f"{counted(left, 'worker')} would be left, -min-np is {min_size}"


def peers_to_start(
    desired: Cluster, present: Collection[PeerID], ended: Collection[PeerID], finishing: bool
) -> list[PeerID]:
    """The workers of `desired` that need a process: those that are neither `present` in the cluster, or on their way
    into it, nor the ones that have `ended`, whom the next version leaves out.

    None when a member has finished its program (`finishing`): the rest is about to, and a joining worker would find
    nobody.
    """
    return [] if finishing else [peer for peer in desired.workers if peer not in present and peer not in ended]


def revised(
    newest: Cluster,
    last_version: int,
    removed: Collection[PeerID],
    living: Sequence[PeerID],
    joining: int,
    ports: Sequence[int],
    slots: Mapping[str, int] | None = None,
    is_stale: bool = False,
) -> Cluster | None:
    """What the launcher has to write to the config server, or None: first the newest cluster without those that are
    `removed` (dead or leaving), then `joining` more in their places.

    Args:
        newest: the newest cluster that this host can run.
        last_version: the newest version that anybody has written; a later one than `newest`'s can't be run.
        living: the members of the committed cluster that live, in the order of their ranks: one of them at least has to
            be in it, because they have the state.
        is_stale: what the store tells of the hosts isn't true any more, whoever works there.
    """
    keep = [worker for worker in newest.workers if worker not in removed]
    if not any(worker in living for worker in keep):
        keep = [worker for worker in living if worker not in removed][:1] + keep
    if not any(worker in living for worker in keep):
        return None  # the job is about to fail
    following = replace(newest.following(keep), version=last_version + 1)  # it is not that one's writer's
    if following.workers != newest.workers or last_version > newest.version or is_stale:
        return following
    return newest.resized(newest.size + joining, ports, slots=slots) if joining else None


def exit_code_of(code: int) -> int:
    """The launcher's exit code for a worker's: as a shell has it, 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def fails_by_itself(code: int) -> bool:
    """Whether a worker has ended by an error of its program rather than by a signal, its own or a child's (which a
    shell tells as 128 + n)."""
    return 0 < code <= 128 or code > 128 + signal.SIGRTMAX


def how_it_ended(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def copies(size: int, seconds: float, ended: bool) -> str:
    """Of `size` workers, started so many seconds ago, none has joined the job. `ended`: all have, without an error."""
    causes = (
        "Usual causes: the program doesn't use ms_kungfu (a program for msrun needs --msrun); its environment was "
        "cleared (env -i, sudo, a container); another Python runs it, without ms_kungfu"
    )
    none = f"none of the {size} workers has joined the job within {seconds:.0f} s"
    if ended:
        return f"{none}, and all have ended: if they have trained, each has trained a model of its own. {causes}"
    return (
        f"{none}. If the program is still preparing (a download, a data set to list), ignore this line; else each "
        f"worker trains a model of its own. {causes}"
    )


def bug(error: BaseException) -> str:
    """For the last words: many have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
