"""Assign fewer shards to slow workers. The results' bits don't depend on the assignment."""

from __future__ import annotations

import numpy as np

from ms_kungfu import _core, membership
from ms_kungfu.agreement import gather_living

_GAIN = 1.1  # a new partition must shorten a step by this factor, because it has a cost


def speeds(seconds: dict[int, float], size: int) -> list[int]:
    """Return each rank's speed as an integer, computed from its seconds per shard. The fastest rank has 1000. Pure.

    A rank without a time has the speed 1000.
    """
    least = min(seconds.values())
    return [max(1, round(1000 * least / seconds[rank])) if rank in seconds else 1000 for rank in range(size)]


def longest(shards: int, seconds: dict[int, float], weights: list[int]) -> float:
    """Return the time at which the last worker finishes a step with these weights ([]: even assignment). Pure."""
    members = sorted(seconds)
    mine = [weights[rank] for rank in members] if weights else []
    return max(len(_core.partition_shards(shards, members, mine, rank)) * seconds[rank] for rank in members)


class StragglerWeights:
    """Measure the time per shard at this worker, and agree with the others on the weights of the partition.

    The workers agree in the second, fourth and eighth step of a cluster version, and in every sixteenth step. The
    agreement gathers 8 bytes per rank. It requires several workers, and more shards than workers.
    """

    def __init__(self) -> None:
        self._version = -1
        self._steps = 0
        self._seconds = self._shards = 0.0

    def step_end(self, version: int, size: int, shards: int, weights: list[int], counts: bool = True) -> list[int]:
        """Return the weights for the next steps; collective.

        `counts`: whether this worker's time consists of computation only. If a shard was the first of its shape, the
        time includes compiling that shape.
        """
        if version != self._version:
            self._version, self._steps = version, 0
            self._seconds = self._shards = 0.0
            weights = []  # the ranks may belong to other workers now
        self._steps += 1
        seconds, computed = membership.current().core.shard_pace()
        if self._steps > 1 and counts:  # the first step has additional work
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
