"""The numbers of samples in one worker's batches, at other cluster sizes and after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ms_kungfu.dataset import sharding


def share(batch: int, place: int, workers: int) -> int:
    """Return how many of a step's `batch` samples worker number `place` of `workers` workers gets."""
    return max(sharding.count([sharding.block(batch, place, workers)]), 1)  # a worker without samples repeats a sample


def after_a_failure(settings: Mapping[str, Any], batch: int, rank: int, size: int) -> list[int]:
    """Return the possible sizes of the share of `rank` in a step after another of `size` workers has failed.

    `settings`: the dataset's `same_at_all`. `batch`: the number of samples in a full step of all workers.
    """
    lengths = [batch, *_lengths_after_a_failure(settings, batch, size)]
    places = [place for place in (rank, rank - 1) if 0 <= place < size - 1]
    return [share(length, place, size - 1) for length in lengths for place in places]


def _lengths_after_a_failure(settings: Mapping[str, Any], batch: int, size: int) -> list[int]:
    """Return the sizes of the steps that are smaller than `batch` after one of `size` workers has failed.

    Such steps are at the end of an epoch. If the failed worker hadn't completed its last step, that worker's samples of
    the step are used at the end of the same epoch. Later epochs have no such samples.
    """
    found = []
    for more in (share(batch, 0, size), share(batch, size - 1, size), 0):
        left = 2 * batch + (settings["samples"] + more) % batch  # all earlier steps are full
        while length := sharding.step_length(left, batch, settings["drop_remainder"]):
            left -= length
            found += [length] if length < batch else []
    return found
