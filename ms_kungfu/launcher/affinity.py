"""Which cores a worker runs on. MindSpore's threads wait by spinning: workers that share cores slow each other down."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ms_kungfu._processes import descendants

_MAX_PASSES = 10


def allowed_cores() -> list[int]:
    """The cores this process may use, neighbours being hyperthreads of one core, then cores of one package."""
    return sorted(
        os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


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


def pin(pid: int, cores: Iterable[int]) -> None:
    """Moves all threads of a process and of its descendants to `cores`. Threads that end meanwhile don't matter.

    Repeated until a pass finds nothing to move: a thread that has not been moved yet may start others.
    """
    wanted = set(cores)
    for _ in range(_MAX_PASSES):
        moved = False
        for process in [pid, *descendants(pid)]:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{process}/task").iterdir():
                    with contextlib.suppress(OSError):
                        if os.sched_getaffinity(int(task.name)) != wanted:
                            os.sched_setaffinity(int(task.name), wanted)
                            moved = True
        if not moved:
            return
