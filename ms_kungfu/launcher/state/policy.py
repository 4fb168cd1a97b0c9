"""Decide what the launcher does about an event. Pure: an event and a state give a `Verdict`."""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.wire.documents import Failure

MOST_LATE = 2  # the maximum number of consecutive late joining workers in one slot
EXIT_TIMEOUT = 124  # the same code as timeout(1)
CANT_RUN = 126  # the code of a process that could not be started, as in a shell


class Standing(enum.Enum):
    """A process's relation to the committed cluster version."""

    MEMBER = "member"
    JOINING = "joining"  # the process was started for a version that isn't committed yet
    LEAVING = "leaving"  # a committed version no longer contains the process
    STANDBY = "standby"  # a standby, for any slot


class Recover(enum.Enum):
    """The reaction to a failure in watch mode (``-recover``)."""

    SHRINK = "shrink"
    REPLACE = "replace"
    FAIL = "fail"


@dataclass(frozen=True)
class WorkerExited:
    """A worker has exited.

    `code` is negative for a signal. `who` names the worker. `error` says why it could not be started or was killed.
    `logs` names its log files, "" without -logdir. `restarts`: the number of recent replacements in its slot. `late`:
    the number of consecutive joining workers, including this one, that weren't ready to join in that slot in time.
    `has_ended`: its program had ended before. `key`: that of its process.
    """

    who: str
    standing: Standing
    code: int
    error: str = ""
    logs: str = ""
    restarts: int = 0
    late: int = 0
    has_ended: bool = False
    key: int | None = None


@dataclass(frozen=True)
class WorkerWorksOn:
    """A worker left the cluster with `version`, and is still running after -leave-grace."""

    who: str
    version: int
    grace_s: float


@dataclass
class Headcount:
    """Count the members, the removed workers that are still running, and the members that leave because of a SIGTERM.

    Only workers that the job waits for are counted. Workers that were removed longer ago than -leave-grace, and workers
    that SIGKILL doesn't end, aren't counted.
    """

    members: int = 0
    leaving: int = 0
    terminated: int = 0


@dataclass
class Situation(Headcount):
    """The job after the event: the number of running processes, the options, and earlier failures."""

    recover: Recover = Recover.FAIL
    min_size: int = 1
    max_restarts: int = 0
    first_failure: Failure | None = None  # the first failure that the job has survived
    program_failure: Failure | None = None  # the first failure that a program caused
    finished: bool = False  # whether a member has completed its program
    first_to_finish: str = ""  # the first member that did so, before this event


class Action(enum.Enum):
    CONTINUE = "continue"
    FINISH = "finish"  # all workers are done
    SHRINK = "shrink"  # the others continue without the worker
    REPLACE = "replace"  # like SHRINK, and a new worker takes its slot
    FAIL = "fail"  # the job ends with the exit code of the `Verdict`


@dataclass(frozen=True)
class Verdict:
    action: Action
    reason: str
    exit_code: int = 0
    interrupted_by: int | None = None  # a signal to a launcher, which the workers get, too
    failed: int | None = None  # the key of the process whose failure ends the job


def interrupted(number: int, where: str = "") -> Verdict:
    return Verdict(Action.FAIL, f"interrupted by {signal_name(number)}{where}", 128 + number, number)


def timed_out(limit_s: float) -> Verdict:
    return Verdict(Action.FAIL, f"the job was still running after -timeout {limit_s:g} s", EXIT_TIMEOUT)


def not_begun(limit_s: float, why: str) -> str:
    """Return the message for a job that -timeout ends before all hosts have registered."""
    return f"the job has not begun within -timeout {limit_s:g} s: {why}"


def host_lost(reason: str, exit_code: int | None = None) -> Verdict:
    """End the job, because the other hosts don't continue without the lost host.

    `exit_code`: the exit code of the first worker that exited because of the loss.
    """
    return Verdict(Action.FAIL, reason, 1 if exit_code is None else exit_code)


def hosts_leave(hosts: str, left: int, min_size: int) -> Verdict:
    """Decide whether `hosts`, whose launchers got a SIGTERM, leave while `left` members stay.

    If too few members would stay, the job ends. The same happens on one host if too many workers get the signal.
    """
    if left < max(1, min_size):
        return interrupted(signal.SIGTERM, f" on host {hosts}, without which {would_be_left(left, min_size)}")
    return Verdict(Action.CONTINUE, "")


