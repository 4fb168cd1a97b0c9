"""A dataset that a program has sharded for V ranks, as one of all samples."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import mindspore.dataset as ds
from mindspore.dataset.engine.datasets import (
    BatchDataset,
    MapDataset,
    ProjectDataset,
    RenameDataset,
    RepeatDataset,
    ShuffleDataset,
)

from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.msrun import world
from ms_kungfu.msrun.communication import refused

_KEEPS_SAMPLES = (MapDataset, RenameDataset, ProjectDataset)


@dataclass(frozen=True)
class Sharded:
    """A pipeline, taken apart. `samples` is not batched, and not sharded."""

    samples: ds.Dataset
    total: int
    batch_size: int
    drop_remainder: bool
    shuffle: bool
    passes: int


def _leaf(dataset: Any) -> Any:
    while not isinstance(dataset, ElasticDataset) and len(dataset.children) == 1:
        dataset = dataset.children[0]
    return dataset


def shards_of(dataset: Any) -> int | None:
    """For how many ranks the program has sharded it; None where it hasn't, or not by a sampler."""
    sampler = getattr(_leaf(dataset), "sampler", None)
    return int(sampler.num_shards) if isinstance(sampler, ds.DistributedSampler) else None


def take_apart(dataset: ds.Dataset) -> Sharded:
    """RuntimeError that names what in it can't be dealt to another number of workers. `dataset` stays as it is."""
    shards = shards_of(dataset)
    if shards is None and getattr(_leaf(dataset), "num_shards", None) not in (None, 1):
        raise refused(
            f"training on a sharded {type(_leaf(dataset)).__name__}",
            "its samples can't be chosen by their numbers, so they can't be dealt anew",
        )
    if shards != world.size():
        raise refused(
            f"training on a dataset {'that is not sharded' if shards is None else f'in {shards} shards'}",
            f"give it num_shards=get_group_size(), which is {world.size()}, and shard_id=get_rank(): each sample is "
            "trained once an epoch, whoever lives; what a program picks by its rank itself can't be dealt anew",
        )
    nodes = [copy.deepcopy(dataset)]
    while nodes[-1].children:
        nodes.append(nodes[-1].children[0])
    *above, leaf = nodes
    batch: Any = None
    kept, passes, shuffle = [], 1, False
    for node in above:
        kind = type(node).__name__
        if isinstance(node, RepeatDataset) and batch is None:
            passes *= max(node.count, 1)
        elif isinstance(node, ShuffleDataset):
            shuffle = True
        elif isinstance(node, BatchDataset) and batch is None:
            _check_batch(node)
            batch = node
        elif isinstance(node, _KEEPS_SAMPLES) and batch is not None:
            kept.append(node)
        elif isinstance(node, _KEEPS_SAMPLES):
            raise refused(f"a {kind} behind batch()", "batches are cut anew for the workers; map samples, before it")
        else:
            raise refused(f"a {kind} in a sharded dataset", "it changes which samples, or batches, there are")
    if batch is None:
        raise refused("training on a dataset without batch()", "the batch of a rank times V is that of a step")
    kept.append(leaf)
    kept[0].parent = []
    for parent, child in zip(kept, kept[1:]):
        parent.children, child.parent = [child], [weakref.ref(parent)]
    sampler = leaf.sampler
    leaf.use_sampler(ds.SequentialSampler())
    total = int(leaf.get_dataset_size())
    if sampler.num_samples is not None:
        total = min(total, sampler.num_samples * sampler.num_shards)
    return Sharded(kept[0], total, batch.batch_size, batch.drop_remainder, shuffle or sampler.shuffle, passes)


def _check_batch(node: Any) -> None:
    if node.batch_size_func is not None:
        raise refused("batch() with a function of the size", "a step takes the batch of a rank times V; give a number")
    if node.per_batch_map is not None:
        raise refused("batch(per_batch_map=...)", "batches are cut anew for the workers; map samples, before it")


def whole(dataset: ds.Dataset) -> ds.Dataset:
    """All samples, each once, in the program's batches, the same at every worker: for an evaluation."""
    parts = take_apart(dataset)
    return parts.samples.batch(parts.batch_size)


_elastic: weakref.WeakKeyDictionary[ds.Dataset, dict[bool, ElasticDataset]] = weakref.WeakKeyDictionary()


def elastic(dataset: ds.Dataset, by_shards: bool) -> ElasticDataset:
    """All samples, dealt to the workers that there are, in steps of V times the program's batch. The same one for
    the same dataset, so that a next call of training goes on in the next epoch."""
    made = _elastic.setdefault(dataset, {})
    if by_shards not in made:
        parts = take_apart(dataset)
        if parts.passes > 1:
            raise refused(f"repeat({parts.passes}) of a training dataset", "train more epochs instead")
        made[by_shards] = ElasticDataset(
            parts.samples,
            global_batch_size=parts.batch_size * world.size(),
            total=parts.total,
            shuffle=parts.shuffle,
            drop_remainder=parts.drop_remainder,
            shards=world.size() if by_shards else None,
            # Augmentation that draws in MindSpore's operations is another one wherever a sample is made.
            shards_check="warn" if by_shards else "raise",
        )
    return made[by_shards]
