"""What the launcher does about an event at a worker or at itself. Pure: an event and a state give a `Verdict`."""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.wire.documents import Failure

MOST_LATE = 2  # joining workers in a row in one slot
EXIT_TIMEOUT = 124  # as for timeout(1)
CANT_RUN = 126  # the code of a process that never ran, as in a shell


class Standing(enum.Enum):
    """A process's relation to the committed cluster version."""

    MEMBER = "member"
    JOINING = "joining"  # started for a version that isn't committed yet
    LEAVING = "leaving"  # a committed version does not contain it any more
    STANDBY = "standby"  # a standby, for any slot


class Recover(enum.Enum):
    """What a failure in watch mode leads to (``-recover``)."""

    SHRINK = "shrink"
    REPLACE = "replace"
    FAIL = "fail"


@dataclass(frozen=True)
class WorkerExited:
    """A worker exited.

    `code` is negative for a signal. `who` names the worker; `error` says why it never ran or was killed. `logs` names
    its log files, "" without -logdir. `restarts`: how many replacements its slot had lately. `late`: how many joining
    workers in a row, with this one, weren't ready to join there in time. `has_ended`: its program had ended before.
    """

    who: str
    standing: Standing
    code: int
    error: str = ""
    logs: str = ""
    restarts: int = 0
    late: int = 0
    has_ended: bool = False


@dataclass(frozen=True)
class WorkerWorksOn:
    """A worker left the cluster with `version`, and still runs after -leave-grace."""

    who: str
    version: int
    grace_s: float


@dataclass
class Headcount:
    """The members, the removed workers that still run, and of the members those that leave because of a SIGTERM.

    Only awaited workers count: not those removed longer ago than -leave-grace, nor those that SIGKILL doesn't end.
    """

    members: int = 0
    leaving: int = 0
    terminated: int = 0


@dataclass
class Situation(Headcount):
    """The job after the event: how many processes run, the options, and what has happened before."""

    recover: Recover = Recover.FAIL
    min_size: int = 1
    max_restarts: int = 0
    first_failure: Failure | None = None  # the first failure that the job has survived
    program_failure: Failure | None = None  # the first one of a program by itself
    finished: bool = False  # a member has completed its program
    first_to_finish: str = ""  # the first one to do so, before this event


class Action(enum.Enum):
    CONTINUE = "continue"
    FINISH = "finish"  # all workers are done
    SHRINK = "shrink"  # the others continue without the worker
    REPLACE = "replace"  # the same, and a new worker takes its slot
    FAIL = "fail"  # the job ends with the exit code of the `Verdict`


@dataclass(frozen=True)
class Verdict:
    action: Action
    reason: str
    exit_code: int = 0
    interrupted_by: int | None = None  # a signal to a launcher, which the workers get, too


def interrupted(number: int, where: str = "") -> Verdict:
    return Verdict(Action.FAIL, f"interrupted by {signal_name(number)}{where}", 128 + number, number)


def timed_out(limit_s: float) -> Verdict:
    return Verdict(Action.FAIL, f"the job was still running after -timeout {limit_s:g} s", EXIT_TIMEOUT)


def not_begun(limit_s: float, why: str) -> str:
    """End a job by -timeout before all hosts have registered."""
    return f"the job has not begun within -timeout {limit_s:g} s: {why}"


def host_lost(reason: str, exit_code: int | None = None) -> Verdict:
    """End the job, as the others don't continue without the lost host.

    `exit_code`: of the first worker that exited because of it.
    """
    return Verdict(Action.FAIL, reason, 1 if exit_code is None else exit_code)


def hosts_leave(hosts: str, left: int, min_size: int) -> Verdict:
    """Decide whether `hosts`, whose launchers got a SIGTERM, leave; `left` members stay.

    If these are too few the job ends, as on one host on which so many workers get the signal.
    """
    if left < max(1, min_size):
        return interrupted(signal.SIGTERM, f" on host {hosts}, without which {would_be_left(left, min_size)}")
    return Verdict(Action.CONTINUE, "")


def leaves(who: str, left: int, min_size: int) -> Verdict:
    """Decide whether a worker leaves, by a SIGTERM or a policy of the program. `left` members stay."""
    if left < min_size:
        # The request was granted, and other workers have failed since.
        return Verdict(Action.CONTINUE, f"{who} stays: {would_be_left(left, min_size)}")
    return Verdict(Action.SHRINK, f"{who} is leaving; the others go on")


def decide(event: WorkerExited | WorkerWorksOn, state: Situation) -> Verdict:
    """Return what to do about `event`, and the sentence that says why; with an empty reason nothing is logged."""
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
        # The cluster continues without it in any case.
        reason = f"{event.who} had left the cluster and then {how}"
        return after_end(reason, state) or Verdict(Action.CONTINUE, reason)
    return _after_death(event, Failure(f"{event.who} {how}", exit_code_of(event.code)), state)


