"""Choose the number of shards for ``ElasticDataset(shards="auto")``. All functions are pure.

Shards make failures and resizes cheap, but have two costs (docs/shards-details.md): a worker with shards can use only
one core, and each further shard of a worker takes about as long as a small step. So `choose` returns a number of shards
only if each worker has less than two cores at the largest planned size, and at most two shards at the smallest.
"""

from __future__ import annotations

from collections.abc import Collection

# With two shards per worker, a step takes at most 1.8 times as long as without shards. With four, it may take 2.4 times
# as long (docs/shards-details.md#measured-cost).
_MOST_PER_WORKER = 2


def smallest(global_batch: int, workers: int) -> int | None:
    """Return the smallest number of shards with at least one shard per worker; None if the batch has too few samples.

    >>> smallest(32, 3), smallest(30, 4), smallest(3, 4)
    (4, 5, None)
    """
    return next((n for n in range(workers, global_batch + 1) if global_batch % n == 0), None)


def choose(global_batch: int, sizes: Collection[int], cores: int) -> tuple[int | None, str]:
    """Return the number of shards and ""; or None and the reason why shards would make training slow.

    Args:
        global_batch: number of samples in a step.
        sizes: the cluster sizes that are planned.
        cores: the number of cores of all workers together.

    >>> choose(32, [2, 4], 2)
    (4, '')
    """
    largest, least = max(sizes), min(sizes)
    if cores >= 2 * largest:
        return None, f"{_each_of(largest)} would use 1 of its {cores // largest} cores"
    shards = smallest(global_batch, largest)
    if shards is None:
        return None, f"a batch of {global_batch} has fewer samples than the {largest} workers need"
    each = -(-shards // least)
    if each > _MOST_PER_WORKER:
        return None, f"{_each_of(least)} would have {each} shards per step, and the limit is {_MOST_PER_WORKER}"
    return shards, ""


def more(global_batch: int, shards: int, workers: int) -> int:
    """Return how many shards to use for a number of workers that wasn't planned: `shards` or more.

    If the batch can be divided that way, each worker has one or two shards. Otherwise, some workers
    have none.

    >>> more(32, 4, 3), more(32, 4, 5), more(4, 2, 6), more(31, 1, 3)
    (4, 8, 4, 1)
    """
    if workers <= shards:
        return shards
    enough = smallest(global_batch, workers)
    if enough is not None and enough <= _MOST_PER_WORKER * workers:
        return enough
    return max(shards, *(n for n in range(1, workers) if global_batch % n == 0))


def _each_of(workers: int) -> str:
    return "1 worker" if workers == 1 else f"each of {workers} workers"
