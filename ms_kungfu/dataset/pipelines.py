"""Remove batches, passes, order and sharding from a pipeline that was written for a fixed number of processes.

The samples of the resulting pipeline can be assigned to any number of workers.
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
    "{}; pass a pipeline with one dataset, which must accept a sampler (map, rename, project, shuffle, batch "
    "and repeat are allowed), or pass a function of a list of sample numbers, and total="
)
Sizes = Union[int, Callable[[Any], int]]


@dataclass(frozen=True)
class Pipeline:
    """A program's pipeline, separated into a dataset of samples and the settings that were removed from it."""

    samples: ds.Dataset
    """The dataset with its ``map`` operations, and with the pipeline's batch operation if it has one."""
    total: int
    """Number of samples in all shards."""
    chosen: list[int] | None = None
    """The samples' indices in the dataset; None if these are the first `total` indices."""
    drawn_from: int | Drawing | None = None
    """How the samples of an epoch are drawn; None if each epoch contains each sample once.

    If this is a number n, a shuffling sampler takes `total` of n samples, and takes different samples in each epoch.
    """
    batch_size: int | None = None
    drop_remainder: bool = False
    passes: int = 1
    """Number of passes over all samples per epoch."""
    num_shards: int | None = None
    shuffles: bool = False
    """Whether the pipeline shuffles, in a ``shuffle()`` operation or in its dataset."""


def nodes_of(pipeline: ds.Dataset) -> list[ds.Dataset]:
    """Return a pipeline's nodes, from its last operation to its dataset. Raise TypeError if it has several datasets."""
    nodes = [pipeline]
    while nodes[-1].children:
        if len(nodes[-1].children) > 1:
            raise TypeError(_FORM.format(f"{type(nodes[-1]).__name__} has several datasets"))
        nodes.append(nodes[-1].children[0])
    return nodes


def leaves_of(pipeline: ds.Dataset) -> list[Any]:
    """Return separate copies of the datasets that the pipeline reads.

    A copy of a GeneratorDataset reads in this process instead of in forked processes. Each forked process would start
    with a copy of this process's random generators, so all of them would augment in the same way.
    """
    if pipeline.children:
        return [leaf for child in pipeline.children for leaf in leaves_of(child)]
    leaf = copy.deepcopy(pipeline)
    leaf.parent = []
    if getattr(leaf, "decode", False):
        leaf.decode = False  # to compare samples, the undecoded bytes of the file are sufficient
    if isinstance(leaf, ds.GeneratorDataset):
        leaf.num_parallel_workers = 1
    return [leaf]


def take_apart(pipeline: ds.Dataset) -> Pipeline:
    """Separate a pipeline into its samples and its settings. `pipeline` itself isn't changed.

    Raise TypeError or ValueError if an operation or a sampler prevents the samples from being partitioned.
    """
    nodes = nodes_of(copy.deepcopy(pipeline))
    *above, leaf = nodes
    batch, passes, shuffles = None, 1, False
    kept: list[ds.Dataset] = []
    for node in above:
        if isinstance(node, RepeatDataset):
            if node.count > 1 and batch is not None:
                raise ValueError(
                    "with repeat() before batch(), a batch can contain samples of two passes; call batch() "
                    "first, then repeat()"
                )
            passes *= max(node.count, 1)  # -1 means endless; MindSpore then also counts each pass as an epoch
        elif isinstance(node, ShuffleDataset):
            shuffles = True
        elif isinstance(node, _KEEPS_SAMPLES):
            kept.append(node)
            if isinstance(node, _BATCHES):
                _check_batch(node, batch)
                batch = node
        elif isinstance(node, BucketBatchByLengthDataset):
            raise TypeError(
                "bucket_batch_by_length chooses a batch's samples and size by the samples' lengths, but in an "
                "ElasticDataset each step's samples are fixed for all workers; padded_batch() pads each batch to its "
                "longest sample, and "
                'batch(per_batch_map=...) to the boundary of a bucket (docs/data.md, "Samples of many lengths")'
            )
        else:
            raise TypeError(_FORM.format(f"{type(node).__name__} changes the set of samples"))
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
        raise TypeError(
            "a pipeline with two batch() operations has no individual samples to partition; leave out one batch()"
        )
    if node.batch_size_func is not None:
        raise TypeError(
            "a batch() whose size is a function has no fixed batch size to divide; pass a number, or call "
            "set_batch_size() of the ElasticDataset between steps"
        )


def _shuffles(sampler: Any) -> bool:
    shuffle = getattr(sampler, "shuffle", isinstance(sampler, ds.RandomSampler))
    return getattr(shuffle, "value", shuffle) not in (False, "false")  # an Enum's member FALSE is truthy


def _check_below(sampler: Any) -> None:
    """Check the samplers that `sampler` reads from, such as those that ``split()`` adds.

    These samplers remain in use, because only `sampler` is replaced when samples are assigned to workers.
    """
    below = getattr(sampler, "child_sampler", None)
    while below is not None:
        name = type(below).__name__
        if isinstance(below, ds.DistributedSampler):
            raise TypeError(
                f"a {name} before a {type(sampler).__name__} gives each worker a separate set of samples, which can't "
                "be partitioned again; shard after the other sampler, or leave num_shards out"
            )
        if isinstance(below, ds.Sampler):
            raise TypeError(f"a {name} before a {type(sampler).__name__} may select different samples in each pipeline")
        draws = below.is_shuffled() and not isinstance(below, ds.SequentialSampler)  # also checks samplers below
        if draws and ds.config.get_seed() == _NO_SEED:
            raise ValueError(
                f"without a seed, a {name} before a {type(sampler).__name__} would draw different samples in each "
                "pipeline and on each worker, and the parts of split() would overlap; call mindspore.set_seed(n) "
                "first, or use split(..., randomize=False) on a dataset with shuffle=False"
            )
        below = below.child_sampler