def leaves(who: str, left: int, min_size: int) -> Verdict:
    """Decide whether a worker leaves because of a SIGTERM or a policy of the program. `left` members stay."""
    if left < min_size:
        # The request was granted, but other workers have failed since then.
        return Verdict(Action.CONTINUE, f"{who} stays: {would_be_left(left, min_size)}")
    return Verdict(Action.SHRINK, f"{who} is leaving; the others go on")


def decide(event: WorkerExited | WorkerWorksOn, state: Situation) -> Verdict:
    """Return what to do about `event`, with a reason to log. An empty reason isn't logged."""
    if isinstance(event, WorkerWorksOn):
        reason = (
            f"{event.who} is no longer in cluster version {event.version}, but still running after {event.grace_s:g} s "
            "(-leave-grace); no other worker waits for it, and it is ended when its slot is needed or the job ends"
        )
        return after_end(reason, state) or Verdict(Action.CONTINUE, reason)

    how = event.error or how_it_ended(event.code)
    named = f", see {event.logs}" if event.logs else ""
    if event.standing is Standing.STANDBY:
        reason = f"{event.who} {how} before it was needed"
        if event.restarts < state.max_restarts:
            return Verdict(Action.REPLACE, f"{reason}; another worker is started")
        others = counted(event.restarts, "other")
        return Verdict(Action.SHRINK, f"{reason}, like {others} recently; it was the last{named}")
    if event.standing is Standing.JOINING and event.code == 0:
        reason = f"{event.who} exited before it joined the cluster; does the program call ms_kungfu.init()?"
        return after_end(reason, state) or Verdict(Action.SHRINK, reason)
    if event.code == 0:
        return after_end("", state) or Verdict(Action.CONTINUE, "")
    if event.standing is Standing.LEAVING:
        # The cluster has continued without this worker anyway.
        reason = f"{event.who} had left the cluster and then {how}"
        return after_end(reason, state) or Verdict(Action.CONTINUE, reason)
    failure = Failure(f"{event.who} {how}", exit_code_of(event.code), key=event.key)
    return _after_death(event, failure, state)


def after_end(reason: str, state: Situation) -> Verdict | None:
    """Return how the job ends once no worker is left. `reason`: the reason of the last event, if there is one."""
    if state.members or state.leaving:
        return None
    if state.first_failure is not None and not state.finished:
        # If a leaving worker is the last to exit, the others failed before they could continue without it.
        first = _cause(state.first_failure, state.program_failure)
        reason = f"no worker is left; the first failure: {first.reason}"
        return Verdict(Action.FAIL, reason, first.exit_code, failed=first.key)
    done = f"{reason}; " if reason else ""
    if state.program_failure is not None:
        failed = state.program_failure
        reason = f"{done}the other workers have finished, but {failed.reason}"
        return Verdict(Action.FAIL, reason, failed.exit_code, failed=failed.key)
    return Verdict(Action.FINISH, f"{done}all workers have finished")


def _cause(first: Failure, of_program: Failure | None) -> Failure:
    """Return the failure to report as the cause."""
    return of_program if first.is_of_launcher and of_program is not None else first


