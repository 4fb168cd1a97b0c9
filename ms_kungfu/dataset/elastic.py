"""A MindSpore dataset whose samples are dealt to the workers anew whenever the cluster changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from operator import index
from typing import Any, Callable, Union

import mindspore.dataset as ds
import numpy as np
from mindspore.dataset.engine.datasets import MapDataset, ProjectDataset, RenameDataset

from ms_kungfu import runtime
from ms_kungfu.dataset import dealing

Source = Union[ds.Dataset, Callable[[list[int]], ds.Dataset]]


class ElasticDataset(ds.Dataset):
    """This worker's share of a global order of samples, for ``Model.train`` and for loops of one's own.

    Args:
        source: the samples, *not batched*: a MindSpore pipeline over a dataset with a sampler (``MnistDataset``,
            ``Cifar10Dataset``, ``MindDataset``, ``GeneratorDataset`` over something indexable, ... with any ``map``),
            or a function of a list of sample numbers that returns such a pipeline yielding these samples in this order.
        batch_size: samples a worker trains in a step; the global batch grows and shrinks with the cluster.
        global_batch_size: samples that all workers together train in a step, held constant instead: training takes the
            same steps over the same samples at any size. One of the two is given.
        total: number of samples; needed where `source` is a function.
        shuffle: a new permutation of all samples each epoch, a function of (`seed`, epoch); else their own order.
        drop_remainder: leave out what doesn't fill a global batch at the end of an epoch. By default it is trained.

    Every sample is trained once an epoch, whatever resizes happen in between: after a change the rest of the epoch is
    dealt out anew from where the *trained* steps end, so batches that MindSpore had prefetched come from the new deal.
    Epochs end at the same step on all workers. How an epoch is cut and dealt, the tail included, is said in
    `ms_kungfu.dataset.dealing`. Where the workers' shares differ in size (3 workers, a global batch of 32), each
    worker's mean counts the same.

    A batch counts as trained at ``ElasticTraining.step_end``, or, without one, when the next batch is asked for.
    On a worker that has left the cluster an iterator ends at once.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        total: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        super().__init__()
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError(
                "an ElasticDataset has either batch_size (samples of a worker) or global_batch_size (of all workers), "
                f"got batch_size={batch_size!r} and global_batch_size={global_batch_size!r}"
            )
        self._source = source
        self._per_worker = None if batch_size is None else _positive(batch_size, "batch_size")
        self._global = None if global_batch_size is None else _positive(global_batch_size, "global_batch_size")
        self._total = _positive(total, "total") if total is not None else _size_of(source)
        self._shuffle, self._seed, self._drop_remainder = shuffle, index(seed), drop_remainder
        self._epoch = 0
        self._trained = 0  # position in the epoch's permutation up to which the steps are trained
        self._taken = 0  # position up to which batches were handed out
        self._steps = 0  # trained steps of this epoch
        self._steps_taken = 0
        self._deals = 0  # how often what was dealt lost its validity, other than by a new cluster version or epoch
        self.driven = False  # an ElasticTraining calls `commit`
        self.suspended = False  # iterators end at once

    # -- where training is --------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epochs that have been handed out in full, over all iterators."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that are trained, over all workers."""
        return self._trained

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step at the present size of the cluster."""
        if self._global is not None:
            return self._global
        assert self._per_worker is not None
        return self._per_worker * runtime.current_cluster_size()

    @property
    def total_samples(self) -> int:
        """Samples of an epoch."""
        return self._total

    @property
    def holds_global_batch(self) -> bool:
        """Whether the batch stays the same when the cluster changes."""
        return self._global is not None

    @property
    def weight(self) -> int:
        """Samples of this worker in the batches handed out since the last step."""
        if self._taken == self._trained:
            return 0
        first, last = dealing.share(self._trained, self._taken, runtime.current_rank(), runtime.current_cluster_size())
        return last - first

    def set_batch_size(self, batch_size: int | None = None, global_batch_size: int | None = None) -> None:
        """Other batches from the next one on: of a worker, or of all together; one of the two. At all workers alike,
        between steps. The rest of the epoch is dealt out anew."""
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("set_batch_size takes batch_size or global_batch_size, one of the two")
        self._per_worker = None if batch_size is None else _positive(batch_size, "batch_size")
        self._global = None if global_batch_size is None else _positive(global_batch_size, "global_batch_size")
        self._deals += 1

    def commit(self) -> None:
        """Count what was handed out as trained."""
        self._trained, self._steps = self._taken, self._steps_taken

    def state(self) -> dict[str, Any]:
        """What another worker needs to go on from here; JSON."""
        return {
            "epoch": self._epoch,
            "position": self._trained,
            "steps": self._steps,
            "seed": self._seed,
            "total": self._total,
            "batch": [self._per_worker, self._global],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another worker's `state`. ValueError where that worker has other data."""
        if state["total"] != self._total:
            raise ValueError(
                f"this worker's data has {self._total} samples, that of the others {state['total']}; start all workers "
                "with the same data"
            )
        self._epoch, self._seed = state["epoch"], state["seed"]
        self._per_worker, self._global = state["batch"]
        self._deals += 1
        self._trained = self._taken = state["position"]
        self._steps = self._steps_taken = state["steps"]

    # -- what MindSpore calls -----------------------------------------------------------------------------------------

    def get_dataset_size(self) -> int:
        """Steps of the present epoch, those already trained included; with batch_size it depends on the size."""
        if self.suspended or runtime.detached():
            return max(self._steps, 1)  # Model.train refuses 0
        left = dealing.count_steps(self._trained, self._total, self.global_batch_size, self._drop_remainder)
        return max(self._steps + left, 1)

    def get_batch_size(self) -> int:
        """Samples of this worker's full batch."""
        first, last = dealing.share(0, self.global_batch_size, runtime.current_rank(), runtime.current_cluster_size())
        return last - first

    def create_tuple_iterator(
        self,
        columns: Any = None,
        num_epochs: int = -1,
        output_numpy: bool = False,
        do_copy: bool = False,
    ) -> Iterator[Any]:
        """Yields this worker's batches as lists of columns, `num_epochs` epochs of them (-1: no end)."""
        return _Batches(self, "create_tuple_iterator", num_epochs, output_numpy, do_copy, columns)

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Any]:
        """Yields this worker's batches as dictionaries, `num_epochs` epochs of them (-1: no end)."""
        return _Batches(self, "create_dict_iterator", num_epochs, output_numpy, do_copy)

    def get_col_names(self) -> list[str]:
        return self._pipeline([0]).get_col_names()

    def output_shapes(self, estimate: bool = False) -> list[Any]:
        batch = self.get_batch_size()
        return self._pipeline([0] * batch).batch(batch).output_shapes(estimate)

    def output_types(self) -> list[Any]:
        return self._pipeline([0]).output_types()

    def reset(self) -> None:
        """Nothing to do: an iterator knows where it is. ``Model.train`` calls this after each epoch."""

    def parse(self, children: Any = None) -> Any:
        raise TypeError(
            "an ElasticDataset is the last part of a pipeline; put map, filter and the like into its source, and give "
            "the size of a batch to the ElasticDataset"
        )

    # -- dealing ------------------------------------------------------------------------------------------------------

    def _pipeline(self, indices: list[int]) -> ds.Dataset:
        if not isinstance(self._source, ds.Dataset):
            return self._source(indices)
        pipeline = copy.deepcopy(self._source)
        _leaf(pipeline).use_sampler(ds.SubsetSampler(indices))
        return pipeline

    def _deal(self) -> ds.Dataset:
        """A pipeline over this worker's batches of the rest of the epoch, of which there is at least one step."""
        rank, size = runtime.current_rank(), runtime.current_cluster_size()
        cut = dealing.steps(self._taken, self._total, self.global_batch_size, self._drop_remainder)
        shares = [dealing.share(start, stop, rank, size) for start, stop in cut]
        order = dealing.permutation(self._total, self._seed, self._epoch, self._shuffle)
        indices = np.concatenate([order[first:last] for first, last in shares])
        lengths = [last - first for first, last in shares]
        pipeline = self._pipeline(indices.tolist())
        if all(length == lengths[0] for length in lengths[:-1]) and lengths[-1] <= lengths[0]:
            return pipeline.batch(lengths[0])
        return pipeline.batch(lambda info: lengths[info.get_batch_num()])


