"""Compute weights that assign fewer shards to slow workers. The exact results don't depend on the assignment."""

from __future__ import annotations

import numpy as np

from ms_kungfu import _core, membership
from ms_kungfu.agreement import gather_living

_GAIN = 1.1  # new weights must shorten a step by at least this factor, because changing the partition has a cost


def speeds(seconds: dict[int, float], size: int) -> list[int]:
    """Return each rank's speed as an integer. The fastest rank has the speed 1000.

    This function has no side effects.

    `seconds` maps ranks to their seconds per shard. A rank that isn't in `seconds` has the speed 1000.
    """
    least = min(seconds.values())
    return [max(1, round(1000 * least / seconds[rank])) if rank in seconds else 1000 for rank in range(size)]


def longest(shards: int, seconds: dict[int, float], weights: list[int]) -> float:
    """Return how long the slowest worker takes for its shards if the shards are assigned by `weights`.

    This function has no side effects.

    If `weights` is empty, each worker gets about the same number of shards.
    """
    members = sorted(seconds)
    mine = [weights[rank] for rank in members] if weights else []
    return max(len(_core.partition_shards(shards, members, mine, rank)) * seconds[rank] for rank in members)


class StragglerWeights:
    """Measure the time per shard on this worker, and agree with the other workers on the weights for the partition.

    The workers agree in the second, fourth and eighth step of a cluster version, and in every sixteenth step. For this,
    the workers gather 8 bytes per rank. There is no agreement if there is only one worker, or if there are no more
    shards than workers.
    """

    def __init__(self) -> None:
        self._version = -1
        self._steps = 0
        self._seconds = self._shards = 0.0

    def step_end(self, version: int, size: int, shards: int, weights: list[int], counts: bool = True) -> list[int]:
        """Return the weights for the next steps (collective).

        `counts`: whether to count this worker's time in this step. The caller passes False if the step computed a shard
        of a new shape, because the time then includes compiling for that shape.
        """
        if version != self._version:
            self._version, self._steps = version, 0
            self._seconds = self._shards = 0.0
            weights = []  # after a change of the cluster, the ranks may belong to other workers
        self._steps += 1
        seconds, computed = membership.current().core.shard_pace()
        if self._steps > 1 and counts:  # don't count the first step, which has additional work
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
