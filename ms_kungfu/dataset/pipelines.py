"""Take batches, passes, order and sharding out of a pipeline that was written for a fixed number of processes.

Then its samples can be assigned to any number of workers.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Union

import mindspore.dataset as ds
from mindspore.dataset.engine.datasets import (
    BatchDataset,
    BucketBatchByLengthDataset,
    MapDataset,
    PaddedBatchDataset,
    ProjectDataset,
    RenameDataset,
    RepeatDataset,
    ShuffleDataset,
)

from ms_kungfu.dataset.sharding import Drawing

_NO_SEED = 5489  # the default of MindSpore's get_seed()
_BATCHES = (BatchDataset, PaddedBatchDataset)
_KEEPS_SAMPLES = (MapDataset, RenameDataset, ProjectDataset, *_BATCHES)
_FORM = (
    "{}; give a pipeline over one dataset that takes a sampler, with any map, rename, project, shuffle, batch and "
    "repeat, or a function of a list of sample numbers and total="
)
Sizes = Union[int, Callable[[Any], int]]


@dataclass(frozen=True)
class Pipeline:
    """A program's pipeline, taken apart."""

    samples: ds.Dataset
    """Its dataset with the mapped operations, and with its batch, if it has one, in the caller's size."""
    total: int
    """Samples there are, over all shards."""
    chosen: list[int] | None = None
    """Their numbers, if its sampler takes others than the first `total`."""
    drawn_from: int | Drawing | None = None
    """From how many samples a shuffling sampler takes another `total` each epoch, if it doesn't take all, or how."""
    batch_size: int | None = None
    drop_remainder: bool = False
    passes: int = 1
    """Of an epoch, over all samples."""
    num_shards: int | None = None
    shuffles: bool = False
    """By a ``shuffle()`` of its own, or in its dataset."""


def nodes_of(pipeline: ds.Dataset) -> list[ds.Dataset]:
    """Return its nodes from the last operation to the dataset. TypeError if it has several."""
    nodes = [pipeline]
    while nodes[-1].children:
        if len(nodes[-1].children) > 1:
            raise TypeError(_FORM.format(f"{type(nodes[-1]).__name__} has several sources"))
        nodes.append(nodes[-1].children[0])
    return nodes


def leaves_of(pipeline: ds.Dataset) -> list[Any]:
    """Return separate copies of the datasets that it reads.

    This process itself reads a source of the program's own. Forked workers would each begin with this process's random
    generators as they are, and augment alike.
    """
    if pipeline.children:
        return [leaf for child in pipeline.children for leaf in leaves_of(child)]
    leaf = copy.deepcopy(pipeline)
    leaf.parent = []
    if getattr(leaf, "decode", False):
        leaf.decode = False  # the file's bytes say as much
    if isinstance(leaf, ds.GeneratorDataset):
        leaf.num_parallel_workers = 1
    return [leaf]


def take_apart(pipeline: ds.Dataset) -> Pipeline:
    """Take a pipeline apart.

    TypeError or ValueError if a sampler can't partition its samples. `pipeline` itself stays as it is.
    """
    nodes = nodes_of(copy.deepcopy(pipeline))
    *above, leaf = nodes
    batch, passes, shuffles = None, 1, False
    kept: list[ds.Dataset] = []
    for node in above:
        if isinstance(node, RepeatDataset):
            if node.count > 1 and batch is not None:
                raise ValueError(
                    "repeat() below batch() fills batches from two passes over the samples; write batch() first, "
                    "repeat() behind it"
                )
            passes *= max(node.count, 1)  # endless: MindSpore, too, counts a pass as an epoch then
        elif isinstance(node, ShuffleDataset):
            shuffles = True
        elif isinstance(node, _KEEPS_SAMPLES):
            kept.append(node)
            if isinstance(node, _BATCHES):
                _check_batch(node, batch)
                batch = node
        elif isinstance(node, BucketBatchByLengthDataset):
            raise TypeError(
                "bucket_batch_by_length makes batches of other sizes by their samples' lengths, where the samples of a "
                "step are the same for all workers; padded_batch() pads each batch to its longest sample, and "
                'batch(per_batch_map=...) to the boundary of a bucket (docs/data.md, "Samples of many lengths")'
            )
        else:
            raise TypeError(_FORM.format(f"{type(node).__name__} changes which samples there are"))
    kept.append(leaf)
    kept[0].parent = []
    for parent, child in zip(kept, kept[1:]):
        parent.children, child.parent = [child], [weakref.ref(parent)]
    shuffles = shuffles or _shuffles(getattr(leaf, "sampler", None))
    num_shards, total, chosen, drawn_from = _samples_of(leaf)
    return Pipeline(
        kept[0], total, chosen, drawn_from,
        batch_size=None if batch is None else batch.batch_size,
        drop_remainder=batch is not None and batch.drop_remainder,
        passes=passes, num_shards=num_shards, shuffles=shuffles,
    )  # fmt: skip


