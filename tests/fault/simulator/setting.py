"""What a course of events consists of: a job as it starts, what happens to it, how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from ms_kungfu.launcher.state.policy import Recover

JOIN_TIMEOUT_S = 15.0
COLLECTIVE_TIMEOUT_S = 20.0
PEER_TIMEOUT_S = 1.0
LOOP_TIMEOUT_S = 30.0  # of a collective, where a worker loops for ever
UNANSWERED_KILL_S = 10.0  # of launcher.controller.workers
MAX_WORKERS = 8  # a segment has no room for more
PORTS = range(10000, 10100)


class Violation(BaseException):
    """The protocol has broken a promise. No Exception: a launcher catches those that a message from another host leads
    to, and goes on without that host."""


@dataclass(frozen=True)
class Happening:
    """Something that is done to the job at a time."""

    at: float
    kind: str
    who: int = 0
    more: float = 0.0
    place: str = ""  # of "kill at" and "stop at": the worker of rank `who` (from 8: any worker) that comes there next
    term: int = 0  # `at` counts from when a host takes the lease for so many times; 0: from the beginning

    def __str__(self):
        more = f" ({self.more:g})" if self.more else ""
        behind = f" after seat {self.term} is taken" if self.term else ""
        return f"{self.at:.3f} s{behind}: {self.kind} {self.who}{more}" + (f" {self.place!r}" if self.place else "")


@dataclass(frozen=True)
class Setup:
    """A job as it starts."""

    size: int = 2
    recover: Recover = Recover.SHRINK
    standbys: int = 0
    external: bool = False  # a config server of its own, which may go away
    min_size: int = 1
    max_restarts: int = 10
    schedule: tuple[tuple[int, int], ...] = ()
    wait: bool = False
    asynchronous: bool = False
    samples: int = 24
    global_batch: int = 6
    step_s: float = 0.03
    prepare_s: float = 0.5
    groups: tuple[str, ...] = ("grad/0", "grad/1")
    checkpoint_every: int | None = None
    resume: bool = False
    epochs_a_call: int | None = None  # of training; None: one call
    reductions: int = 1  # of a step, with an update behind each
    shards: int | None = None  # of which a step is a deal
    sums: int = 1  # ShardedSteps that are made with each batch
    resharded: tuple[tuple[int, int, int], ...] = ()  # after which step a policy wants which global batch and shards
    grown: tuple[tuple[int, int], ...] = ()  # after which step a policy wants which size, each worker with its batch
    uneven: bool = False  # some workers are slower than others
    seed: int = 0  # of the data's order, where a step is a deal of shards; likewise
    drop_remainder: bool = False
    leavers_stay_s: float = 0.0  # a worker that has left the cluster does something at its program's end
    processes: float = float("inf")  # of which the machine has memory


@dataclass
class Outcome:
    """How the job ended."""

    exit_code: int
    reason: str
    steps: int
    deaths: int
    seconds: float
    told: list[str] = field(default_factory=list)
