"""Assign fewer shards to slow workers. The bits don't depend on that."""

from __future__ import annotations

import numpy as np

from ms_kungfu import _core, membership
from ms_kungfu.agreement import gather_living

_GAIN = 1.1  # factor by which a step has to become shorter, for the cost of a new partition


def speeds(seconds: dict[int, float], size: int) -> list[int]:
    """Return the ranks' speeds, from the seconds that a shard takes each: integers of which the fastest has 1000. Pure.

    Ranks without a time have 1000, too.
    """
    least = min(seconds.values())
    return [max(1, round(1000 * least / seconds[rank])) if rank in seconds else 1000 for rank in range(size)]


def longest(shards: int, seconds: dict[int, float], weights: list[int]) -> float:
    """Return the time of the last worker to finish, in a step assigned by these weights (none: evenly). Pure."""
    members = sorted(seconds)
    mine = [weights[rank] for rank in members] if weights else []
    return max(len(_core.partition_shards(shards, members, mine, rank)) * seconds[rank] for rank in members)


class StragglerWeights:
    """Measure a shard's time at this worker, and agree with the others on the partition.

    They do so in the second, fourth and eighth step of a cluster version, and in every sixteenth. It is a gather of 8
    bytes a rank, and needs several workers and shards to spare.
    """

    def __init__(self) -> None:
        self._version = -1
        self._steps = 0
        self._seconds = self._shards = 0.0

    def step_end(self, version: int, size: int, shards: int, weights: list[int], counts: bool = True) -> list[int]:
        """Return the weights of the next steps; collective.

        `counts`: whether this worker's time is that of computing. It isn't if a shard was the first of its shape, for
        which something was compiled.
        """
        if version != self._version:
            self._version, self._steps = version, 0
            self._seconds = self._shards = 0.0
            weights = []  # of ranks that may be others now
        self._steps += 1
        seconds, computed = membership.current().core.shard_pace()
        if self._steps > 1 and counts:  # the first has more to do
            self._seconds, self._shards = self._seconds + seconds, self._shards + computed
        if size == 1 or shards <= size or (self._steps not in (2, 4, 8) and self._steps % 16):
            return weights
        mine = self._seconds / self._shards if self._shards else 0.0
        self._seconds = self._shards = 0.0
        known = {rank: float(row[0]) for rank, row in gather_living(np.array([mine]), "kungfu/shards/pace").items()}
        if min(known.values()) <= 0:
            return weights
        proposed = speeds(known, size)
        now, then = longest(shards, known, weights), longest(shards, known, proposed)
        return proposed if then * _GAIN < now else weights