def _check_batch(node: Any, other: Any) -> None:
    if other is not None:
        raise TypeError("a pipeline with two batch() has no samples to partition; leave one of them out")
    if node.batch_size_func is not None:
        raise TypeError(
            "batch() with a function for its size has no batch size that could be divided; give it a number, or "
            "set_batch_size() of the ElasticDataset between steps"
        )


def _shuffles(sampler: Any) -> bool:
    shuffle = getattr(sampler, "shuffle", isinstance(sampler, ds.RandomSampler))
    return getattr(shuffle, "value", shuffle) not in (False, "false")  # an Enum, whose FALSE is as true as its others


def _check_below(sampler: Any) -> None:
    """Check the samplers below `sampler`, which stay, as ``split()`` leaves them; each partition replaces `sampler`."""
    below = getattr(sampler, "child_sampler", None)
    while below is not None:
        name = type(below).__name__
        if isinstance(below, ds.DistributedSampler):
            raise TypeError(
                f"a {name} below a {type(sampler).__name__} leaves each worker samples of its own, which can't be "
                "partitioned again; shard behind the other sampler, or leave the shards out"
            )
        if isinstance(below, ds.Sampler):
            raise TypeError(f"a {name} below a {type(sampler).__name__} may give other samples to each pipeline")
        draws = below.is_shuffled() and not isinstance(below, ds.SequentialSampler)  # which includes those below it
        if draws and ds.config.get_seed() == _NO_SEED:
            raise ValueError(
                f"a {name} below a {type(sampler).__name__} draws other samples in each pipeline and at each worker as "
                "long as there is no seed, so what split() has divided would mix; call mindspore.set_seed(n) before, "
                "or split(..., randomize=False) a dataset with shuffle=False"
            )
        below = below.child_sampler


def _samples_of(leaf: Any) -> tuple[int | None, int, list[int] | None, int | Drawing | None]:
    """Return a bottom dataset's shards, its unsharded samples, their numbers if not the first, and how it draws."""
    _check_numbered(leaf)
    sampler = leaf.sampler
    _check_below(sampler)
    if isinstance(sampler, ds.SubsetSampler):  # SubsetRandomSampler, too
        chosen = [int(number) for number in sampler.indices]
        return None, int(leaf.get_dataset_size()), chosen, None
    if isinstance(sampler, ds.SequentialSampler):
        first, total = sampler.start_index or 0, int(leaf.get_dataset_size())
        return None, total, list(range(first, first + total)) if first else None, None
    if isinstance(sampler, ds.WeightedRandomSampler):
        return (None, *_drawn(leaf, sampler))
    if sampler is not None and not isinstance(sampler, (ds.RandomSampler, ds.DistributedSampler)):
        own = type(sampler).__module__ != ds.RandomSampler.__module__ or type(sampler).__name__ == "IterSampler"
        what = "a sampler of the program's own" if own else f"a {type(sampler).__name__}"
        raise TypeError(
            f"{what} draws or orders samples in each worker by itself, and the workers of an ElasticDataset share one "
            "order; leave it out, choose samples by SubsetSampler([numbers]), or draw them by WeightedRandomSampler"
        )
    num_shards = sampler.num_shards if isinstance(sampler, ds.DistributedSampler) else None
    drawn = sampler.num_samples if sampler is not None else None
    if num_shards is None and not drawn:
        return None, int(leaf.get_dataset_size()), None, None
    leaf.use_sampler(ds.SequentialSampler())
    there = total = int(leaf.get_dataset_size())
    if drawn:
        total = min(there, drawn * (num_shards or 1))
    leaf.use_sampler(ds.SequentialSampler(num_samples=total))  # for callers that read it as it is
    return num_shards, total, None, there if total < there and _shuffles(sampler) else None


