"""Build MindSpore pipelines over any subset of an `ElasticDataset`'s samples."""

from __future__ import annotations

import copy
import random
from typing import Any, Callable, Union

import mindspore.dataset as ds
import numpy as np

from ms_kungfu.dataset import contents, pipelines, sharding
from ms_kungfu.dataset.contents import Contents

Given = Union[ds.Dataset, Callable[[list[int]], ds.Dataset]]


class _Numbers(list[int]):
    """A list of integers that isn't copied with a MindSpore pipeline, so that all copies share it.

    For a new partition, copying the list for each iterator and checking each number in SubsetSampler would take longer
    than all other work.
    """

    def __deepcopy__(self, memo: Any) -> _Numbers:
        return self


def _beside_leaf(pipeline: ds.Dataset, column: ds.Dataset) -> ds.Dataset:
    """Return `pipeline` with a column added to its dataset, so that each `map` operation can use it."""
    above, leaf = None, pipeline
    while leaf.children:
        if len(leaf.children) > 1:
            raise TypeError(f"key_column requires a pipeline with one dataset, but {type(leaf).__name__} has several")
        above, leaf = leaf, leaf.children[0]
    leaf.parent = []
    zipped = ds.zip((leaf, column))
    if above is None:
        return zipped
    above.children = [zipped]
    return pipeline


class Source:
    """Make pipelines from a program's pipeline, or from a function that accepts a list of sample numbers.

    Args:
        given: the pipeline or the function.
        chosen: the dataset indices of the pipeline's samples; None if sample i has index i.
        key_column: as in `ElasticDataset`.
    """

    def __init__(self, given: Given, chosen: list[int] | None, key_column: str | None) -> None:
        self._given, self._chosen, self._key_column = given, chosen, key_column
        self.keeps_rows = not isinstance(given, ds.Dataset) or pipelines.keeps_rows(given)
        """Whether a batch has as many rows as samples."""
        if key_column is None:
            return
        if not isinstance(key_column, str) or not key_column:
            raise TypeError(f"key_column must be a column name (a string), got {key_column!r}")
        if isinstance(given, ds.Dataset) and key_column in pipelines.nodes_of(given)[-1].get_col_names():
            raise ValueError(
                f"key_column={key_column!r}: the source's dataset already has a column of this name; use another name"
            )

    def num_classes(self) -> int | None:
        """Return the number of classes, or None if the dataset doesn't provide it."""
        return self._given.num_classes() if isinstance(self._given, ds.Dataset) else None

    def batches(self, numbers: list[int], size: pipelines.Sizes, seed: int, epoch: int) -> ds.Dataset:
        """Return a pipeline over these samples, in this order. `seed` and `epoch` determine the `key_column`."""
        if isinstance(self._given, ds.Dataset):
            pipeline = copy.deepcopy(self._given)
            sampler = ds.SubsetSampler([0])
            sampler.indices = _Numbers(self._in_dataset(numbers))
            leaf: Any = pipelines.nodes_of(pipeline)[-1]
            leaf.use_sampler(sampler)
            if isinstance(leaf, ds.GeneratorDataset) and leaf.source_len > 0:
                # A GeneratorDataset yields at most `source_len` samples, but a weighted sampler may repeat samples.
                leaf.source_len = max(leaf.source_len, len(numbers))
            pipeline = pipelines.batched(pipeline, size)
        else:
            pipeline = self._given(numbers).batch(size)
        if self._key_column is None:
            return pipeline
        keys = sharding.keys(numbers, seed, epoch)
        return _beside_leaf(pipeline, ds.NumpySlicesDataset(keys, [self._key_column], shuffle=False))

    def _in_dataset(self, numbers: list[int]) -> list[int]:
        return numbers if self._chosen is None else [self._chosen[i] for i in numbers]

    def _leaves(self, numbers: list[int]) -> list[ds.Dataset]:
        """Return the datasets without any `map` operation, over these samples in this order."""
        if not isinstance(self._given, ds.Dataset):
            return pipelines.leaves_of(self._given(numbers))
        (leaf,) = pipelines.leaves_of(self._given)
        leaf.use_sampler(ds.SubsetSampler(self._in_dataset(numbers)))
        return [leaf]

    def _reads_alike(self) -> bool:
        """Return whether the samples come from files or arrays, so that all reads of a sample yield equal content."""
        if not isinstance(self._given, ds.Dataset):
            return False
        leaf = pipelines.nodes_of(self._given)[-1]
        return isinstance(leaf, ds.NumpySlicesDataset) or not isinstance(leaf, ds.GeneratorDataset)

    def contents(self, total: int, of_all: bool) -> Contents:
        """Return hashes of some of the `total` samples or, with `of_all`, of all samples.

        Raise UnstableError if a sample differs from one read to the next.
        """
        some, again = contents.chosen(total), 0 if self._reads_alike() else contents.READS - 1
        # Use a separate pipeline for each pass, because a GeneratorDataset yields no more samples than its source has.
        passes = [list(range(total)) if of_all else some, *([some] * again)]
        # A source may use the process's random generators for augmentation. Restore their state for the program.
        states = random.getstate(), np.random.get_state()
        hashes: dict[int, bytes] = {}
        columns: contents.Columns | None = None
        try:
            for numbers in passes:
                read = self._leaves(numbers)
                is_first = columns is None
                if columns is None:
                    columns = contents.Columns([name for leaf in read for name in leaf.get_col_names()])
                iterators = [leaf.create_tuple_iterator(num_epochs=1, output_numpy=True) for leaf in read]
                rows = 0
                try:
                    for number, parts in zip(numbers, zip(*iterators)):
                        rows += 1
                        row = [part for of_leaf in parts for part in of_leaf]
                        found = contents.hash_of(row)
                        if is_first and number in some:
                            columns.add(row)
                        if hashes.setdefault(number, found) != found:
                            raise contents.UnstableError(f"sample {number} differs from one read to the next")
                finally:
                    for iterator in iterators:
                        iterator.stop()  # its threads would read ahead and use the random generators
                if rows < len(numbers):
                    raise contents.UnstableError(f"the source yielded {rows} of {len(numbers)} samples")
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return contents.made_of(total, hashes, () if columns is None else columns.hashes())
