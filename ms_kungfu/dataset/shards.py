"""Partition an epoch's steps into shards. All functions are pure. ops_src/shards/step.h explains shards and gradients.

A step of T samples has ``ceil(T / unit)`` shards. Each shard has `unit` samples, except the last shard of the epoch,
which may have fewer. A worker without an assigned shard computes the step's last shard, because each worker must
compute something. That worker's result isn't used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from ms_kungfu.dataset import sharding

Positions = NDArray[np.int64]


def count(length: int, unit: int) -> int:
    """Return the number of shards of a step of `length` samples."""
    return -(-length // unit)


def last_share(length: int, unit: int) -> float:
    """Return the weight of the step's last shard. The other shards have weight 1."""
    return (length - (count(length, unit) - 1) * unit) / unit


def shards_in(share: Iterable[sharding.Range], batch: Iterable[sharding.Range], unit: int) -> list[int]:
    """Return the shards that a worker received in a step, in the order of `share`.

    Raise ValueError if `share` contains only a part of a shard.
    """
    given, step = sharding.positions(share), sharding.positions(batch)
    in_order = np.argsort(step)
    where = in_order[np.searchsorted(step, given, sorter=in_order).clip(max=step.size - 1)]
    found, at = [], 0
    while at < given.size:
        shard = int(where[at]) // unit
        expected = step[shard * unit : (shard + 1) * unit]
        if not np.array_equal(given[at : at + expected.size], expected):
            raise ValueError(given[at])
        found.append(shard)
        at += expected.size
    return found


def deal(
    rest: Positions, global_batch: int, unit: int, drop_remainder: bool, shards_of: Callable[[int], list[int]]
) -> tuple[Positions, Positions]:
    """Return the shards that a worker will compute if nothing changes until the end of the epoch.

    The result is the positions of the worker's shards, one shard after the other, and the length of each shard. `rest`
    contains the unused positions. ``shards_of(n)`` returns the worker's shards of a step with n shards.
    """
    full = sharding.count_full(rest.size, global_batch, drop_remainder, unit)
    per_step = global_batch // unit
    own = shards_of(per_step) or [per_step - 1]
    steps = rest[: full * global_batch].reshape(full, per_step, unit)
    positions = [steps[:, own].ravel()]
    lengths = [np.full(full * len(own), unit, dtype=np.int64)]
    rest = rest[full * global_batch :]
    while length := sharding.step_length(rest.size, global_batch, drop_remainder, unit):
        shards = count(length, unit)
        for shard in shards_of(shards) or [shards - 1]:
            positions.append(rest[shard * unit : min((shard + 1) * unit, length)])
            lengths.append(np.array([positions[-1].size], dtype=np.int64))
        rest = rest[length:]
    return np.concatenate(positions), np.concatenate(lengths)
