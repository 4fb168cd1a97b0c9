"""Which cores a worker runs on. MindSpore's threads wait by spinning: workers that share cores slow each other down."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ms_kungfu._processes import descendants, pin_threads

_MAX_PASSES = 10


def allowed_cores() -> list[int]:
    """The cores this process may use, neighbours being hyperthreads of one core, then cores of one package."""
    return sorted(
        os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


@functools.cache
def _topology(cpu: int, what: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{what}").read_text())
    except (OSError, ValueError):
        return 0


def divide(cores: Sequence[int], workers: int) -> list[list[int]]:
    """The share of each of `workers`: contiguous parts that differ by one core at most; one core each, evenly, where
    there are more workers than cores.

    >>> divide([0, 1, 2, 3, 4], 2)
    [[0, 1, 2], [3, 4]]
    >>> divide([0, 1], 3)
    [[0], [1], [0]]
    """
    if workers >= len(cores):
        return [[cores[i % len(cores)]] for i in range(workers)]
    least, more = divmod(len(cores), workers)
    rest = iter(cores)
    return [list(itertools.islice(rest, least + (i < more))) for i in range(workers)]


def spread(cores: Sequence[int], workers: int, each: int) -> list[list[int]]:
    """`each` cores for each of `workers`, as far from each other as there are cores; several workers on a core, evenly,
    where there are too few. No worker has more than there are.

    >>> spread([0, 1, 2, 3, 4, 5], 2, 2)
    [[0, 1], [3, 4]]
    >>> spread([0, 1, 2], 2, 2)
    [[0, 1], [2, 0]]
    >>> spread([0, 1], 2, 1_000_000_000)
    [[0, 1], [0, 1]]
    """
    count = len(cores)
    each = min(each, count)
    first = [i * count // workers if workers * each <= count else i * each for i in range(workers)]
    return [[cores[(begin + k) % count] for k in range(each)] for begin in first]


@dataclass
class Shares:
    """What the workers get of a host's cores."""

    cores: Sequence[int]
    each: int | None  # as many for each worker, whatever the size of the cluster; None: all are divided

    def of(self, workers: int) -> list[list[int]]:
        """That of each of `workers`."""
        return divide(self.cores, workers) if self.each is None else spread(self.cores, workers, self.each)


def pin(pid: int, cores: Iterable[int]) -> None:
    """Moves all threads of a process and of its descendants to `cores`. Threads that end meanwhile don't matter.

    Repeated until a pass finds nothing to move: a thread that has not been moved yet may start others.
    """
    wanted = set(cores)
    for _ in range(_MAX_PASSES):
        moved = [process for process in [pid, *descendants(pid)] if pin_threads(process, wanted)]
        if not moved:
            return
