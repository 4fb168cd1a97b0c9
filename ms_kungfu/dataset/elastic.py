"""A MindSpore dataset whose samples are dealt to the workers anew whenever the cluster changes."""

from __future__ import annotations

import copy
import logging
import os
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Union

import mindspore.dataset as ds
import numpy as np
from numpy.typing import NDArray

from ms_kungfu import env, membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.dataset import contents, pipelines, replaying, sharding, shards
from ms_kungfu.dataset.conditions import of_machine
from ms_kungfu.dataset.ledger import ERRORS, Ledger
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.errors import KungFuError
from ms_kungfu.ops import wait_for_queue

Source = Union[ds.Dataset, Callable[[list[int]], ds.Dataset]]
_FINGERPRINTS = 50  # steps; the checksums of LeNet's half a megabyte take 0.3 ms, a step several
_log = logging.getLogger(__name__)


class _Numbers(list[int]):
    """Known to be integers, and shared by MindSpore's copies of a pipeline. Its SubsetSampler looks at each number, and
    each iterator copies each, which takes longer than all the rest of a new deal."""

    def __deepcopy__(self, memo: Any) -> _Numbers:
        return self


def _beside_leaf(pipeline: ds.Dataset, column: ds.Dataset) -> ds.Dataset:
    """`pipeline`, whose dataset has one column more, below all that is mapped."""
    above, leaf = None, pipeline
    while leaf.children:
        if len(leaf.children) > 1:
            raise TypeError(f"key_column takes a source over one dataset, and {type(leaf).__name__} has several")
        above, leaf = leaf, leaf.children[0]
    leaf.parent = []
    zipped = ds.zip((leaf, column))
    if above is None:
        return zipped
    above.children = [zipped]
    return pipeline


def _check_key_column(source: Source, name: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"key_column is the name of a column, a text, got {name!r}")
    if isinstance(source, ds.Dataset) and name in pipelines.nodes_of(source)[-1].get_col_names():
        raise ValueError(f"key_column adds the column {name!r}, which the source's dataset has already; name another")


def _global_batch(pipeline: pipelines.Pipeline, shuffle: bool) -> int:
    """What a step trains by the pipeline's own batch, which is a worker's. Where it is wrong at one that joins, it is
    told with the rest of the state."""
    assert pipeline.batch_size is not None
    workers = env.START_SIZE.get() or runtime.current_cluster_size()
    if pipeline.num_shards not in (None, 1, env.RANK_SIZE.get()):  # a number of the program's own, not the size
        workers = pipeline.num_shards
    samples = pipeline.batch_size * workers
    if env.RANK_ID.get() == 0:
        order = "in a permutation of all samples each epoch" if shuffle else "in their own order"
        of = f" for each of {workers} workers" if workers > 1 else ""
        _log.info(
            "ElasticDataset: batch(%d)%s is a global batch of %d, held at any size of the cluster (batch_size=%d would "
            "let it grow), %s%s",
            pipeline.batch_size, of, samples, pipeline.batch_size, order,
            ", which takes the place of shuffle()" if pipeline.shuffles and shuffle else "",
        )  # fmt: skip
    return samples


