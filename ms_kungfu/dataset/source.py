"""Where an `ElasticDataset`'s samples come from: a pipeline of MindSpore's that yields any of them, in any order."""

from __future__ import annotations

import copy
from typing import Any, Callable, Union

import mindspore.dataset as ds
from mindspore.dataset.engine.datasets import MapDataset, ProjectDataset, RenameDataset

Source = Union[ds.Dataset, Callable[[list[int]], ds.Dataset]]
_KEEPS_SAMPLES = (MapDataset, RenameDataset, ProjectDataset)


_FORM = (
    "{}; give an unbatched pipeline over one dataset that takes a sampler, or a function of a list of sample numbers "
    "and total="
)


class _Numbers(list[int]):
    """Known to be integers, and shared by MindSpore's copies of a pipeline. Its SubsetSampler looks at each number, and
    each iterator copies each, which takes longer than all the rest of a new deal."""

    def __deepcopy__(self, memo: Any) -> _Numbers:
        return self


def _leaf(pipeline: ds.Dataset) -> ds.Dataset:
    while pipeline.children:
        if len(pipeline.children) > 1:
            raise TypeError(_FORM.format(f"{type(pipeline).__name__} has several sources"))
        pipeline = pipeline.children[0]
    return pipeline


def size_of(source: Source) -> int:
    """The number of samples, having checked that `source` can be dealt by a sampler."""
    if not isinstance(source, ds.Dataset):
        raise ValueError("give total=, the number of samples, where the source of an ElasticDataset is a function")
    node, pipeline = _leaf(source), source
    while pipeline is not node:
        if not isinstance(pipeline, _KEEPS_SAMPLES):
            raise TypeError(_FORM.format(f"{type(pipeline).__name__} changes which samples there are"))
        pipeline = pipeline.children[0]
    iterable_only = isinstance(node, ds.GeneratorDataset) and not hasattr(node.source, "__getitem__")
    if iterable_only or not hasattr(node, "use_sampler"):
        raise TypeError(_FORM.format(f"{type(node).__name__} takes no sampler"))
    if node.is_sharded():
        raise ValueError("an ElasticDataset deals the samples itself; leave num_shards and shard_id out of its source")
    return int(node.get_dataset_size())


def pipeline_of(source: Source, indices: list[int]) -> ds.Dataset:
    """A pipeline over these samples, in this order."""
    if not isinstance(source, ds.Dataset):
        return source(indices)
    pipeline = copy.deepcopy(source)
    sampler = ds.SubsetSampler([0])
    sampler.indices = _Numbers(indices)
    _leaf(pipeline).use_sampler(sampler)
    return pipeline