def is_numbered(leaf: Any) -> bool:
    """Return whether a bottom dataset gives any of its samples by number, and not all in order alone."""
    if isinstance(leaf, ds.GeneratorDataset):
        return hasattr(leaf.source, "__getitem__")
    return hasattr(leaf, "use_sampler")


def _check_numbered(leaf: Any) -> None:
    """Check that the samples of a bottom dataset have numbers."""
    name = type(leaf).__name__
    if getattr(leaf, "has_batch_sampler", False):
        raise TypeError(
            f"the batch_sampler of a {name} makes the batches of one process; leave it and collate_fn out, write "
            "batch(n) behind the dataset, and collate by its per_batch_map"
        )
    if is_numbered(leaf):
        return
    if isinstance(leaf, ds.GeneratorDataset):
        raise TypeError(
            "a GeneratorDataset over a function or an iterator has no numbered samples to partition; give it an "
            "object with __getitem__ and __len__, or ms_kungfu.dataset.indexed(GeneratorDataset(...), folder), which "
            "reads it once"
        )
    raise TypeError(
        f"{name} is read in order alone, without numbered samples to partition; give "
        f"ms_kungfu.dataset.indexed({name}(..., shuffle=False), folder), which reads it once, and put map and "
        "batch behind it"
    )


def _drawn(leaf: Any, sampler: Any) -> tuple[int, None, Drawing]:
    """Return how many samples a WeightedRandomSampler draws, no numbers, and how it draws."""
    weights = tuple(map(float, sampler.weights))
    leaf.use_sampler(ds.SequentialSampler())
    there = int(leaf.get_dataset_size())
    if len(weights) != there:
        raise ValueError(f"a WeightedRandomSampler of {len(weights)} weights over {there} samples; give one for each")
    drawn = sampler.num_samples or there
    possible = sum(weight > 0 for weight in weights)
    if not sampler.replacement and drawn > possible:
        raise ValueError(
            f"a WeightedRandomSampler(replacement=False) draws {drawn} of {possible} samples with a weight; draw less"
        )
    return drawn, None, Drawing(weights, bool(sampler.replacement))


def batched(pipeline: ds.Dataset, size: Sizes) -> ds.Dataset:
    """Put the pipeline into batches of this size, or of what it returns for each, none left out.

    It uses the ``batch()`` that `pipeline` has, with all its other settings, or adds one. `pipeline` is changed.
    """
    node = _batch_of(pipeline)
    if node is None:
        return pipeline.batch(size)
    node.batch_size, node.batch_size_func = (1, size) if callable(size) else (size, None)
    node.drop_remainder = False
    return pipeline


def keeps_rows(pipeline: ds.Dataset) -> bool:
    """Return whether a batch surely has as many rows as samples: nothing is mapped over batches."""
    node = _batch_of(pipeline)
    while node is not None and pipeline is not node and not isinstance(pipeline, MapDataset):
        pipeline = pipeline.children[0]
    return node is None or (pipeline is node and getattr(node, "per_batch_map", None) is None)


def _batch_of(pipeline: ds.Dataset) -> Any:
    while not isinstance(pipeline, _BATCHES):
        if len(pipeline.children) != 1:
            return None
        pipeline = pipeline.children[0]
    return pipeline