class ElasticDataset(Shares, ds.Dataset):
    """This worker's share of a global order of samples, for ``Model.train`` and for loops of one's own.

    Args:
        source: the samples: a MindSpore pipeline over a dataset with a sampler (``MnistDataset``, ``Cifar10Dataset``,
            ``MindDataset``, ``GeneratorDataset`` over something indexable, ... with any ``map``), as it was written for
            one process or for a fixed number of them: a final ``batch``, ``padded_batch`` or ``repeat``, ``shuffle``
            and ``num_shards`` are taken off it and their meaning is kept (docs/data.md). Or a function of a list of
            sample numbers that returns an unbatched pipeline yielding these samples in this order.
        batch_size: samples a worker trains in a step; the global batch grows and shrinks with the cluster.
        global_batch_size: samples that all workers together train in a step, held constant instead: training takes the
            same steps over the same samples at any size. One of the two is given, or neither where `source` has a
            ``batch(b)``: then it is b for each worker that the job began with, or of the `num_shards` of `source`.
        total: number of samples; needed where `source` is a function.
        shuffle: a new permutation of all samples each epoch, a function of (`seed`, epoch); else their own order.
        drop_remainder: leave out what doesn't fill a global batch at the end of an epoch. By default it is trained, but
            for a `source` with a ``batch(..., drop_remainder=True)``.
        ledger: a folder in which each worker records what it trained, for ``python -m ms_kungfu.dataset.audit``; by
            default that of ``KUNGFU_LEDGER_DIR``, else nothing is recorded.
        ledger_errors: what a ledger that can't be written (a full disk) does: ``"raise"`` ends training with an
            OSError, ``"warn"`` goes on without a record, which the audit says.
        shards: a step is a deal of so many shards of one shape, which divide `global_batch_size`, and the bits of
            training don't depend on the cluster: docs/shards.md. An iterator then yields the first shard of each step
            that this worker is dealt, which Model.train, or `ms_kungfu.elastic.ShardedStep`, takes for the whole.
        ledger_fingerprints: with `shards`, the steps between two that go on record with a checksum of each tensor that
            training changes, by which ``python -m ms_kungfu.replay`` finds the first one that another run has
            otherwise; by default 50, 0 for none. `ElasticTraining` and `KungFuElasticCallback` take them.
        shards_check: what becomes of it where a shard that is computed a second time has other gradients, and the bits
            depend on more than the seed, or where workers have other versions, instruction sets or cores: ``"raise"``
            ends training with a DivergenceError, ``"warn"`` goes on.
        key_column: the source's own dataset gets a last column of this name, which its maps may take: uint32 of shape
            ``(4,)``, a function of (`seed`, epoch, sample) alone and another one for each. What a map draws from
            ``np.random.default_rng(key)`` is then the same whoever makes the sample, and however often. A column that
            no map takes comes out with the others. docs/data.md
        contents_check: which samples the workers compare by their content as training begins, and a worker that joins
            or resumes with those that training began with: ``"some"`` (eight), ``"all"`` or ``"none"``; by default that
            of ``KUNGFU_CONTENTS_CHECK``, else ``"some"``. What differs is refused, and named by its numbers. Compared
            is what the source's own dataset yields, below its maps. If that differs from one read to the next it is
            left out, and with ``"all"`` it is a ValueError.

    Every sample is trained once an epoch, whatever happens in between: after a resize or a death the rest of the epoch
    is dealt out anew from where the *trained* steps end, so batches that MindSpore had prefetched come from the new
    deal. What a worker took in a step that was committed without it, because it died, is trained later in the epoch,
    which may so have a step more. Epochs end at the same step on all workers. How an epoch is cut and dealt, the tail
    included, is said in `ms_kungfu.dataset.sharding`. Shares may differ in size (3 workers, a global batch of 32): a
    worker's gradients count by the number of its samples, so the mean over the workers is that over the samples.

    A batch counts as trained at ``ElasticTraining.step_end``, or, without one, when the next batch is asked for; and
    when its epoch ends: gradients accumulated over several batches are applied before that. A program that calls
    ``ms_kungfu.resize`` itself does so between a batch's update and the next batch.
    On a worker that has left the cluster an iterator ends at once.
    """

    _made = 0  # a joiner runs the program from its start, so it counts its datasets as the others do

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
        ledger: str | os.PathLike[str] | None = None,
        ledger_errors: str = "raise",
        shards: int | None = None,
        shards_check: str = "raise",
        key_column: str | None = None,
        ledger_fingerprints: int | None = None,
        contents_check: str | None = None,
    ) -> None:
        ds.Dataset.__init__(self)
        if not (isinstance(source, ds.Dataset) or callable(source)):
            raise TypeError(
                "the source of an ElasticDataset is a pipeline of mindspore.dataset, or a function of positions, not "
                f"{type(source).__name__}; mindspore.dataset.NumpySlicesDataset takes arrays"
            )
        pipeline = pipelines.take_apart(source) if isinstance(source, ds.Dataset) else None
        self._source = source if pipeline is None else pipeline.samples
        self._chosen = None if pipeline is None else pipeline.chosen
        self._keeps_rows = pipeline is None or pipelines.keeps_rows(pipeline.samples)
        self._key_column = key_column
        if key_column is not None:
            _check_key_column(self._source, key_column)
        self._order: tuple[tuple[int, int], Any] = ((-1, -1), None)  # (seed, epoch) and its permutation
        folder = ledger if ledger is not None else env.LEDGER_DIR.get()
        if ledger_errors not in ERRORS:
            raise ValueError(f"ledger_errors is {' or '.join(map(repr, ERRORS))}, got {ledger_errors!r}")
        if shards_check not in ("raise", "warn"):
            raise ValueError(f"shards_check is 'raise' or 'warn', got {shards_check!r}")
        if shards is None and shards_check != "raise":
            raise ValueError("shards_check goes with shards")
        self._shards_check = shards_check
        self._contents_check = env.CONTENTS_CHECK.get() if contents_check is None else contents_check
        if self._contents_check not in contents.CHECKS:
            raise ValueError(
                f"contents_check is {', '.join(map(repr, contents.CHECKS[:-1]))} or {contents.CHECKS[-1]!r}, got "
                f"{self._contents_check!r}"
            )
        self._contents_are_read = False
        every = _FINGERPRINTS
        if ledger_fingerprints is not None:
            every = at_least(0, ledger_fingerprints, "ledger_fingerprints")
            if shards is None:
                raise ValueError("ledger_fingerprints are of bits that the cluster doesn't decide; give shards, too")
        samples, passes = (None, 1) if pipeline is None else (pipeline.total, pipeline.passes)
        if total is not None:
            samples = at_least(1, total, "total")
        if samples is None:
            raise ValueError("give total=, the number of samples, where the source of an ElasticDataset is a function")
        if pipeline is not None and pipeline.batch_size is not None:
            drop_remainder = drop_remainder or pipeline.drop_remainder
            if batch_size is None and global_batch_size is None:
                global_batch_size = _global_batch(pipeline, shuffle)
        Shares.__init__(
            self, samples, batch_size, global_batch_size,
            shuffle=shuffle, seed=seed, drop_remainder=drop_remainder, shards=shards, passes=passes,
        )  # fmt: skip
        sharded, replay = shards is not None, replaying.current()
        if replay is not None:
            self._ledger = replay.begin(ElasticDataset._made, self.conditions) if sharded else None
        elif folder is not None:
            conditions = self.conditions if sharded else None
            self._ledger = Ledger(
                Path(folder), ElasticDataset._made, ledger_errors,
                sharded=sharded, conditions=conditions, fingerprints=every, contents=lambda: self._contents,
            )  # fmt: skip
        self._drawn_from = max(samples, (pipeline.drawn_from if pipeline is not None else None) or 0)
        ElasticDataset._made += 1

    def conditions(self) -> dict[str, Any]:
        """What the bits of training depend on besides its program: versions of MindSpore, NumPy and ms_kungfu,
        processor and instruction set, cores a worker, shards, global batch and seed; JSON. Without shards nothing,
        since they depend on the cluster, too."""
        if self._shards is None:
            return {}
        own = {"shards": self._shards, "global_batch": self._global, "seed": self._seed}
        return {**of_machine(membership.fixed_core_count()), **own}

    def read_contents(self) -> None:
        """Read the samples that the workers compare, once."""
        if self._contents_are_read or self._contents_check == "none":
            return
        self._contents_are_read = True
        of_all = self._contents_check == "all"
        try:
            self._contents = _contents_of(self._leaf_pipelines, self._drawn_from, of_all, self._reads_alike())
        except contents.UnstableError as error:
            if of_all:
                raise ValueError(f"contents_check='all': {error}; give 'some', or 'none'") from error
            _log.info("ElasticDataset: workers compare samples by number, not by content: %s", error)

    def _reads_alike(self) -> bool:
        """Whether the samples come from files or arrays, so that reading one again yields the same."""
        if not isinstance(self._source, ds.Dataset):
            return False
        leaf = pipelines.nodes_of(self._source)[-1]
        return isinstance(leaf, ds.NumpySlicesDataset) or not isinstance(leaf, ds.GeneratorDataset)

    def _leaf_pipelines(self, numbers: list[int]) -> list[ds.Dataset]:
        """The datasets below all maps, over these samples in this order."""
        if not isinstance(self._source, ds.Dataset):
            return pipelines.leaves_of(self._source(numbers))
        (leaf,) = pipelines.leaves_of(self._source)
        leaf.use_sampler(ds.SubsetSampler(numbers if self._chosen is None else [self._chosen[i] for i in numbers]))
        return [leaf]

    # -- what MindSpore calls -----------------------------------------------------------------------------------------

    def get_dataset_size(self) -> int:
        """Steps of the present epoch, those already trained included; with batch_size it depends on the size."""
        cursor, batch = self._cursor, self.global_batch_size
        if self.suspended or runtime.detached():
            return max(self.steps, 1)  # Model.train refuses 0
        coming = sharding.count_steps(cursor.left, batch, cursor.drop_remainder)
        coming += self._passes_left * sharding.count_steps(self._total, batch, cursor.drop_remainder)
        return max(self.steps + coming, 1)

    def get_batch_size(self) -> int:
        """Samples of this worker's full batch."""
        if self._shards is not None:
            return self._cursor.unit
        members = self.members
        step = sharding.Step(0, ((0, self.global_batch_size),), members, self._cursor.ranks)
        return max(sharding.count(step.share(runtime.current_rank())), 1)

    def shard_sizes(self) -> list[int]:
        """How many samples the shards of an epoch have: all alike, but for its last one. With `shards` only."""
        unit = self._cursor.unit
        rest = 0 if self._cursor.drop_remainder else self._total % unit
        return [unit, rest] if rest else [unit]

    def create_tuple_iterator(
        self, columns: Any = None, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Any]:
        """Yields this worker's batches as lists of columns, `num_epochs` epochs of them (-1: no end)."""
        options = {"columns": columns, "output_numpy": output_numpy, "do_copy": do_copy}
        return self._batches("create_tuple_iterator", num_epochs, options)

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Any]:
        """Yields this worker's batches as dictionaries, `num_epochs` epochs of them (-1: no end)."""
        options = {"output_numpy": output_numpy, "do_copy": do_copy}
        return self._batches("create_dict_iterator", num_epochs, options)

    def _batches(self, *arguments: Any) -> _Batches:
        return (_Batches if self._shards is None else ShardBatches)(self, *arguments)

    def get_col_names(self) -> list[str]:
        return self._full_batch().get_col_names()

    def output_shapes(self, estimate: bool = False) -> list[Any]:
        return self._full_batch().output_shapes(estimate)

    def output_types(self) -> list[Any]:
        return self._full_batch().output_types()

    def _full_batch(self) -> ds.Dataset:
        """A pipeline over one: what is mapped over batches may not take any other."""
        batch = self.get_batch_size()
        return self._batch_pipeline([0] * batch, batch)

    def get_repeat_count(self) -> int:
        """Passes over the samples in an epoch."""
        return self._passes

    def num_classes(self) -> int | None:
        """Of the source, where that knows; None."""
        return self._source.num_classes() if isinstance(self._source, ds.Dataset) else None

    def reset(self) -> None:
        """Nothing to do: an iterator knows where it is. ``Model.train`` calls this after each epoch."""

    def to_json(self, filename: str = "") -> Any:
        """The pipeline that batches come from, for whoever draws it (``SummaryCollector``)."""
        return self._batch_pipeline([0], max(1, self._per_worker or self._global or 1)).to_json(filename)

    def parse(self, children: Any = None) -> Any:
        raise TypeError(
            "an ElasticDataset is the last part of a pipeline; put map, filter and the like into its source, and give "
            "the size of a batch to the ElasticDataset"
        )

    def __deepcopy__(self, memory: Any) -> Any:
        return self.parse()  # what MindSpore does first where something is behind it

    def _participants(self) -> list[int]:
        wait_for_queue()  # what PyNative mode has queued belongs to the step that is over
        return super()._participants()

    # -- sharding -----------------------------------------------------------------------------------------------------

    def _batch_pipeline(self, indices: list[int], size: pipelines.Sizes) -> ds.Dataset:
        """Over these samples of the present epoch, in this order, in batches."""
        if isinstance(self._source, ds.Dataset):
            pipeline = copy.deepcopy(self._source)
            sampler = ds.SubsetSampler([0])
            sampler.indices = _Numbers(indices if self._chosen is None else [self._chosen[i] for i in indices])
            pipelines.nodes_of(pipeline)[-1].use_sampler(sampler)
            pipeline = pipelines.batched(pipeline, size)
        else:
            pipeline = self._source(indices).batch(size)
        if self._key_column is None:
            return pipeline
        keys = sharding.keys(indices, self._seed, self._cursor.epoch)
        return _beside_leaf(pipeline, ds.NumpySlicesDataset(keys, [self._key_column], shuffle=False))

    def _deal(self) -> tuple[ds.Dataset, NDArray[np.int64]] | None:
        """A pipeline over this worker's batches of the rest of the epoch, and the positions of what comes out of it;
        None at its end."""
        cursor, dealt = self._cursor, self._present()
        if self._shards is None:
            where, lengths = cursor.deal(self.global_batch_size, dealt.members, dealt.rank)
        else:
            rest = sharding.positions(cursor.rest)
            where, lengths = shards.deal(
                rest, self.global_batch_size, cursor.unit, cursor.drop_remainder, self.shards_of
            )
        if lengths.size == 0:
            return None
        even = (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]
        sizes = int(lengths[0]) if even else lambda info: int(lengths[info.get_batch_num()])
        return self._batch_pipeline(self._samples(where), sizes), where

    def _samples(self, where: NDArray[np.int64]) -> list[int]:
        """The numbers of the samples at these positions of the epoch."""
        epoch = self._cursor.epoch
        if self._order[0] != (self._seed, epoch):
            order = sharding.permutation(self._drawn_from, self._seed, epoch, self._shuffle)
            self._order = (self._seed, epoch), order[: self._total]
        samples: list[int] = self._order[1][where].tolist()
        return samples


