"""A MindSpore dataset whose samples are partitioned again whenever the cluster changes."""

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
    """Return the samples of a step by the pipeline's own batch, which is a worker's.

    If it is wrong at a joining worker, that worker receives the number with the rest of the state.
    """
    assert pipeline.batch_size is not None
    workers = env.START_SIZE.get() or runtime.current_cluster_size()
    if pipeline.num_shards not in (None, 1, env.WORLD_SIZE.get()):  # a number of the program's own, not the size
        workers = pipeline.num_shards
    samples = pipeline.batch_size * workers
    if env.RANK_ID.get() == 0:
        order = "permutation" if shuffle else "sequential"
        _log.info(
            "dataset: global_batch_size=%d batch=%d workers=%d order=%s. The global batch stays at any size of the "
            "cluster; batch_size=%d would let it grow with the workers",
            samples, pipeline.batch_size, workers, order, pipeline.batch_size,
        )  # fmt: skip
    return samples


class ElasticDataset(Shares, ds.Dataset):
    """This worker's share of a global order of samples, for ``Model.train`` and for loops of your own.

    Every sample is trained once an epoch, whatever happens in between. After a resize or a failure the
    rest of the epoch is partitioned again from the end of the *trained* steps. So batches that
    MindSpore had prefetched come from the new partition. A failed worker's samples of a step that was
    committed without it are trained later in the epoch, which may have a step more then.

    Epochs end at the same step on all workers. `ms_kungfu.dataset.sharding` says how an epoch is cut
    and partitioned, the tail included. Shares may differ in size (3 workers, a global batch of 32). A
    worker's gradients count by the number of its samples, so the mean over the workers is that over the
    samples.

    A batch counts as trained at ``ElasticTraining.step_end``, or, without one, when the loop asks for
    the next batch. It also counts when its epoch ends, so apply gradients that are accumulated over
    several batches before that. A program that calls ``ms_kungfu.resize`` itself does so between a
    batch's update and the next batch. On a worker that has left the cluster an iterator ends at once.

    Args:
        source: the samples, as a pipeline or a function. A pipeline of MindSpore goes over a dataset
            with a sampler (``MnistDataset``, ``Cifar10Dataset``, ``MindDataset``, ``GeneratorDataset``
            over an indexable, ...), with any ``map``. It is written for one process or for a fixed
            number of them. A final ``batch``, ``padded_batch`` or ``repeat``, ``shuffle`` and
            ``num_shards`` are taken off it, and their meaning is kept (docs/data.md). A function takes
            a list of sample numbers, and returns an unbatched pipeline that yields these samples in
            this order.
        batch_size: samples a worker trains in a step; the global batch grows and shrinks with the
            cluster.
        global_batch_size: samples that all workers together train in a step, held constant instead.
            Training takes the same steps over the same samples at any size. Give one of the two, or
            neither if `source` has a ``batch(b)``. Then it is b for each worker that the job began
            with, or for each of the `num_shards` of `source`.
        total: number of samples; needed if `source` is a function.
        shuffle: a new permutation of all samples each epoch, a function of (`seed`, epoch); else their
            own order.
        seed: of the permutations, and of `key_column`.
        drop_remainder: leave out what doesn't fill a global batch at the end of an epoch. By default it
            is trained, except with a `source` that has a ``batch(..., drop_remainder=True)``.
        ledger: a folder in which each worker records what it trained, for ``python -m
            ms_kungfu.dataset.audit``. By default that of ``KUNGFU_LEDGER_DIR``; without one nothing is
            recorded.
        ledger_errors: what a ledger that can't be written (a full disk) does. ``"raise"`` ends training
            with an OSError; ``"warn"`` goes on without a record, and the audit says so.
        shards: partition each step into so many shards of one shape, which divide `global_batch_size`.
            The bits of training don't depend on the cluster then: docs/shards.md. An iterator yields
            the first shard of each step that this worker is assigned. Model.train, or
            `ms_kungfu.elastic.ShardedStep`, takes it for the whole.
        shards_check: what happens if a shard that is computed a second time has other gradients, and
            the bits depend on more than the seed. Also if workers have other versions, instruction sets
            or cores. ``"raise"`` ends training with a DivergenceError; ``"warn"`` goes on.
        key_column: the name of a last column of the source's own dataset, which its maps may take. It
            is uint32 of shape ``(4,)``, a function of (`seed`, epoch, sample) alone, and different for
            each. What a map draws from ``np.random.default_rng(key)`` is the same at any worker,
            however often it is made. A column that no map takes comes out with the others. See
            docs/data.md.
        ledger_fingerprints: with `shards`, the steps between two that are recorded with a checksum of
            each tensor that training changes. ``python -m ms_kungfu.replay`` finds the first step that
            differs in another run by them. By default 50, 0 for none. `ElasticTraining` and
            `KungFuElasticCallback` make them.
        contents_check: which samples the workers compare by their content as training begins:
            ``"some"`` (eight), ``"all"`` or ``"none"``. A worker that joins or resumes compares with
            those that training began with. By default that of ``KUNGFU_CONTENTS_CHECK``, else
            ``"some"``. A difference is rejected, with the samples' numbers. The workers compare what
            the source's own dataset yields, below its maps. If that differs from one read to the next
            it is left out, and with ``"all"`` it is a ValueError.

    Raises:
        TypeError: if `source` is no pipeline and no function.
        ValueError: for arguments that don't fit, or don't fit together.
    """

    _made = 0  # a joining worker runs the program from its start, so it counts its datasets as the others do

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
        """Return what the bits of training depend on besides its program, as JSON.

        Returns:
            Versions of MindSpore, NumPy and ms_kungfu, processor and instruction set, cores a worker,
            shards, global batch and seed. Without shards it is empty, since the bits depend on the cluster,
            too.
        """
        if self.shards is None:
            return {}
        own = {"shards": self.shards, "global_batch": self._batch.of_all, "seed": self._seed}
        return {**of_machine(membership.fixed_core_count()), **own}

    def read_contents(self) -> None:
        """Read the samples that the workers compare, once.

        Raises:
            ValueError: with ``contents_check="all"``, if samples differ from one read to the next.
        """
        if self._contents_are_read or self._contents_check == "none":
            return
        self._contents_are_read = True
        of_all = self._contents_check == "all"
        try:
            self.contents = self._source.contents(self._order.drawn_from, of_all)
        except contents.UnstableError as error:
            if of_all:
                raise ValueError(f"contents_check='all': {error}; give 'some', or 'none'") from error
            _log.info('dataset: contents_check=none reason="%s". Workers compare samples by number', error)

    # -- MindSpore's interface -----------------------------------------------------------------------------------------

    def get_dataset_size(self) -> int:
        """Return the steps of the present epoch, those already trained included.

        With `batch_size` it depends on the size of the cluster.
        """
        cursor, batch = self._cursor, self.global_batch_size
        if self.suspended or runtime.detached():
            return max(self.steps, 1)  # Model.train refuses 0
        coming = sharding.count_steps(cursor.left, batch, cursor.drop_remainder)
        coming += self._passes_left * sharding.count_steps(self._total, batch, cursor.drop_remainder)
        return max(self.steps + coming, 1)

    def get_batch_size(self) -> int:
        """Return the samples of this worker's full batch."""
        if self.shards is not None:
            return self._cursor.unit
        members = self.members
        step = sharding.Step(0, ((0, self.global_batch_size),), members, self._cursor.ranks)
        return max(sharding.count(step.share(runtime.current_rank())), 1)

    def shard_sizes(self) -> list[int]:
        """Return how many samples the shards of an epoch have.

        All have the same, except for the epoch's last one. With `shards` only.
        """
        unit = self._cursor.unit
        rest = 0 if self._cursor.drop_remainder else self._total % unit
        return [unit, rest] if rest else [unit]

    def create_tuple_iterator(
        self, columns: Any = None, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Any]:
        """Yield this worker's batches as lists of columns.

        Args:
            columns: the names of the columns; by default all.
            num_epochs: how many epochs; -1: no end.
            output_numpy: NumPy arrays instead of tensors.
            do_copy: as in MindSpore.

        Returns:
            The iterator.
        """
        options = {"columns": columns, "output_numpy": output_numpy, "do_copy": do_copy}
        return self._batches("create_tuple_iterator", num_epochs, options)

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Any]:
        """Yield this worker's batches as dictionaries.

        Args:
            num_epochs: how many epochs; -1: no end.
            output_numpy: NumPy arrays instead of tensors.
            do_copy: as in MindSpore.

        Returns:
            The iterator.
        """
        options = {"output_numpy": output_numpy, "do_copy": do_copy}
        return self._batches("create_dict_iterator", num_epochs, options)

    def _batches(self, *arguments: Any) -> Batches:
        if self.shards is None:
            return Batches(self, self._source, *arguments)
        batches = ShardBatches(self, self._source, *arguments)
        batches.check = self._shards_check
        return batches

    def get_col_names(self) -> list[str]:
        """Return the names of the columns."""
        return self._full_batch().get_col_names()

    def output_shapes(self, estimate: bool = False) -> list[Any]:
        """Return the shapes of the columns of this worker's full batch.

        Args:
            estimate: as in MindSpore.
        """
        return self._full_batch().output_shapes(estimate)

    def output_types(self) -> list[Any]:
        """Return the dtypes of the columns."""
        return self._full_batch().output_types()

    def _full_batch(self) -> ds.Dataset:
        """Return a pipeline over one full batch: a function mapped over batches may accept no other."""
        batch = self.get_batch_size()
        return self._source.batches([0] * batch, batch, self._seed, self._cursor.epoch)

    def get_repeat_count(self) -> int:
        """Return the passes over the samples in an epoch."""
        return self._passes

    def num_classes(self) -> int | None:
        """Return the number of classes of the source, or None if that doesn't know it."""
        return self._source.num_classes()

    def reset(self) -> None:
        """Do nothing: an iterator knows its position. ``Model.train`` calls this after each epoch."""

    def to_json(self, filename: str = "") -> Any:
        """Return the pipeline of the batches, which `SummaryCollector` draws; also write it to `filename`."""
        return self._source.batches([0], self._batch.of(1), self._seed, self._cursor.epoch).to_json(filename)

    def parse(self, children: Any = None) -> Any:
        """Reject `children`, and never return: an ElasticDataset is the last part of a pipeline.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an ElasticDataset is the last part of a pipeline; put map, filter and the like into its source, and give "
            "the size of a batch to the ElasticDataset"
        )

    def __deepcopy__(self, memory: Any) -> Any:
        return self.parse()  # what MindSpore does first if an operation follows it
