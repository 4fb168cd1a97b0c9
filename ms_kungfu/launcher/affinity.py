"""Which cores a worker runs on. MindSpore's threads wait by spinning: workers that share cores slow each other down."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    shares, begin = [], 0
    for i in range(workers):
        end = begin + least + (i < more)
        shares.append(list(cores[begin:end]))
        begin = end
    return shares


def pin(pid: int, cores: Iterable[int]) -> None:
    """Moves all threads of a process and of its descendants to `cores`. Threads that end meanwhile don't matter.

    Repeated until a pass finds nothing to move: a thread that has not been moved yet may start others.
    """
    wanted = set(cores)
    for _ in range(_MAX_PASSES):
        moved = False
        pending, seen = [pid], {pid}
        while pending:
            task = Path(f"/proc/{pending.pop()}/task")
            try:
                threads = [int(entry.name) for entry in task.iterdir()]
            except OSError:
                continue
            for thread in threads:
                with contextlib.suppress(OSError):
                    if os.sched_getaffinity(thread) != wanted:
                        os.sched_setaffinity(thread, wanted)
                        moved = True
                with contextlib.suppress(OSError):
                    for child in map(int, (task / str(thread) / "children").read_text().split()):
                        if child not in seen:
                            seen.add(child)
                            pending.append(child)
        if not moved:
            return