def _next(batches: Iterator[Any], expected: int, keeps_rows: bool) -> tuple[Any, int]:
    """A pipeline's next batch, which has to have so many samples, and their number. What is mapped over whole batches
    may give other rows; the samples are those that were asked for then, since the dataset's own sampler chose them."""
    batch = next(batches, None)
    given = 0 if batch is None else next(iter(batch.values() if isinstance(batch, dict) else batch)).shape[0]
    if given and not keeps_rows:
        return batch, expected
    if given != expected:
        raise ValueError(
            f"a step takes {expected} samples from the source of this ElasticDataset, which gave {given}; a source "
            "gives each sample that it is asked for, once"
        )
    return batch, given


def _contents_of(
    leaves: Callable[[list[int]], list[ds.Dataset]], total: int, of_all: bool, reads_alike: bool
) -> contents.Contents:
    """UnstableError if the source yields a sample otherwise when it is asked for it again."""
    some = contents.chosen(total)
    # By separate pipelines: a GeneratorDataset yields no more samples than its source has.
    passes = [list(range(total)) if of_all else some, *([] if reads_alike else [some] * (contents.READS - 1))]
    # A source may draw its augmentation from the process's generators, which belong to the program.
    states = random.getstate(), np.random.get_state()
    hashes: dict[int, bytes] = {}
    columns: contents.Columns | None = None
    try:
        for numbers in passes:
            read = leaves(numbers)
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
                    iterator.stop()  # its threads read ahead, and draw from the generators meanwhile
            if rows < len(numbers):
                raise contents.UnstableError(f"the source yielded {rows} of {len(numbers)} samples")
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return contents.made_of(total, hashes, () if columns is None else columns.hashes())