def _after_death(event: WorkerExited, failure: Failure, state: Situation) -> Verdict:
    # If one member finishes early, the others wait in an operation that can't end, and fail for that reason.
    before = f"; {state.first_to_finish} was the first to end, with code 0" if state.first_to_finish else ""
    if state.recover is Recover.FAIL:
        return Verdict(Action.FAIL, failure.reason + before, failure.exit_code, failed=failure.key)
    if event.standing is Standing.JOINING and state.finished:  # the joining worker would have found no member
        return after_end(failure.reason, state) or Verdict(Action.CONTINUE, failure.reason)
    own = failure if not event.error and fails_by_itself(event.code) else None
    first = _cause(state.first_failure or failure, state.program_failure or own)
    by_sigterm = exit_code_of(event.code) == 128 + signal.SIGTERM
    terminated = state.terminated if by_sigterm else 0
    if state.members == terminated:
        # Without this check, if all workers got the signal at once, a worker with permission to leave would continue
        # to train alone.
        if first != failure:
            before = f"; no worker is left; the first failure: {first.reason}{before}"
        elif by_sigterm:
            before = f"; no worker is left without a SIGTERM{before}"
        return Verdict(Action.FAIL, failure.reason + before, first.exit_code, failed=first.key)
    if state.members - terminated < state.min_size:
        reason = f"{failure.reason}; {would_be_left(state.members - terminated, state.min_size)}"
        return Verdict(Action.FAIL, reason, first.exit_code, failed=first.key)
    if state.recover is Recover.REPLACE and not state.finished:  # a joining worker would find no member
        if event.has_ended and not fails_by_itself(event.code):
            reason = f"{failure.reason} after its program had ended; no worker replaces it"
            return Verdict(Action.SHRINK, reason)
        if event.late >= MOST_LATE:  # the next worker would be just as slow
            return Verdict(
                Action.SHRINK,
                f"{failure.reason}, like the previous worker in its slot; the others go on without it: raise "
                f"KUNGFU_JOIN_TIMEOUT "
                "above the time that a worker takes to start and compile, then request the size again",
            )
        if event.restarts < state.max_restarts:
            return Verdict(Action.REPLACE, f"{failure.reason}; the others go on, and a new worker is started")
        named = f", see {event.logs}" if event.logs else ""
        return Verdict(
            Action.SHRINK,
            f"{failure.reason}; the others go on without it: its slot was refilled {counted(event.restarts, 'time')} "
            f"recently (-max-restarts {state.max_restarts}){named}",
        )
    return Verdict(Action.SHRINK, f"{failure.reason}; the others go on without it")


def would_be_left(left: int, min_size: int) -> str:
    """Return why no worker may leave, or why the job ends."""
    return f"only {counted(left, 'worker')} would be left, but -min-np is {min_size}"


def peers_to_start(
    desired: Cluster, present: Collection[PeerID], ended: Collection[PeerID], finishing: bool
) -> list[PeerID]:
    """Return the workers of `desired` that need a process.

    These are the workers that are neither `present` (in the cluster or joining it) nor `ended`. The next version
    excludes workers in `ended`.

    If a member has finished its program (`finishing`), the result is empty: the other members are about to finish, and
    a joining worker would find no member.
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
    """Return the cluster that the controller has to write to the store; None if there is nothing to write.

    The first revision is the newest cluster without the `removed` workers (failed or leaving). The next revision adds
    `joining` workers in their slots.

    Args:
        newest: the newest cluster that the hosts can run.
        last_version: the newest version in the store; if it is newer than `newest`, the job can't run it.
        living: the living members of the committed cluster, in rank order. The result contains at least one of them,
            because they have the training state.
        is_stale: true if the store's list of hosts is out of date, even if the workers don't change.
    """
    keep = [worker for worker in newest.workers if worker not in removed]
    if not any(worker in living for worker in keep):
        keep = [worker for worker in living if worker not in removed][:1] + keep
    if not any(worker in living for worker in keep):
        return None  # the job is about to fail
    # the controller writes this version, not the writer of `newest`
    following = replace(newest.following(keep), version=last_version + 1)
    if following.workers != newest.workers or last_version > newest.version or is_stale:
        return following
    return newest.resized(newest.size + joining, ports, slots=slots) if joining else None


def exit_code_of(code: int) -> int:
    """Return the launcher's exit code for a worker's exit code: as in a shell, 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def fails_by_itself(code: int) -> bool:
    """Return whether a worker exited because of an error in its program, not because of a signal.

    A signal to the worker or to one of its children doesn't count; a shell reports a child's signal as 128 + n.
    """
    return 0 < code <= 128 or code > 128 + signal.SIGRTMAX


def how_it_ended(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def copies(size: int, seconds: float, ended: bool) -> str:
    """Return the warning that none of `size` workers has joined the job within `seconds` seconds after their start.

    `ended`: true if all workers have exited without an error.
    """
    causes = (
        "Usual causes: the program doesn't use ms_kungfu (a program for msrun needs --msrun); its environment was "
        "cleared (env -i, sudo, a container); it runs in another Python, without ms_kungfu"
    )
    none = f"none of the {size} workers has joined the job within {seconds:.0f} s"
    if ended:
        return f"{none}, and all have ended: if they have trained, each has trained a separate model. {causes}"
    return (
        f"{none}. If the program is still preparing (for example, it downloads data or lists a data set), "
        f"ignore this line; otherwise each worker trains a separate model. {causes}"
    )


def bug(error: BaseException) -> str:
    """Describe an exception for the last message. Many exceptions have no text, so the type is included."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
