"""A MindSpore dataset whose samples are dealt to the workers anew whenever the cluster changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore.dataset as ds

from ms_kungfu import env, membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.dataset import contents, pipelines, replaying, sharding
from ms_kungfu.dataset.batches import Batches, ShardBatches
from ms_kungfu.dataset.conditions import of_machine
from ms_kungfu.dataset.ledger import ERRORS, Ledger
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.dataset.source import Given, Source

_FINGERPRINTS = 50  # steps; the checksums of LeNet's half a megabyte take 0.3 ms, a step several
_log = logging.getLogger(__name__)


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
        source: Given,
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
        self._source = (
            Source(source, None, key_column) if pipeline is None
            else Source(pipeline.samples, pipeline.chosen, key_column)
        )  # fmt: skip
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
            drawn_from=None if pipeline is None else pipeline.drawn_from,
        )  # fmt: skip
        sharded, replay = shards is not None, replaying.current()
        if replay is not None:
            self._recording.ledger = replay.begin(ElasticDataset._made, self.conditions) if sharded else None
        elif folder is not None:
            conditions = self.conditions if sharded else None
            self._recording.ledger = Ledger(
                Path(folder), ElasticDataset._made, ledger_errors,
                sharded=sharded, conditions=conditions, fingerprints=every, contents=lambda: self.contents,
            )  # fmt: skip
        ElasticDataset._made += 1

    def conditions(self) -> dict[str, Any]:
        """What the bits of training depend on besides its program: versions of MindSpore, NumPy and ms_kungfu,
        processor and instruction set, cores a worker, shards, global batch and seed; JSON. Without shards nothing,
        since they depend on the cluster, too."""
        if self.shards is None:
            return {}
        own = {"shards": self.shards, "global_batch": self._batch.of_all, "seed": self._seed}
        return {**of_machine(membership.fixed_core_count()), **own}

    def read_contents(self) -> None:
        """Read the samples that the workers compare, once."""
        if self._contents_are_read or self._contents_check == "none":
            return
        self._contents_are_read = True
        of_all = self._contents_check == "all"
        try:
            self.contents = self._source.contents(self._order.drawn_from, of_all)
        except contents.UnstableError as error:
            if of_all:
                raise ValueError(f"contents_check='all': {error}; give 'some', or 'none'") from error
            _log.info("ElasticDataset: workers compare samples by number, not by content: %s", error)

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
        if self.shards is not None:
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

    def _batches(self, *arguments: Any) -> Batches:
        if self.shards is None:
            return Batches(self, self._source, *arguments)
        batches = ShardBatches(self, self._source, *arguments)
        batches.check = self._shards_check
        return batches

    def get_col_names(self) -> list[str]:
        return self._full_batch().get_col_names()

    def output_shapes(self, estimate: bool = False) -> list[Any]:
        return self._full_batch().output_shapes(estimate)

    def output_types(self) -> list[Any]:
        return self._full_batch().output_types()

    def _full_batch(self) -> ds.Dataset:
        """A pipeline over one: what is mapped over batches may not take any other."""
        batch = self.get_batch_size()
        return self._source.batches([0] * batch, batch, self._seed, self._cursor.epoch)

    def get_repeat_count(self) -> int:
        """Passes over the samples in an epoch."""
        return self._passes

    def num_classes(self) -> int | None:
        """Of the source, where that knows; None."""
        return self._source.num_classes()

    def reset(self) -> None:
        """Nothing to do: an iterator knows where it is. ``Model.train`` calls this after each epoch."""

    def to_json(self, filename: str = "") -> Any:
        """The pipeline that batches come from, for whoever draws it (``SummaryCollector``)."""
        return self._source.batches([0], self._batch.of(1), self._seed, self._cursor.epoch).to_json(filename)

    def parse(self, children: Any = None) -> Any:
        raise TypeError(
            "an ElasticDataset is the last part of a pipeline; put map, filter and the like into its source, and give "
            "the size of a batch to the ElasticDataset"
        )

    def __deepcopy__(self, memory: Any) -> Any:
        return self.parse()  # what MindSpore does first where something is behind it
