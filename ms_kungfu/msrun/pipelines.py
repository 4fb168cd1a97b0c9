"""Convert a dataset that a program has sharded for V ranks to a dataset that contains all samples."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import mindspore.dataset as ds

from ms_kungfu.dataset import ElasticDataset, pipelines, sharding
from ms_kungfu.dataset.batches import Batches
from ms_kungfu.msrun import rank_batches, world
from ms_kungfu.msrun.communication import refused
from ms_kungfu.msrun.gradient_search import names_in

# A function that is applied to batches may read a rank from a parameter or a function with one of these names.
_RANKS = {"rank", "rank_id", "local_rank", "shard_id", "device_id", "get_rank", "get_local_rank"}


def shards_of(dataset: Any) -> int | None:
    """Return the number of ranks over which a dataset is sharded; None if it has one shard or no sharding sampler."""
    while not isinstance(dataset, ElasticDataset) and len(dataset.children) == 1:
        dataset = dataset.children[0]
    sampler = getattr(dataset, "sampler", None)
    if not isinstance(sampler, ds.DistributedSampler) or sampler.num_shards == 1 != world.size():
        return None
    return int(sampler.num_shards)


def take_apart(dataset: ds.Dataset, use: str = "training") -> pipelines.Pipeline:
    """Separate a dataset into its samples and settings. The dataset itself isn't changed.

    Raises:
        RuntimeError: the dataset can't be partitioned again. The message names the reason.
    """
    try:
        parts = pipelines.take_apart(dataset)
    except (TypeError, ValueError) as error:
        raise refused(f"{use} on this dataset", str(error)) from error
    if isinstance(parts.drawn_from, sharding.Drawing):
        raise refused(
            f"{use} on a dataset with a WeightedRandomSampler",
            "each rank would draw different samples; without --msrun, an ElasticDataset over this dataset "
            "draws the samples for all workers",
        )
    shards = shards_of(dataset)
    if shards != world.size():
        seen = "trained once per epoch" if use == "training" else "seen once"
        raise refused(
            f"{use} on a dataset {'that is not sharded' if shards is None else f'in {shards} shards'}",
            f"give the dataset num_shards=get_group_size(), which is {world.size()}, and shard_id=get_rank(): each "
            f"sample is then {seen}, with any number of workers; samples that a program selects by its "
            "rank can't be partitioned again",
        )
    if parts.batch_size is None:
        raise refused(f"{use} on a dataset without batch()", "call batch(), because a step needs one batch per rank")
    for node in pipelines.nodes_of(parts.samples):
        name = _rank_in(getattr(node, "per_batch_map", None))
        if name is not None:
            raise refused(
                f"batch(per_batch_map=...) with a function that uses {name!r}",
                "any worker may process a batch, so the result must not depend on the rank",
            )
    return parts


def _rank_in(function: Any) -> str | None:
    """Return the name of the parameter or function through which `function` gets a rank; None if there is none."""
    while isinstance(function, functools.partial):
        named = _RANKS & set(function.keywords)
        if named:
            return min(named)
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
    named = _RANKS & set(names_in(code)) if code is not None else set()
    return min(named, default=None)


def whole(dataset: ds.Dataset) -> ds.Dataset:
    """Return a dataset for an evaluation, which yields all samples on each worker, in batches of the program's size."""
    parts = take_apart(dataset, "evaluation")
    assert parts.batch_size is not None
    return pipelines.batched(parts.samples, parts.batch_size)


class _BatchesOfRanks(Batches):
    """An iterator that passes the tensors of its batches to `rank_batches`."""

    def _first(self, step: sharding.Step) -> Any:
        batch = super()._first(step)
        rank_batches.hand_out(batch)
        return batch


class OfRanks(ElasticDataset):
    """A dataset whose steps are divided among the virtual ranks. A worker receives its virtual ranks' batches."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._cursor.ranks = world.size()

    def _batches(self, *arguments: Any) -> Batches:
        return _BatchesOfRanks(self, self._source, *arguments)

    def _take(self) -> sharding.Step | None:
        step = super()._take()
        if step is not None:
            rank = self._dealing.dealt.rank
            rank_batches.begin(step.parts(rank) or [1], step.members)
        return step

    def commit(self, participants: Sequence[int] | None = None) -> int:
        if self._cursor.taken:
            rank_batches.end()
        return super().commit(participants)


_elastic: weakref.WeakKeyDictionary[ds.Dataset, dict[bool, ElasticDataset]] = weakref.WeakKeyDictionary()


def elastic(dataset: ds.Dataset, by_shards: bool) -> ElasticDataset:
    """Return a dataset that partitions all samples among the workers, in steps of V times the program's batch size.

    For the same `dataset`, each call returns the same object. So if the program trains with the dataset a second time,
    training continues with the next epoch.
    """
    made = _elastic.setdefault(dataset, {})
    if by_shards not in made:
        parts = take_apart(dataset)
        assert parts.batch_size is not None
        made[by_shards] = (ElasticDataset if by_shards else OfRanks)(
            dataset,
            global_batch_size=parts.batch_size * world.size(),
            shuffle=parts.shuffles,
            shards=world.size() if by_shards else None,
            # MindSpore's own operations augment a sample with new random numbers each time the sample is read.
            shards_check="warn" if by_shards else "raise",
        )
    return made[by_shards]