def _samples_of(leaf: Any) -> tuple[int | None, int, list[int] | None, int | Drawing | None]:
    """Return the values of `Pipeline` for a dataset: `num_shards`, `total`, `chosen` and `drawn_from`."""
    _check_numbered(leaf)
    sampler = leaf.sampler
    _check_below(sampler)
    if isinstance(sampler, ds.SubsetSampler):  # also SubsetRandomSampler
        chosen = [int(number) for number in sampler.indices]
        return None, int(leaf.get_dataset_size()), chosen, None
    if isinstance(sampler, ds.SequentialSampler):
        first, total = sampler.start_index or 0, int(leaf.get_dataset_size())
        return None, total, list(range(first, first + total)) if first else None, None
    if isinstance(sampler, ds.WeightedRandomSampler):
        return (None, *_drawn(leaf, sampler))
    if sampler is not None and not isinstance(sampler, (ds.RandomSampler, ds.DistributedSampler)):
        own = type(sampler).__module__ != ds.RandomSampler.__module__ or type(sampler).__name__ == "IterSampler"
        what = "a custom sampler" if own else f"a {type(sampler).__name__}"
        raise TypeError(
            f"{what} draws or orders samples separately in each worker, but the workers of an "
            "ElasticDataset share one order; leave the sampler out, or choose samples with "
            "SubsetSampler([numbers]), or draw them with WeightedRandomSampler"
        )
    num_shards = sampler.num_shards if isinstance(sampler, ds.DistributedSampler) else None
    drawn = sampler.num_samples if sampler is not None else None
    if num_shards is None and not drawn:
        return None, int(leaf.get_dataset_size()), None, None
    leaf.use_sampler(ds.SequentialSampler())
    there = total = int(leaf.get_dataset_size())
    if drawn:
        total = min(there, drawn * (num_shards or 1))
    leaf.use_sampler(ds.SequentialSampler(num_samples=total))  # for callers that read the dataset directly
    return num_shards, total, None, there if total < there and _shuffles(sampler) else None


def is_numbered(leaf: Any) -> bool:
    """Return whether a dataset can read any single sample by its number, rather than only all in sequence."""
    if isinstance(leaf, ds.GeneratorDataset):
        return hasattr(leaf.source, "__getitem__")
    return hasattr(leaf, "use_sampler")


def _check_numbered(leaf: Any) -> None:
    """Raise TypeError if the samples of a dataset have no numbers."""
    name = type(leaf).__name__
    if getattr(leaf, "has_batch_sampler", False):
        raise TypeError(
            f"the batch_sampler of a {name} chooses the batches for one process; leave out batch_sampler "
            "and collate_fn; instead call batch(n, per_batch_map=...) on the dataset"
        )
    if is_numbered(leaf):
        return
    if isinstance(leaf, ds.GeneratorDataset):
        raise TypeError(
            "a GeneratorDataset that reads a function or an iterator has no numbered samples to partition; pass it an "
            "object with __getitem__ and __len__, or pass ms_kungfu.dataset.indexed(GeneratorDataset(...), folder), "
            "which reads it once, to ElasticDataset"
        )
    raise TypeError(
        f"{name} can only be read in order, so it has no numbered samples to partition; pass "
        f"ms_kungfu.dataset.indexed({name}(..., shuffle=False), folder), which reads it once, and apply "
        "map and batch to the result"
    )


def _drawn(leaf: Any, sampler: Any) -> tuple[int, None, Drawing]:
    """Return the values of `Pipeline` for a WeightedRandomSampler: `total`, `chosen` and `drawn_from`."""
    weights = tuple(map(float, sampler.weights))
    leaf.use_sampler(ds.SequentialSampler())
    there = int(leaf.get_dataset_size())
    if len(weights) != there:
        raise ValueError(
            f"a WeightedRandomSampler has {len(weights)} weights for {there} samples; give one weight per sample"
        )
    drawn = sampler.num_samples or there
    possible = sum(weight > 0 for weight in weights)
    if not sampler.replacement and drawn > possible:
        raise ValueError(
            f"a WeightedRandomSampler(replacement=False) draws {drawn} samples, but only {possible} "
            "samples have a weight above 0; draw fewer"
        )
    return drawn, None, Drawing(weights, bool(sampler.replacement))


def batched(pipeline: ds.Dataset, size: Sizes) -> ds.Dataset:
    """Batch the pipeline with this size, or with the sizes that a function returns, without leaving out samples.

    If `pipeline` has a ``batch()``, only the size of that ``batch()`` changes. If it has none, a ``batch()`` is added.
    The function modifies `pipeline`.
    """
    node = _batch_of(pipeline)
    if node is None:
        return pipeline.batch(size)
    node.batch_size, node.batch_size_func = (1, size) if callable(size) else (size, None)
    node.drop_remainder = False
    return pipeline


def keeps_rows(pipeline: ds.Dataset) -> bool:
    """Return whether each batch is guaranteed to have one row per sample.

    This is the case if no function is mapped over batches, because such a function may change the number of rows.
    """
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