class _Batches:
    """Walks through the epochs of an ElasticDataset, on one stock pipeline while the deal stays the same."""

    def __init__(self, dataset: ElasticDataset, kind: str, num_epochs: int, options: dict[str, Any]) -> None:
        self._dataset, self._kind, self._options = dataset, kind, options
        self._epochs_left = num_epochs
        self._inner: Iterator[Any] | None = None
        self._coming: NDArray[np.int64] = np.empty(0, np.int64)  # positions of what `_inner` has still to deliver
        self._dealt_for: tuple[int, ...] = ()  # what has to be the same for `_inner` to be valid
        dataset._put_back()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        dataset, cursor = self._dataset, self._dataset._cursor
        if self._epochs_left == 0 or dataset.suspended or runtime.detached():
            self.stop()
            raise StopIteration
        goes_on = dataset.driven and dataset._dealt.version == runtime.cluster_version()
        if cursor.taken and goes_on and dataset.shards is not None:
            raise KungFuError(
                "a step of shards ends with its batch: call step_end() behind each; to accumulate gradients over more "
                "samples, deal more shards"
            )
        if cursor.taken and not goes_on:
            dataset.commit(dataset._participants())
        elif dataset.driven is None:
            dataset._reductions.take_commits()  # of no step
        wanted = (runtime.cluster_version(), cursor.epoch, dataset._deals)
        if wanted != self._dealt_for:
            self.stop()
            dealt = dataset._deal()
            if dealt is not None:
                pipeline, self._coming = dealt
                self._inner = getattr(pipeline, self._kind)(num_epochs=1, **self._options)
            self._dealt_for = wanted
        step = dataset._take()
        if step is None and cursor.taken and dataset._passes_left:
            raise KungFuError(
                "gradients were accumulated over the end of a pass of repeat(), whose last batches count as trained "
                "there; apply them before, or train more epochs instead of repeat()"
            )
        if step is None and cursor.taken:  # gradients accumulated to the end of the epoch, which have been applied
            dataset.commit(dataset._participants())
            return next(self)  # what a worker that died had taken is still to be trained
        if step is None:
            return self._end_epoch()
        batch = self._first(step)
        if dataset.driven is not None:
            dataset.driven.begins()
        return batch

    def _first(self, step: sharding.Step) -> Any:
        """What is yielded for the step."""
        return self._receive(max(sharding.count(step.share(self._dataset._dealt.rank)), 1))

    def _receive(self, expected: int) -> Any:
        """The pipeline's next batch, which has to have so many samples."""
        dataset = self._dataset
        assert self._inner is not None
        batch, given = _next(self._inner, expected, dataset._keeps_rows)
        # By what has come, not by what the step says: the audit compares the two.
        if dataset.keeps_ledger:
            dataset._deliver(sharding.ranges(self._coming[:given]))
            self._coming = self._coming[given:]
        return batch

    def _end_epoch(self) -> Any:
        dataset, cursor = self._dataset, self._dataset._cursor
        if cursor.steps == 0:
            raise ValueError(
                f"drop_remainder leaves nothing of {dataset._total} samples where a step takes "
                f"{dataset.global_batch_size}; train smaller batches or fewer workers, or keep the remainder"
            )
        self.stop()
        if dataset._end_epoch():
            self._epochs_left -= 1
            raise StopIteration
        return next(self)

    def stop(self) -> None:
        """Let the pipeline and what it has prefetched go."""
        inner, self._inner, self._dealt_for = self._inner, None, ()
        if inner is not None:
            inner.stop()  # type: ignore[attr-defined]


