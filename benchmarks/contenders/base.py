"""The interface of a baseline."""

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
    """This baseline doesn't support that (a dtype, an op); the others continue."""


def own_name(names: Mapping[str, str], name: str, library: str) -> str:
    """Return the library's name of an op or a dtype."""
    if name not in names:
        raise Unsupported(f"{library} has no {name}")
    return names[name]


@dataclass(frozen=True)
class Process:
    """A process to start: its command, additions to its environment, the descriptors that it inherits."""

    command: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()


class Contender(ABC):
    """Class methods belong to the process that the user has started, instances to one rank each."""

    transport: ClassVar[str]
    #: How it may reduce many tensors: "each" in turn, "flat" as one, or groups of so many bytes ("4M").
    ways: ClassVar[Sequence[str]] = ("each",)
    #: Modules it needs, and the packages that contain them.
    needs: ClassVar[Sequence[str]] = ()
    remedy: ClassVar[str] = REMEDY
    #: Whether the rank that comes last, and so waits least, has a sample's time. Otherwise it is the slowest one's.
    #: True if ranks come at times of their own and the clock runs while one waits for the others.
    last_to_come_counts: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        del extra
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Return one sentence if it can't run here."""
        absent = [module for module in cls.needs if find_spec(module) is None]
        return f"{' and '.join(absent)} not installed; {cls.remedy}" if absent else None

    @classmethod
    @abstractmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        """Return the processes of its ranks. `folder` is private to this baseline and lives as long as it does."""

    @classmethod
    def worker(cls, folder: str, rank: int, size: int, *extra: str) -> list[str]:
        """Return the command of one rank; `extra` is passed to the constructor."""
        own = f"{cls.__module__}:{cls.__qualname__}"
        return [sys.executable, "-m", "benchmarks.worker", own, folder, str(rank), str(size), *extra]

    @abstractmethod
    def measure(self, task: Any) -> dict[str, Any]:
        """Run one measurement: ``{"samples": seconds of each, "wrong": None or what is wrong}``."""


class CollectiveContender(Contender):
    """Measures collectives over the buffers of a :class:`Workload`."""

    @abstractmethod
    def loop(self, work: Workload) -> Loop:
        """Return a function that makes the calls and measures their times.

        After it has run, the outputs of each buffer set that it used contain results.
        """

    def measure(self, task: Task) -> dict[str, Any]:
        work = Workload(task, self.rank, self.size)
        loop = self.loop(work)
        samples, batch, sets = task.samples, task.batch, task.sets
        # Touches every buffer and name once, and wakes sleeping threads.
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
    """Time calls that are possible only from Python.

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
        barrier()  # a rank that finishes first leaves the core to the others
        return seconds

    return loop
