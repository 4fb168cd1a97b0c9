"""What the launcher does when something happens to a worker or to itself. Pure: an event and a state give a verdict."""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Union

from ms_kungfu.elastic.cluster import Cluster, PeerID

EXIT_TIMEOUT = 124  # as timeout(1) has it


class Standing(enum.Enum):
    """A process's relation to the chosen cluster version."""

    MEMBER = "member"
    JOINING = "joining"  # started for a version that has not been chosen yet
    LEAVING = "leaving"  # a chosen version does not contain it any more


@dataclass(frozen=True)
class WorkerExited:
    """`code` is negative for a signal. `who` names the worker to a person, `error` says why it never ran."""

    who: str
    standing: Standing
    code: int
    error: str = ""


@dataclass(frozen=True)
class Interrupted:
    number: int


@dataclass(frozen=True)
class TimedOut:
    limit_s: float


@dataclass(frozen=True)
class GuardLost:
    """The process that starts and reaps workers is gone, and so are they."""


Event = Union[WorkerExited, Interrupted, TimedOut, GuardLost]


@dataclass(frozen=True)
class JobState:
    """After the event: how many processes are still running."""

    members: int
    leaving: int
    keep: bool


class Decision(enum.Enum):
    CONTINUE = "continue"
    FINISH = "finish"  # everybody is done
    REST = "rest"  # everybody is done, and the job waits for the next cluster (-k)
    FAIL = "fail"  # the job ends with the verdict's exit code


@dataclass(frozen=True)
class Verdict:
    decision: Decision
    reason: str
    exit_code: int = 0
    signal_to_workers: int = signal.SIGTERM


def decide(event: Event, state: JobState) -> Verdict:
    """What to do about `event`, and the sentence that says why. An empty reason is not worth a line."""
    if isinstance(event, Interrupted):
        name = signal_name(event.number)
        return Verdict(Decision.FAIL, f"interrupted by {name}", 128 + event.number, event.number)
    if isinstance(event, TimedOut):
        return Verdict(Decision.FAIL, f"the job was still running after -timeout {event.limit_s:g} s", EXIT_TIMEOUT)
    if isinstance(event, GuardLost):
        return Verdict(Decision.FAIL, "the guard process was killed, and the workers with it", 1)

    if event.code != 0:
        how = event.error or how_it_ended(event.code)
        if event.standing is not Standing.LEAVING:
            return Verdict(Decision.FAIL, f"{event.who} {how}", exit_code_of(event.code))
        # The cluster goes on without it anyway.
        reason = f"{event.who} had left the cluster and then {how}"
    elif event.standing is Standing.JOINING:
        reason = f"{event.who} exited before it joined the cluster; does the program call ms_kungfu.init()?"
    else:
        reason = ""
    if state.members or state.leaving:
        return Verdict(Decision.CONTINUE, reason)
    done = f"{reason}; " if reason else ""
    if state.keep:
        return Verdict(Decision.REST, f"{done}all workers have finished; waiting for the next cluster (-k)")
    return Verdict(Decision.FINISH, f"{done}all workers have finished")


def peers_to_start(wanted: Cluster, present: Collection[PeerID], ending: bool) -> list[PeerID]:
    """The workers of `wanted` that need a process: those that are not `present` in the cluster or on their way into it.

    None when a member has finished its program (`ending`): the rest is about to, and a newcomer would find nobody.
    """
    return [] if ending else [worker for worker in wanted.workers if worker not in present]


def exit_code_of(code: int) -> int:
    """The launcher's exit code for a worker's: as a shell has it, 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def how_it_ended(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
