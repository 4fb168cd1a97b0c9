"""The iterators of an `ElasticDataset`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_kungfu import membership, runtime
from ms_kungfu.dataset import pipelines, sharding, shards
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.dataset.source import Source
from ms_kungfu.errors import KungFuError
from ms_kungfu.ops import wait_for_queue


def _next(batches: Iterator[Any], expected: int, keeps_rows: bool) -> tuple[Any, int]:
    """Return a pipeline's next batch and the batch's number of samples, which must be `expected`.

    If `keeps_rows` is false, a function that is mapped over whole batches may have changed the number of rows. The
    number of samples is then `expected`, because the dataset's own sampler chose the samples.
    """
    batch = next(batches, None)
    given = 0 if batch is None else next(iter(batch.values() if isinstance(batch, dict) else batch)).shape[0]
    if given and not keeps_rows:
        return batch, expected
    if given != expected:
        raise ValueError(
            f"a step requires {expected} samples from the source of this ElasticDataset, but the source "
            f"yielded {given}; a source must yield each requested sample once"
        )
    return batch, given


class Batches:
    """Iterate over the epochs of an ElasticDataset. The same MindSpore pipeline is used until the partition changes.

    Args:
        kind: name of the method that makes the pipeline's iterator. `options` are the method's arguments.
    """

    def __init__(self, dataset: Shares, source: Source, kind: str, num_epochs: int, options: dict[str, Any]) -> None:
        self._dataset, self._source, self._kind, self._options = dataset, source, kind, options
        self._reductions = membership.watch_reductions()
        self._epochs_left = num_epochs
        self._inner: Iterator[Any] | None = None
        self._coming: NDArray[np.int64] = np.empty(0, np.int64)  # positions that `_inner` hasn't delivered yet
        self._dealt_for: tuple[int, ...] = ()  # `_inner` is valid while this value stays the same
        dataset._put_back()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with membership.spending("data"):
            return self._next()

    def _next(self) -> Any:
        dataset, cursor = self._dataset, self._dataset._cursor
        if self._epochs_left == 0 or dataset.suspended or runtime.detached():
            self.stop()
            raise StopIteration
        goes_on = dataset.driven and dataset._dealing.dealt.version == runtime.cluster_version()
        if cursor.taken and goes_on and dataset.shards is not None:
            raise KungFuError(
                "with shards, each batch is a whole step: call step_end() after each batch; to accumulate "
                "gradients over more samples, use more shards"
            )
        if cursor.taken and not goes_on:
            dataset.commit(self._participants())
        elif dataset.driven is None:
            self._reductions.take_commits()  # discard commits that belong to no step
        wanted = dataset._assignment()
        if wanted != self._dealt_for:
            self.stop()
            where, lengths = dataset._deal()
            if lengths.size > 0:
                even = (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]
                sizes = int(lengths[0]) if even else lambda info: int(lengths[info.get_batch_num()])
                self._inner, self._coming = self._open(where, sizes), where
            self._dealt_for = wanted
        step = dataset._take()
        if step is None and cursor.taken and dataset._passes_left:
            raise KungFuError(
                "gradients were accumulated across the end of a pass of repeat(), but the last batches of "
                "a pass count as trained when the pass ends; apply the gradients before the pass ends, or "
                "train more epochs instead of using repeat()"
            )
        if step is None and cursor.taken:  # the gradients accumulated until the end of the epoch have been applied
            dataset.commit(self._participants())
            return self._next()  # train on the samples of failed workers, too
        if step is None:
            return self._end_epoch()
        batch = self._first(step)
        if dataset.driven is not None:
            dataset.driven.begins()
        return batch

    def _open(self, where: NDArray[np.int64], size: pipelines.Sizes) -> Iterator[Any]:
        """Return a MindSpore iterator that yields the samples at these positions of the epoch in batches."""
        seed, epoch = self._dataset._seed, self._dataset._cursor.epoch
        pipeline = self._source.batches(self._dataset._order.samples(where, seed, epoch), size, seed, epoch)
        return getattr(pipeline, self._kind)(num_epochs=1, **self._options)

    def _participants(self) -> list[int]:
        """Return the participants in the step that has ended."""
        wait_for_queue()  # the step includes operations that PyNative mode has queued
        if self._dataset.driven is not None:
            return self._dataset.driven.take_participants()
        _, partly = self._reductions.take_commits()
        if partly:
            raise KungFuError(
                f"rank {', '.join(map(str, partly))} failed between two gradient reductions of a step, so "
                "its samples are in the first update but not in the last; ElasticTraining undoes such a "
                "step, but a loop without ElasticTraining can't continue"
            )
        return self._reductions.take_participants()

    def _first(self, step: sharding.Step) -> Any:
        """Return the batch that the iterator yields for the step."""
        return self._receive(max(sharding.count(step.share(self._dataset._dealing.dealt.rank)), 1))

    def _receive(self, expected: int) -> Any:
        """Return the pipeline's next batch, which must have `expected` samples."""
        assert self._inner is not None
        batch, given = _next(self._inner, expected, self._source.keeps_rows)
        # Record the samples that the pipeline delivered rather than those assigned to this worker. The audit compares
        # both.
        if self._dataset.keeps_ledger:
            self._dataset._recording.deliver(sharding.ranges(self._coming[:given]))
            self._coming = self._coming[given:]
        return batch

    def _end_epoch(self) -> Any:
        dataset, cursor = self._dataset, self._dataset._cursor
        if cursor.steps == 0:
            raise ValueError(
                f"with drop_remainder, an epoch has no step: the dataset has {dataset._total} samples, but a step "
                f"requires {dataset.global_batch_size}; use smaller batches or fewer workers, or keep the remainder"
            )
        self.stop()
        if dataset._end_epoch():
            self._epochs_left -= 1
            raise StopIteration
        return self._next()

    def stop(self) -> None:
        """Release the pipeline and its prefetched batches."""
        inner, self._inner, self._dealt_for = self._inner, None, ()
        if inner is not None:
            inner.stop()  # type: ignore[attr-defined]


