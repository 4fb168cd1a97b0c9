"""Decide how the launcher reacts to an event. The `Verdict` depends only on the event and the job's state."""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.wire.documents import Failure

MOST_LATE = 2  # after this many successive late joining workers, a slot gets no other worker
EXIT_TIMEOUT = 124  # the same code as timeout(1)
CANT_RUN = 126  # the code of a process that could not be started, as in a shell
FORGOTTEN = "Did you forget KungFuElasticCallback (in a loop: ElasticTraining)?"


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


class WorkerExited(Struct, frozen=True):
    """A worker has exited.

    Args:
        who: the worker's name in messages.
        standing: the worker's relation to the committed cluster version.
        code: the exit code, or -n if signal n ended the worker.
        error: why the launcher killed the worker or couldn't start it.
        logs: the names of the worker's log files; "" without -logdir.
        restarts: how many replacement workers the worker's slot got recently.
        late: how many successive joining workers in this slot weren't ready in time, including this worker.
        has_ended: whether the worker's program had ended before the worker exited.
        key: the key of the worker's process.
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


class WorkerWorksOn(Struct, frozen=True):
    """Cluster version `version` no longer contains a worker, but the worker is still running after -leave-grace."""

    who: str
    version: int
    grace_s: float


@dataclass
class Headcount:
    """The numbers of members, of removed workers still running, and of members that leave because of a SIGTERM.

    These numbers include only workers for which the job waits. The job doesn't wait for workers that were removed
    longer ago than -leave-grace, or for workers that SIGKILL doesn't end.
    """

    members: int = 0
    leaving: int = 0
    terminated: int = 0


@dataclass
class Situation(Headcount):
    """The state of the job after the event: the number of running processes, the options, and earlier failures."""

    recover: Recover = Recover.FAIL
    min_size: int = 1
    max_restarts: int = 0
    first_failure: Failure | None = None  # the first failure that the job has survived
    program_failure: Failure | None = None  # the first failure that a program caused
    finished: bool = False  # whether a member has completed its program
    first_to_finish: str = ""  # the first member that had completed its program before this event


class Action(enum.Enum):
    CONTINUE = "continue"
    FINISH = "finish"  # the job ends, because all workers have finished
    SHRINK = "shrink"  # the other workers continue without this worker
    REPLACE = "replace"  # like SHRINK, and a new worker takes the slot
    FAIL = "fail"  # the job ends with the exit code of the `Verdict`


class Verdict(Struct, frozen=True):
    action: Action
    reason: str
    exit_code: int = 0
    interrupted_by: int | None = None  # a launcher's or worker's signal, which the launchers send to all workers
    failed: int | None = None  # the key of the process whose failure ends the job


def interrupted(number: int, where: str = "") -> Verdict:
    return Verdict(Action.FAIL, f"interrupted by {signal_name(number)}{where}", 128 + number, number)


def timed_out(limit_s: float) -> Verdict:
    return Verdict(Action.FAIL, f"the job was still running after -timeout {limit_s:g} s", EXIT_TIMEOUT)


def not_begun(limit_s: float, why: str) -> str:
    """Return the message for a job that ends because not all hosts have registered within -timeout."""
    return f"the job has not begun within -timeout {limit_s:g} s: {why}"


def host_lost(reason: str, exit_code: int | None = None) -> Verdict:
    """Return the decision to end the job because the other hosts don't continue without the lost host.

    `exit_code`: the exit code of the first worker that exited because the host was lost.
    """
    return Verdict(Action.FAIL, reason, 1 if exit_code is None else exit_code)


def hosts_leave(hosts: str, left: int, min_size: int) -> Verdict:
    """Decide whether `hosts`, whose launchers got a SIGTERM, leave the job. `left` members would stay.

    If too few members would stay, the job ends. A job on one host also ends if too many of its workers get a SIGTERM.
    """
    if left < max(1, min_size):
        return interrupted(signal.SIGTERM, f" on host {hosts}, without which {would_be_left(left, min_size)}")
    return Verdict(Action.CONTINUE, "")


def leaves(who: str, why: str, has_steps: bool, left: int, min_size: int) -> Verdict:
    """Decide whether a worker leaves because of a SIGTERM or a policy of the program. `left` members would stay.

    `has_steps`: whether the worker has begun to train, as far as the controller knows.
    """
    if left < min_size:
        # The worker got permission to leave, but other workers have failed in the meantime.
        return Verdict(Action.CONTINUE, f"{who} stays: {would_be_left(left, min_size)}")
    unknown = f". {FORGOTTEN} It has reported no step, and workers leave only at the end of a step"
    return Verdict(Action.SHRINK, f"{who} is leaving: {why}; the others go on{'' if has_steps else unknown}")


def decide(event: WorkerExited | WorkerWorksOn, state: Situation) -> Verdict:
    """Return how the job reacts to `event`, and the reason. The caller logs the reason if it isn't empty."""
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
        return Verdict(Action.SHRINK, f"{reason}, like {others} recently; it isn't replaced{named}")
    if event.standing is Standing.JOINING and event.code == 0:
        reason = f"{event.who} exited before it joined the cluster; does the program call ms_kungfu.init()?"
        return after_end(reason, state) or Verdict(Action.SHRINK, reason)
    if event.code == 0:
        return after_end("", state) or Verdict(Action.CONTINUE, "")
    if event.standing is Standing.LEAVING:
        # The cluster already continues without this worker.
        reason = f"{event.who} had left the cluster and then {how}"
        return after_end(reason, state) or Verdict(Action.CONTINUE, reason)
    failure = Failure(f"{event.who} {how}", exit_code_of(event.code), key=event.key)
    return _after_death(event, failure, state)


