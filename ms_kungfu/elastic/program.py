"""Track this process's position in its program. A joining worker runs the program from the start."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic.state import TrainingState


class Training(Protocol):
    """The attributes of `ElasticTraining` that its parts use."""

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
    """An entry of a schedule: a size and its step."""

    step: int
    size: int


@dataclass
class Told:
    """What `event_log` needs to remember of the events that it has logged."""

    pending: Entry | None = None  # the last requested entry, if its size hasn't been reached
    waits: bool = False  # whether training waits for that size
    reported_failed: tuple[int, dict[int, str]] = (-1, {})  # cluster version, rank -> peer
    deferred: int = 0  # the last prepared cluster version whose deferral was logged
    at_exit: bool = False
    told_passing: bool = False


@dataclass
class Generators:
    """Which random generators the workers share, by the names of their components; see `randomness`."""

    origins: dict[str, int] = field(default_factory=dict)  # hashes of the states at this process's first `begin`
    shared: dict[str, bool] = field(default_factory=dict)  # for each generator, the decision whether workers share it
    of_source: dict[str, int] | None = None  # the origins of the worker that sent the state

    def state(self) -> dict[str, Any]:
        return {"origins": dict(self.origins), "shared": dict(self.shared)}

    def receive(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state` of a worker or a checkpoint. `state` is None for a checkpoint of an old version."""
        self.of_source = None if state is None else state["origins"]
        self.shared.update({} if state is None else state["shared"])

    def is_shared(self, name: str) -> bool:
        """Return whether this worker shares the generator with the worker that sent the training state."""
        same = self.of_source is None or self.of_source.get(name) == self.origins.get(name)
        return self.shared.setdefault(name, same)


@dataclass
class Program:
    """The position of one process in its program, over all its calls of training."""

    calls: int = 0  # calls of training begun, over all ElasticTraining objects
    resume: dict[str, Any] | None = None  # the progress of a received state or checkpoint
    call_of_state: int = 0  # the number of the later call of training to which a received state belongs
    resuming: bool = False  # whether this process has begun in the middle of a call and hasn't trained yet
    checkpoint_folders: set[str] = field(default_factory=set)  # folders that this process's training uses
    # Folder -> the call of the newest checkpoint, if it is a later call.
    call_of_checkpoint: dict[str, int] = field(default_factory=dict)
    job: int = 1  # number of this job in the checkpoints' folder; equal at all workers
    # The step of the last checkpoint until that checkpoint is on the disk; equal at all workers.
    checkpoint: int | None = None
    writes_checkpoint: bool = False  # whether this process writes that checkpoint
    told: Told = field(default_factory=Told)
    generators: Generators = field(default_factory=Generators)


_process = Program()
_current: ContextVar[Program | None] = ContextVar("kungfu_program", default=None)


def current() -> Program:
    return _current.get() or _process


def use(program: Program) -> None:
    """Make `program` the current program in this context. For callers that run several programs in one process."""
    _current.set(program)


def is_behind() -> bool:
    """Return whether this process hasn't reached the call of training to which its received state belongs."""
    program = current()
    return program.calls < max(program.call_of_state, program.resume["call"] if program.resume is not None else 0)


def is_resuming() -> bool:
    """Return whether this process is behind, or has begun in the middle of a call and hasn't trained yet."""
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
    """Continue from the progress of another process or a checkpoint, in the call to which the progress belongs."""
    mine = current()
    mine.resume = progress
    mine.checkpoint = progress.get("checkpoint")  # files of older versions lack it
    mine.job = progress.get("job", 1)
    mine.generators.receive(progress.get("generators"))