class ShardBatches(_Batches):
    """The shards of each step, of which the iterator yields the first that this worker is dealt."""

    _yielded: weakref.WeakKeyDictionary[membership.Member, ShardBatches] = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> ShardBatches | None:
        """Which of them has yielded last in this process."""
        return cls._yielded.get(membership.current())

    def _first(self, step: sharding.Step) -> Any:
        dataset = self._dataset
        self._step, self._unit = step, dataset._cursor.unit
        self._length = sharding.count(step.batch)
        self.count = shards.count(self._length, self._unit)
        """Of this step."""
        self.last_share = shards.last_share(self._length, self._unit)
        """What the last of them counts, where the others count 1."""
        self.own = dataset.shards_of(self.count)
        self._coming_shards = list(self.own) or [self.count - 1]
        self.first = self._coming_shards[0]
        """Which of them is yielded."""
        self._parts = 0
        self._batches_by_shard: dict[int, Any] = {}
        self._looked_at: dict[int, tuple[sharding.Range, ...]] = {}  # those of others, which aren't on record
        self._yielded[membership.current()] = self
        return self.batch(self.first)

    @property
    def weights(self) -> list[int]:
        """By rank, of how much each was dealt of this step; none: all alike."""
        return self._dataset._step_weights

    @property
    def next_weights(self) -> list[int]:
        """The same of the next step, as far as it is agreed."""
        return self._dataset._weights_in(self._dataset._dealt)

    def next_key(self) -> tuple[int, int]:
        """The seed and the number of the step, by which random numbers are keyed; another number for each ShardedStep
        that is called with one batch."""
        cursor = self._dataset._cursor
        self._parts += 1
        return self._dataset._seed, cursor.epoch << 40 | self._step.number << 8 | (self._parts - 1) & 255

    @property
    def check(self) -> str:
        """What a shard whose gradients differ leads to: "raise" or "warn"."""
        return self._dataset._shards_check

    def conditions(self) -> dict[str, Any]:
        """As of the dataset."""
        return self._dataset.conditions()

    def check_deal(self, dealt: list[int]) -> None:
        """KungFuError where the runtime deals other shards than the pipeline delivers. (A second ShardedStep on one
        batch may begin after a death in the first.)"""
        if self._parts == 1 and dealt != self.own:
            raise KungFuError(f"shards {dealt} of a step are this worker's, and its data is of shards {self.own}")

    def weigh(self, weights: list[int]) -> None:
        """From the next step on ranks are dealt shards by these."""
        self._dataset.weigh(weights)

    def made(self) -> None:
        """The sum over all shards of the step is there."""
        self._dataset._sums += 1

    def batch(self, shard: int) -> Any:
        """The columns of a shard of this step, as the iterator yields them. Those that this worker was dealt come in
        their order from the pipeline; one of a worker that died, from a pipeline of its own."""
        unit = self._unit
        while shard not in self._batches_by_shard and shard in self._coming_shards:
            coming = self._coming_shards.pop(0)
            self._batches_by_shard[coming] = self._receive(min(unit, self._length - coming * unit))
        dataset = self._dataset
        if shard not in self._batches_by_shard:
            where = sharding.positions(self._step.batch)[shard * unit : (shard + 1) * unit]
            pipeline = dataset._batch_pipeline(dataset._samples(where), unit)
            batches = iter(getattr(pipeline, self._kind)(num_epochs=1, **self._options))
            self._batches_by_shard[shard], _ = _next(batches, len(where), dataset._keeps_rows)
            self._looked_at[shard] = sharding.ranges(where)
        missing = membership.current().core.missing_shards
        if shard in self._looked_at and shard in missing():  # it is trained, now or later
            dataset._deliver(self._looked_at.pop(shard))
        return self._batches_by_shard[shard]
