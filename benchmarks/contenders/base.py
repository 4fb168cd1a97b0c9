"""What a contender is."""

from __future__ import annotations

import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Callable, ClassVar

from benchmarks.workload import Task, Workload

REMEDY = 'pip install "ms_kungfu[bench]"'

#: (samples, batch) -> seconds per call of each sample.
Loop = Callable[[int, int], "list[float]"]


class Unsupported(Exception):
    """This contender can't do that (a dtype, an op); the others go on."""


def own_name(names: Mapping[str, str], name: str, library: str) -> str:
    """What the library calls an op or a dtype."""
    if name not in names:
        raise Unsupported(f"{library} has no {name}")
    return names[name]


@dataclass(frozen=True)
class Process:
    """A process to start: its command, what to add to its environment, the descriptors it inherits."""

    command: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()


class Contender(ABC):
    """Class methods belong to the process that the user has started, instances to one rank each."""

    transport: ClassVar[str]
    #: How it may do many tensors: "each" in turn, "flat" as one, or groups of so many bytes ("4M").
    ways: ClassVar[Sequence[str]] = ("each",)
    #: Modules it needs, and what brings them.
    needs: ClassVar[Sequence[str]] = ()
    remedy: ClassVar[str] = REMEDY
    #: Whose time counts in a sample: the slowest rank's, or, where ranks come at times of their own and the clock runs
    #: while one waits for the others, that of the rank which came last and so took least.
    last_to_come_counts: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        del extra
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Where all ranks meet."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """One sentence if it can't run here."""
        absent = [module for module in cls.needs if find_spec(module) is None]
        return f"{' and '.join(absent)} not installed; {cls.remedy}" if absent else None

    @classmethod
    @abstractmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        """What starts its ranks. `folder` is private to this contender and lives as long as it does."""

    @classmethod
    def worker(cls, folder: str, rank: int, size: int, *extra: str) -> list[str]:
        """The command of one rank; `extra` reaches the constructor."""
        own = f"{cls.__module__}:{cls.__qualname__}"
        return [sys.executable, "-m", "benchmarks.worker", own, folder, str(rank), str(size), *extra]

    @abstractmethod
    def measure(self, task: Any) -> dict[str, Any]:
        """Runs one measurement: ``{"samples": seconds of each, "wrong": None or what is wrong}``."""


class CollectiveContender(Contender):
    """Measures collectives over the buffers of a :class:`Workload`."""

    @abstractmethod
    def loop(self, work: Workload) -> Loop:
        """What times the calls. After it the outputs of the sets that were used hold results."""

    def measure(self, task: Task) -> dict[str, Any]:
        work = Workload(task, self.rank, self.size)
        loop = self.loop(work)
        samples, batch, sets = task.samples, task.batch, task.sets
        # Touches every buffer and name once, and wakes what sleeps.
        loop(max(2, -(-sets // batch)), batch)
        work.poison()
        seconds = loop(samples, batch)
        return {"samples": seconds, "wrong": work.verify(min(samples * batch, sets))}


def timed(
    barrier: Callable[[], object],
    call: Callable[[int], object],
    *,
    before: Callable[[], object] = lambda: None,
    finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Loop:
    """The loop for what can only be called from Python.

    `before` each sample isn't timed. A sample is over when `finish` returns, for calls that return too early. `clock`
    is in seconds.
    """

    def loop(samples: int, batch: int) -> list[float]:
        turns = itertools.count()
        seconds = []
        for _ in range(samples):
            before()
            barrier()
            begin = clock()
            for turn in itertools.islice(turns, batch):
                call(turn)
            finish()
            seconds.append((clock() - begin) / batch)
        barrier()  # who is done first leaves the core to the others
        return seconds

    return loop
