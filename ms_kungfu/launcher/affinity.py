"""Choose the cores that each worker runs on.

MindSpore's threads wait by spinning, so workers that share cores slow each other down.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from ms_kungfu._processes import descendants, pin_threads
from ms_kungfu.launcher.quota import cpu_quota, within_quota

_MAX_PASSES = 10


def allowed_cores() -> list[int]:
    """Return the cores that this process may use, sorted by package, then by physical core (hyperthreads adjacent)."""
    return sorted(
        os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


def core_count() -> int:
    """Return how many cores a job may keep busy on this host: the number of allowed cores, limited by the CPU quota."""
    return within_quota(len(allowed_cores()), cpu_quota())


@functools.cache
def _topology(cpu: int, what: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{what}").read_text())
    except (OSError, ValueError):
        return 0


def divide(cores: Sequence[int], workers: int) -> list[list[int]]:
    """Divide the cores among the workers. Return each worker's share.

    Shares are contiguous, and their sizes differ by at most one core. If there are more workers than cores, each worker
    gets one core, and each core is used by about the same number of workers.

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
    """Give each worker `each` cores. Return each worker's share. Shares are as far apart as possible.

    If there are too few cores, workers share them evenly. If `each` is larger than the number of cores, each worker
    gets all cores.

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


class Shares(Struct):
    """The workers' shares of a host's cores."""

    cores: Sequence[int]
    each: int | None  # the fixed number of cores per worker, or None to divide all cores among the workers
    taken: Collection[int] = ()  # the cores on which other jobs run

    def of(self, workers: int) -> list[list[int]]:
        """Return the share of each of `workers` workers.

        If there are enough free cores, the shares contain only free cores. If there are too few and `each` is None,
        all cores are divided among the workers. If `each` is set, the workers use the free cores, and then as many
        taken cores as they still need.

        >>> Shares([0, 1, 2, 3], 1, taken=[0]).of(2)
        [[1], [2]]
        >>> Shares([0, 1, 2, 3], 1, taken=[0, 2]).of(3)
        [[1], [3], [0]]
        """
        free = [core for core in self.cores if core not in self.taken]
        needed = workers * (self.each or 1)
        if self.each is None:
            return divide(free if needed <= len(free) else self.cores, workers)
        others = [core for core in self.cores if core in self.taken]
        return spread([*free, *others][: max(needed, len(free))], workers, self.each)


def pin(pid: int, cores: Iterable[int]) -> None:
    """Move all threads of a process and of its descendants to `cores`. Ignore threads that end in the meantime.

    Repeat this until no thread has to be moved, because a thread that hasn't been moved yet may start other threads.
    """
    wanted = set(cores)
    for _ in range(_MAX_PASSES):
        moved = [process for process in [pid, *descendants(pid)] if pin_threads(process, wanted)]
        if not moved:
            return
