"""Track the position of this process in its program, because a joining worker runs the program from the beginning."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic.state import TrainingState


class Training(Protocol):
    """The attributes of `ElasticTraining` that other classes of this package use."""

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
    """An entry of a schedule: a size, and the step at which it is requested."""

    step: int
    size: int


@dataclass
class Told:
    """What `event_log` has to remember about the events that it has logged."""

    pending: Entry | None = None  # the last requested entry, until the cluster has reached its size
    waits: bool = False  # whether training waits until the cluster has reached that size
    reported_failed: tuple[int, dict[int, str]] = (-1, {})  # cluster version, rank -> peer
    deferred: int = 0  # the last prepared cluster version whose deferral was logged
    at_exit: bool = False  # whether an exit handler is registered
    told_passing: bool = False  # whether "call skipped" was logged
    compiled_s: float = 0.0  # how long this process had compiled when the last step ended


@dataclass
class Generators:
    """Which random generators the workers share; see `randomness`. The keys are names in `randomness.NAMES`."""

    origins: dict[str, int] = field(default_factory=dict)  # hashes of the states at this process's first `begin`
    shared: dict[str, bool] = field(default_factory=dict)  # for each generator, the decision whether workers share it
    of_source: dict[str, int] | None = None  # the `origins` of the worker that sent the training state

    def state(self) -> dict[str, Any]:
        return {"origins": dict(self.origins), "shared": dict(self.shared)}

    def receive(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state` of a worker or checkpoint. A checkpoint of an older version has None."""
        self.of_source = None if state is None else state["origins"]
        self.shared.update({} if state is None else state["shared"])

    def is_shared(self, name: str) -> bool:
        """Return whether this worker shares the generator with the worker that sent the training state."""
        same = self.of_source is None or self.of_source.get(name) == self.origins.get(name)
        return self.shared.setdefault(name, same)


@dataclass
class Program:
    """The position of one process in its program, over all its training calls."""

    calls: int = 0  # how many training calls have begun, counted over all ElasticTraining objects
    resume: dict[str, Any] | None = None  # the progress in a received state or checkpoint
    call_of_state: int = 0  # the number of the training call in which a received state was captured
    resuming: bool = False  # whether this process has begun in the middle of a call and hasn't trained yet
    checkpoint_folders: set[str] = field(default_factory=set)  # the checkpoint folders that this process has used
    # Folder -> the training call in which its newest checkpoint was written, if this process hasn't reached that call.
    call_of_checkpoint: dict[str, int] = field(default_factory=dict)
    job: int = 1  # the number of this job in the checkpoint folder; the same on all workers
    # The step of the last checkpoint, until that checkpoint is on the disk; the same on all workers.
    checkpoint: int | None = None
    writes_checkpoint: bool = False  # whether this process writes that checkpoint
    told: Told = field(default_factory=Told)
    generators: Generators = field(default_factory=Generators)


_process = Program()
_current: ContextVar[Program | None] = ContextVar("kungfu_program", default=None)


def current() -> Program:
    return _current.get() or _process


def use(program: Program) -> None:
    """Make `program` the current program in this context, for callers that run several programs in one process."""
    _current.set(program)


def is_behind() -> bool:
    """Return whether this process has received a state from a training call that it hasn't reached yet."""
    program = current()
    return program.calls < max(program.call_of_state, program.resume["call"] if program.resume is not None else 0)


def is_resuming() -> bool:
    """Return whether this process has received a state but hasn't trained since then.

    Such a process hasn't reached the training call in which the state was captured, or has begun in the middle of that
    call.
    """
    return is_behind() or current().resuming


def progress(training: Training) -> dict[str, Any]:
    """Return this process's position in its training as JSON, for another process or a checkpoint."""
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
    """Record the `progress` of another process or of a checkpoint.

    This process continues from that progress, in the training call in which the progress was recorded.
    """
    mine = current()
    mine.resume = progress
    mine.checkpoint = progress.get("checkpoint")  # checkpoints of older versions don't have this entry
    mine.job = progress.get("job", 1)
    mine.generators.receive(progress.get("generators"))
