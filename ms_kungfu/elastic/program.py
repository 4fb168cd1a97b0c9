"""This process's position in its program: a joining worker runs it from the start, the others are in its middle."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic.state import TrainingState


class Training(Protocol):
    """The parts of an `ElasticTraining`'s view of it."""

    step: int
    first_step: int
    epoch: int
    should_stop: bool
    asynchronous: bool
    optimizers: list[Any]

    @property
    def dataset(self) -> Shares | None: ...
    @property
    def training_state(self) -> TrainingState: ...


@dataclass
class Entry:
    """An entry of a schedule."""

    step: int
    size: int


@dataclass
class Told:
    """What `event_log` has logged."""

    pending: Entry | None = None  # not reached yet
    waits: bool = False  # training does, for that
    reported_failed: tuple[int, dict[int, str]] = (-1, {})  # cluster version, rank -> peer
    at_exit: bool = False
    told_passing: bool = False


@dataclass
class Generators:
    """What is known of the workers' random generators, by their components' names; `randomness` says why."""

    origins: dict[str, int] = field(default_factory=dict)  # numbers of their states at this process's first `begin`
    shared: dict[str, bool] = field(default_factory=dict)  # decided: whether all workers have the same
    of_source: dict[str, int] | None = None  # the origins of the worker that this one's state is from

    def state(self) -> dict[str, Any]:
        return {"origins": dict(self.origins), "shared": dict(self.shared)}

    def receive(self, state: dict[str, Any] | None) -> None:
        """Take over the knowledge of a worker with the training state, or of a checkpoint; None: it is too old."""
        self.of_source = None if state is None else state["origins"]
        self.shared.update({} if state is None else state["shared"])

    def is_shared(self, name: str) -> bool:
        """Return whether a worker with another one's state shares this generator."""
        same = self.of_source is None or self.of_source.get(name) == self.origins.get(name)
        return self.shared.setdefault(name, same)


@dataclass
class Program:
    """The program of one process, over all its trainings."""

    calls: int = 0  # trainings begun, over all ElasticTraining objects
    resume: dict[str, Any] | None = None  # the progress a joining worker received, or a checkpoint had
    call_of_state: int = 0  # the call of a received state, for which this process is too early
    resuming: bool = False  # a joining worker has begun at the others' position and hasn't trained yet
    checkpoint_folders: set[str] = field(default_factory=set)  # those with the content of this process's training
    call_of_checkpoint: dict[str, int] = field(default_factory=dict)  # by folder: the newest one's, if later
    job: int = 1  # number among the jobs that have used the checkpoints' folder; the same everywhere
    checkpoint: int | None = None  # the step of the last one, until it is known to be on the disk; the same everywhere
    writes_checkpoint: bool = False  # and this process writes it
    told: Told = field(default_factory=Told)
    generators: Generators = field(default_factory=Generators)


_process = Program()
_current: ContextVar[Program | None] = ContextVar("kungfu_program", default=None)


def current() -> Program:
    return _current.get() or _process


def use(program: Program) -> None:
    """Make this the process's program in this context; for callers that run several in one process."""
    _current.set(program)


def is_behind() -> bool:
    """Return whether this process joined, or resumed, and hasn't reached the call of training that the state is of."""
    program = current()
    return program.calls < max(program.call_of_state, program.resume["call"] if program.resume is not None else 0)


def is_resuming() -> bool:
    """Return whether this process is behind, or has just begun in the middle of a call that the others began before."""
    return is_behind() or current().resuming


def progress(training: Training) -> dict[str, Any]:
    """Return this process's position in a training as JSON, for another process or a checkpoint."""
    mine = current()
    return {
        "step": training.step,
        "first_step": training.first_step,
        "epoch": training.epoch,
        "checkpoint": mine.checkpoint,
        "job": mine.job,
        "generators": mine.generators.state(),
    }


def resume(progress: dict[str, Any]) -> None:
    """Continue from another process's progress, or a checkpoint's, in the call of training that it is of."""
    mine = current()
    mine.resume = progress
    mine.checkpoint = progress.get("checkpoint")  # not in files of older versions
    mine.job = progress.get("job", 1)
    mine.generators.receive(progress.get("generators"))
