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

#: Maps (samples, batch) to the seconds per call in each sample.
Loop = Callable[[int, int], "list[float]"]


class Unsupported(Exception):
    """The baseline doesn't support a dtype or an op of the task. The other baselines continue."""


def own_name(names: Mapping[str, str], name: str, library: str) -> str:
    """Return the library's name of an op or a dtype."""
    if name not in names:
        raise Unsupported(f"{library} has no {name}")
    return names[name]


@dataclass(frozen=True)
class Process:
    """A process to start: its command, additions to its environment, and the file descriptors that it inherits."""

    command: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()


class Contender(ABC):
    """A baseline. The main process calls the class methods; each rank has an instance."""

    transport: ClassVar[str]
    #: How to group many tensors: "each" separately, "flat" as one, or groups of a number of bytes ("4M").
    ways: ClassVar[Sequence[str]] = ("each",)
    #: The modules that the baseline needs, and the packages that contain them.
    needs: ClassVar[Sequence[str]] = ()
    remedy: ClassVar[str] = REMEDY
    #: Whether a sample's time is that of the last rank to arrive, which waits least; if not, it is the slowest rank's.
    #: True if ranks arrive at different times and a rank's clock includes its wait for the others.
    last_to_come_counts: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        del extra
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Return the reason if the baseline can't run here, else None."""
        absent = [module for module in cls.needs if find_spec(module) is None]
        return f"{' and '.join(absent)} not installed; {cls.remedy}" if absent else None

    @classmethod
    @abstractmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        """Return the processes of the ranks. `folder` is private to this baseline and exists until its end."""

    @classmethod
    def worker(cls, folder: str, rank: int, size: int, *extra: str) -> list[str]:
        """Return the command of one rank; `extra` is passed to the constructor."""
        own = f"{cls.__module__}:{cls.__qualname__}"
        return [sys.executable, "-m", "benchmarks.worker", own, folder, str(rank), str(size), *extra]

    @abstractmethod
    def measure(self, task: Any) -> dict[str, Any]:
        """Run one measurement. Return ``{"samples": seconds of each, "wrong": None or an error}``."""


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
        # Warm up: touch every buffer and name once, and wake sleeping threads.
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

    `before` is called before each sample, and isn't timed. `finish` ends a sample, for calls that return before their
    work is done. `clock` is in seconds.
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
        barrier()  # a rank that finishes first leaves its core to the others
        return seconds

    return loop