class _Batches:
    """Walks through the epochs of an ElasticDataset, on one stock pipeline while the cluster stays the same."""

    def __init__(
        self,
        dataset: ElasticDataset,
        kind: str,
        num_epochs: int,
        output_numpy: bool,
        do_copy: bool,
        columns: Any = None,
    ):
        self._dataset = dataset
        self._kind = kind
        self._options: dict[str, Any] = {"num_epochs": 1, "output_numpy": output_numpy, "do_copy": do_copy}
        if columns is not None:
            self._options["columns"] = columns
        self._epochs_left = num_epochs
        self._inner: Iterator[Any] | None = None
        self._dealt_for: tuple[int, ...] | None = None  # (cluster version, epoch, deals) of `_inner`
        dataset._taken, dataset._steps_taken = dataset._trained, dataset._steps

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        dataset = self._dataset
        if self._epochs_left == 0 or dataset.suspended or runtime.detached():
            self.stop()
            raise StopIteration
        if not dataset.driven:
            dataset.commit()
        stop = dealing.step_stop(dataset._taken, dataset._total, dataset.global_batch_size, dataset._drop_remainder)
        if stop == dataset._taken:
            if stop == 0:
                raise ValueError(
                    f"drop_remainder leaves nothing of {dataset._total} samples where a step takes "
                    f"{dataset.global_batch_size}; train smaller batches or fewer workers, or keep the remainder"
                )
            self.stop()
            self._epochs_left -= 1
            dataset._epoch += 1
            dataset._trained = dataset._taken = dataset._steps = dataset._steps_taken = 0
            raise StopIteration
        wanted = (runtime.cluster_version(), dataset.epoch, dataset._deals)
        if wanted != self._dealt_for or self._inner is None:
            self.stop()
            self._inner, self._dealt_for = getattr(dataset._deal(), self._kind)(**self._options), wanted
        assert self._inner is not None
        batch = next(self._inner)
        dataset._taken, dataset._steps_taken = stop, dataset._steps_taken + 1
        return batch

    def stop(self) -> None:
        """Let the pipeline and what it has prefetched go."""
        inner, self._inner, self._dealt_for = self._inner, None, None
        if inner is not None:
            inner.stop()  # type: ignore[attr-defined]


def _positive(value: Any, what: str) -> int:
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} is an integer of 1 or more, got {value!r}")
    return number


def _leaf(pipeline: ds.Dataset) -> ds.Dataset:
    while pipeline.children:
        if len(pipeline.children) > 1:
            raise TypeError(_FORM.format(f"{type(pipeline).__name__} has several sources"))
        pipeline = pipeline.children[0]
    return pipeline


def _size_of(source: Source) -> int:
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


_KEEPS_SAMPLES = (MapDataset, RenameDataset, ProjectDataset)
_FORM = (
    "{}; give an unbatched pipeline over one dataset that takes a sampler, or a function of a list of sample numbers "
    "and total="
)