class ShardBatches(Batches):
    """Iterate over sharded steps. In each step, the iterator yields the first of this worker's shards."""

    check = "raise"
    """What happens if two computations of a shard have different results: "raise" an error, or "warn"."""
    _yielded: weakref.WeakKeyDictionary[membership.Member, ShardBatches] = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> ShardBatches | None:
        """Return the `ShardBatches` that has most recently yielded a batch in this process."""
        return cls._yielded.get(membership.current())

    def _first(self, step: sharding.Step) -> Any:
        dataset = self._dataset
        self._step, self._unit = step, dataset._cursor.unit
        self._length = sharding.count(step.batch)
        self.count = shards.count(self._length, self._unit)
        """Number of shards in this step."""
        self.last_share = shards.last_share(self._length, self._unit)
        """Weight of the step's last shard. The other shards have weight 1."""
        self.own = dataset.shards_of(self.count)
        self._coming_shards = list(self.own) or [self.count - 1]
        self.first = self._coming_shards[0]
        """The shard that the iterator yields."""
        self._parts = 0
        self._batches_by_shard: dict[int, Any] = {}
        # Shards that were read but not recorded, because they are assigned to other workers.
        self._looked_at: dict[int, tuple[sharding.Range, ...]] = {}
        self._yielded[membership.current()] = self
        return self.batch(self.first)

    @property
    def weights(self) -> list[int]:
        """Return the weights by which this step's shards are assigned to ranks, one weight per rank.

        The list is empty if all ranks have equal weights.
        """
        return self._dataset._step_weights

    @property
    def next_weights(self) -> list[int]:
        """Return the weights that the workers have agreed on for the next step's shards."""
        return self._dataset._dealing.weights(self._dataset._dealing.dealt)

    def next_key(self) -> tuple[int, int]:
        """Return two keys for random numbers: the seed, and a number that differs for each step and ShardedStep."""
        cursor = self._dataset._cursor
        self._parts += 1
        return self._dataset._seed, cursor.epoch << 40 | self._step.number << 8 | (self._parts - 1) & 255

    def conditions(self) -> dict[str, Any]:
        """Return the dataset's numeric environment."""
        return self._dataset.conditions()

    def check_deal(self, dealt: list[int]) -> None:
        """Raise KungFuError if the runtime assigns shards other than those that the pipeline delivers.

        Only the first ShardedStep on a batch is checked. After a failure, later ShardedSteps may get other shards.
        """
        if self._parts == 1 and dealt != self.own:
            raise KungFuError(
                f"the runtime assigned shards {dealt} to this worker, but the worker read the data of shards {self.own}"
            )

    def weigh(self, weights: list[int]) -> None:
        """Assign shards to ranks in proportion to these weights, beginning with the next step."""
        self._dataset.weigh(weights)

    def made(self) -> None:
        """Record that the sum over all shards of the step is complete."""
        self._dataset._sums += 1

    def batch(self, shard: int) -> Any:
        """Return the columns of one shard of this step, in the form that the iterator yields.

        This worker reads its own shards from its pipeline, in order. For a failed worker's shard, it makes a separate
        pipeline.
        """
        unit = self._unit
        while shard not in self._batches_by_shard and shard in self._coming_shards:
            coming = self._coming_shards.pop(0)
            self._batches_by_shard[coming] = self._receive(min(unit, self._length - coming * unit))
        if shard not in self._batches_by_shard:
            where = sharding.positions(self._step.batch)[shard * unit : (shard + 1) * unit]
            batches = iter(self._open(where, unit))
            self._batches_by_shard[shard], _ = _next(batches, len(where), self._source.keeps_rows)
            self._looked_at[shard] = sharding.ranges(where)
        missing = membership.current().core.missing_shards
        if shard in self._looked_at and shard in missing():  # this worker has to compute the shard for the step
            self._dataset._recording.deliver(self._looked_at.pop(shard))
        return self._batches_by_shard[shard]