def after_end(reason: str, state: Situation) -> Verdict | None:
    """Return how the job ends once no worker is left. `reason`: the last event, if any."""
    if state.members or state.leaving:
        return None
    if state.first_failure is not None and not state.finished:
        # A worker that was leaving is the last to exit: the others failed before they could continue without it.
        first = _cause(state.first_failure, state.program_failure)
        return Verdict(Action.FAIL, f"no worker is left, the first that failed: {first.reason}", first.exit_code)
    done = f"{reason}; " if reason else ""
    if state.program_failure is not None:
        failed = state.program_failure
        return Verdict(Action.FAIL, f"{done}the other workers have finished, but {failed.reason}", failed.exit_code)
    return Verdict(Action.FINISH, f"{done}all workers have finished")


def _cause(first: Failure, of_program: Failure | None) -> Failure:
    """Return the failure that is named as the cause."""
    return of_program if first.is_of_launcher and of_program is not None else first


def _after_death(event: WorkerExited, failure: Failure, state: Situation) -> Verdict:
    # The first to finish leaves the others in an operation that can't end; that is the cause of their failures.
    before = f"; {state.first_to_finish} was the first to end, with code 0" if state.first_to_finish else ""
    if state.recover is Recover.FAIL:
        return Verdict(Action.FAIL, failure.reason + before, failure.exit_code)
    if event.standing is Standing.JOINING and state.finished:  # it would have found no member
        return after_end(failure.reason, state) or Verdict(Action.CONTINUE, failure.reason)
    own = failure if not event.error and fails_by_itself(event.code) else None
    first = _cause(state.first_failure or failure, state.program_failure or own)
    by_sigterm = exit_code_of(event.code) == 128 + signal.SIGTERM
    terminated = state.terminated if by_sigterm else 0
    if state.members == terminated:
        # If all got the signal at once, a worker with permission to leave would otherwise stay alone, and train on.
        if first != failure:
            before = f"; no worker is left, the first that failed: {first.reason}{before}"
        elif by_sigterm:
            before = f"; no worker is left without a SIGTERM{before}"
        return Verdict(Action.FAIL, failure.reason + before, first.exit_code)
    if state.members - terminated < state.min_size:
        reason = f"{failure.reason}; {would_be_left(state.members - terminated, state.min_size)}"
        return Verdict(Action.FAIL, reason, first.exit_code)
    if state.recover is Recover.REPLACE and not state.finished:  # a joining worker would find no member
        if event.has_ended and not fails_by_itself(event.code):
            reason = f"{failure.reason} after its program had ended; no worker replaces it"
            return Verdict(Action.SHRINK, reason)
        if event.late >= MOST_LATE:  # the next one would be as slow
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
    """Return why no worker may leave, or why the job ends."""
    return f"{counted(left, 'worker')} would be left, -min-np is {min_size}"


def peers_to_start(
    desired: Cluster, present: Collection[PeerID], ended: Collection[PeerID], finishing: bool
) -> list[PeerID]:
    """Return the workers of `desired` that need a process.

    Those are workers that are neither `present` (in the cluster, or joining it) nor `ended`; the next version excludes
    the latter.

    Return none if a member has finished its program (`finishing`): the others are about to, and a joining worker would
    find no member.
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
    """Return what the controller has to write to the store, or None.

    First it writes the newest cluster without the `removed` workers (failed or leaving), then `joining` more in their
    slots.

    Args:
        newest: the newest cluster that this host can run.
        last_version: the newest version in the store; if it is newer than `newest`, the job can't run it.
        living: the members of the committed cluster that live, in the order of their ranks: at least one has to be in
            it, because they have the state.
        is_stale: the store's list of hosts is out of date, whichever workers are there.
    """
    keep = [worker for worker in newest.workers if worker not in removed]
    if not any(worker in living for worker in keep):
        keep = [worker for worker in living if worker not in removed][:1] + keep
    if not any(worker in living for worker in keep):
        return None  # the job is about to fail
    # its writer is the controller, not that version's
    following = replace(newest.following(keep), version=last_version + 1)
    if following.workers != newest.workers or last_version > newest.version or is_stale:
        return following
    return newest.resized(newest.size + joining, ports, slots=slots) if joining else None


def exit_code_of(code: int) -> int:
    """Return the launcher's exit code for a worker's: as in a shell, 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def fails_by_itself(code: int) -> bool:
    """Return whether a worker exited by an error of its program, not by a signal.

    The signal may be its own or a child's, which a shell reports as 128 + n.
    """
    return 0 < code <= 128 or code > 128 + signal.SIGRTMAX


def how_it_ended(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def copies(size: int, seconds: float, ended: bool) -> str:
    """Return the warning that none of `size` workers, started so many seconds ago, has joined the job.

    `ended`: all have exited without an error.
    """
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
    """Describe a bug for the last message: many exceptions have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