def after_end(reason: str, state: Situation) -> Verdict | None:
    """Return how the job ends if no worker is left; None if a worker is left.

    `reason`: the reason that belongs to the last event, or "".
    """
    if state.members or state.leaving:
        return None
    if state.first_failure is not None and not state.finished:
        # This also applies if the last worker was leaving: the others failed before they could continue without that
        # worker.
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
    """Return the failure to report as the cause. A failure that a program caused takes precedence."""
    return of_program if first.is_of_launcher and of_program is not None else first


def _after_death(event: WorkerExited, failure: Failure, state: Situation) -> Verdict:
    # If one member finishes early, the other members fail, because they wait for that member in an operation that can't
    # end.
    before = f"; {state.first_to_finish} was the first to end, with code 0" if state.first_to_finish else ""
    if state.recover is Recover.FAIL:
        return Verdict(Action.FAIL, failure.reason + before, failure.exit_code, failed=failure.key)
    if event.standing is Standing.JOINING and state.finished:  # the failed worker would find no member to join
        return after_end(failure.reason, state) or Verdict(Action.CONTINUE, failure.reason)
    own = failure if not event.error and fails_by_itself(event.code) else None
    first = _cause(state.first_failure or failure, state.program_failure or own)
    by_sigterm = exit_code_of(event.code) == 128 + signal.SIGTERM
    terminated = state.terminated if by_sigterm else 0
    if state.members == terminated:
        # If all workers get a SIGTERM at once, some get permission to leave. Without this check, the last worker would
        # continue to train alone.
        if first != failure:
            before = f"; no worker is left; the first failure: {first.reason}{before}"
        elif by_sigterm:
            before = f"; all remaining workers got a SIGTERM{before}"
        return Verdict(Action.FAIL, failure.reason + before, first.exit_code, failed=first.key)
    if state.members - terminated < state.min_size:
        reason = f"{failure.reason}; {would_be_left(state.members - terminated, state.min_size)}"
        return Verdict(Action.FAIL, reason, first.exit_code, failed=first.key)
    # After a member has finished, no worker is replaced: the new worker would find no member that it could join.
    if state.recover is Recover.REPLACE and not state.finished:
        if event.has_ended and not fails_by_itself(event.code):
            reason = f"{failure.reason} after its program had ended; no worker replaces it"
            return Verdict(Action.SHRINK, reason)
        if event.late >= MOST_LATE:  # another new worker would probably be just as slow
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
    """Return the reason why no other worker may leave, or why the job ends."""
    return f"only {counted(left, 'worker')} would be left, but -min-np is {min_size}"


def peers_to_start(
    desired: Cluster, present: Collection[PeerID], ended: Collection[PeerID], finishing: bool
) -> list[PeerID]:
    """Return the workers of the `desired` cluster for which a process must be started.

    Args:
        desired: the desired cluster.
        present: the workers that are in the cluster or are joining it; they have a process.
        ended: the workers that have exited. They get no process, because the next cluster version excludes them.
        finishing: whether a member has finished its program. If so, the result is empty: the other members are about
            to finish, too, and a joining worker would find no member.
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

    If workers have to be removed, the result is the newest cluster without these workers. Otherwise it is the newest
    cluster with `joining` additional workers.

    Args:
        newest: the newest cluster that the hosts can run.
        last_version: the newest cluster version in the store. If it is newer than `newest`, the job can't run it.
        removed: the workers that have failed or are leaving.
        living: the living members of the committed cluster, in rank order. The result contains at least one of them,
            because they have the training state.
        joining: how many slots need a new worker.
        ports: the ports that new workers may use.
        slots: the number of slots of each host; None if there is no limit.
        is_stale: whether the store's list of hosts is out of date. If so, a cluster is written even if its workers are
            the same.
    """
    keep = [worker for worker in newest.workers if worker not in removed]
    if not any(worker in living for worker in keep):
        keep = [worker for worker in living if worker not in removed][:1] + keep
    if not any(worker in living for worker in keep):
        return None  # no living member is left, so the job is about to fail
    # The next version's number must follow the newest version in the store, which may be newer than `newest`.
    following = replace(newest.following(keep), version=last_version + 1)
    if following.workers != newest.workers or last_version > newest.version or is_stale:
        return following
    return newest.resized(newest.size + joining, ports, slots=slots) if joining else None


def exit_code_of(code: int) -> int:
    """Return the launcher's exit code for a worker's exit code. As in a shell, it is 128 + n after signal n."""
    return code if code >= 0 else 128 - code


def fails_by_itself(code: int) -> bool:
    """Return whether a worker exited because of an error in its program, and not because of a signal.

    A signal n that ends a child of the worker isn't an error in the program either. A worker that is a shell then exits
    with 128 + n.
    """
    return 0 < code <= 128 or code > 128 + signal.SIGRTMAX


def how_it_ended(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def copies(size: int, seconds: float, ended: bool) -> str:
    """Return the warning that none of `size` workers has joined the job within `seconds` seconds after its start.

    `ended`: whether all workers have exited without an error.
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
    """Describe an exception for the launcher's last message, with its type, because some exceptions have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
