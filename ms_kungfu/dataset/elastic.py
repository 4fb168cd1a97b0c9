"""A MindSpore dataset that partitions its samples again whenever the cluster changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import mindspore.dataset as ds

from ms_kungfu import env, membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.dataset import batch_sizes, contents, pipelines, replaying, shard_choice, sharding
from ms_kungfu.dataset.batches import Batches, ShardBatches
from ms_kungfu.dataset.conditions import of_machine
from ms_kungfu.dataset.ledger import ERRORS, Ledger
from ms_kungfu.dataset.shares import Shares, steps_left
from ms_kungfu.dataset.source import Given, Source

_FINGERPRINTS = 50  # steps between checksums. For LeNet (0.5 MB) these take 0.3 ms, and a step takes several ms.
_log = logging.getLogger(__name__)


def _global_batch(pipeline: pipelines.Pipeline, shuffle: bool) -> int:
    """Return the global batch size of a pipeline whose own batch size applies to each worker.

    On a joining worker, the result may be wrong, but the worker receives the correct number with the rest of the state.
    """
    assert pipeline.batch_size is not None
    workers = env.START_SIZE.get() or runtime.current_cluster_size()
    if pipeline.num_shards not in (None, 1, env.WORLD_SIZE.get()):  # a number that isn't the cluster size
        workers = pipeline.num_shards
    samples = pipeline.batch_size * workers
    if env.RANK_ID.get() == 0:
        order = "permutation" if shuffle else "sequential"
        _log.info(
            "dataset: global_batch_size=%d batch=%d workers=%d order=%s. The global batch stays the same "
            "at any cluster size; with batch_size=%d it would grow with the number of workers",
            samples, pipeline.batch_size, workers, order, pipeline.batch_size,
        )  # fmt: skip
    return samples


class ElasticDataset(Shares, ds.Dataset):
    """A dataset that partitions its samples among the workers, for ``Model.train`` and for custom loops.

    Every sample is used once per epoch, even if the cluster changes. After a resize or a failure,
    the rest of the epoch is partitioned again, beginning after the last *committed* step. So the
    new partition also replaces batches that MindSpore had prefetched. If a worker fails and a step
    is committed without it, that worker's samples of the step are used later in the epoch. The
    epoch may then have one additional step.

    Epochs end at the same step on all workers. `ms_kungfu.dataset.sharding` describes how an epoch is
    divided into steps and shares, including the last samples. Shares may differ in size, for example
    with 3 workers and a global batch of 32. A worker's gradients are weighted by its number of samples,
    so the mean over the workers equals the mean over the samples.

    A batch counts as trained when ``ElasticTraining.step_end`` is called. Without ``ElasticTraining``
    it counts as trained when the loop requests the next batch, or when the epoch ends. So if you
    accumulate gradients over several batches, apply them before the epoch ends. If your program calls
    ``ms_kungfu.resize`` itself, call it between a batch's update and the next batch. On a worker that
    has left the cluster, an iterator ends immediately.

    Args:
        source: the samples, as a pipeline or a function. A MindSpore pipeline reads a dataset with
            a sampler (``MnistDataset``, ``Cifar10Dataset``, ``MindDataset``, ``GeneratorDataset``
            over an indexable, ...), with any number of ``map`` operations. Write the pipeline for
            one process or for a fixed number of processes. `ElasticDataset` removes a final
            ``batch``, ``padded_batch`` or ``repeat``, and also ``shuffle`` and ``num_shards``, from
            the pipeline, and provides their effects itself (docs/data.md). A function accepts a
            list of sample numbers and returns an unbatched pipeline that yields these samples in
            this order.
        batch_size: number of samples per worker in a step. The global batch grows and shrinks with the
            cluster.
        global_batch_size: number of samples of all workers together in a step. The number stays
            constant, so training consists of the same steps over the same samples at any cluster
            size. Pass either `batch_size` or `global_batch_size`, or neither if `source` has a
            ``batch(b)``. In the last case, the global batch is b times the number of workers with
            which the job began. If `source` has `num_shards`, the global batch is b times
            `num_shards` instead.
        total: number of samples; required if `source` is a function.
        shuffle: if true, each epoch uses a new permutation of all samples, which depends only on `seed`
            and the epoch. If false, each epoch uses the source's own order.
        seed: seed of the permutations and of `key_column`.
        drop_remainder: whether to leave out the samples at the end of an epoch that don't fill a
            global batch. By default these samples are used, unless `source` has a ``batch(...,
            drop_remainder=True)``.
        ledger: a folder in which each worker records the samples it trained on, for ``python -m
            ms_kungfu.dataset.audit``. The default is ``KUNGFU_LEDGER_DIR``. If that variable isn't
            set either, nothing is recorded.
        ledger_errors: what happens if the ledger can't be written, for example because the disk is
            full. ``"raise"`` ends training with an OSError. ``"warn"`` continues training without a
            record, and the audit reports the missing record.
        shards: partition each step into this number of shards of equal shape. The number must divide
            `global_batch_size`. The exact results of training then don't depend on the cluster (see
            docs/shards.md). In each step, an iterator yields the first of the shards that are assigned
            to this worker. Model.train or `ms_kungfu.elastic.ShardedStep` then computes the whole step
            from that shard. With ``"auto"``, `KungFuElasticCallback` chooses the number when
            ``Model.train`` begins, or trains without shards and logs the reason
            (docs/shards-details.md). In your own loops, ``"auto"`` means no shards.
        shards_check: what happens if a second computation of a shard yields different gradients, or
            if workers have different versions, instruction sets or numbers of cores. ``"raise"``
            ends training with a DivergenceError; ``"warn"`` logs a warning and continues. With
            ``shards="auto"``, the value is always ``"warn"``.
        key_column: the name of an extra last column of the source's own dataset, which its ``map``
            operations may use. The column is uint32 of shape ``(4,)``. It depends only on `seed`,
            epoch and sample, and differs for each sample and epoch. Random numbers that a ``map``
            function generates with ``np.random.default_rng(key)`` are the same on every worker, and
            don't change if the step is repeated. If no ``map`` uses the column, it is yielded with
            the other columns. See docs/data.md.
        ledger_fingerprints: with `shards`, the interval in steps at which a checksum of each trained
            tensor is recorded: 50 by default, 0 for never. ``python -m ms_kungfu.replay`` uses the
            checksums to find the first step that differs in another run. `ElasticTraining` and
            `KungFuElasticCallback` compute the checksums.
        contents_check: which samples the workers compare by content when training begins:
            ``"some"`` (eight samples), ``"all"`` or ``"none"``. The default is
            ``KUNGFU_CONTENTS_CHECK``, or ``"some"`` if that isn't set. A worker that joins or
            resumes compares its samples with those with which training began. If they differ, an
            error names the sample numbers. The samples are compared as the source's own dataset
            yields them, before ``map``. If a process's reads of one sample differ, the workers
            don't compare contents; with ``"all"`` this raises a ValueError.

    Raises:
        TypeError: if `source` is neither a pipeline nor a function.
        ValueError: for an invalid argument or combination of arguments.
    """

    _made = 0  # Joining workers run the program from the beginning, so they number datasets as the other workers do.

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
        shards: int | Literal["auto"] | None = None,
        shards_check: str = "raise",
        key_column: str | None = None,
        ledger_fingerprints: int | None = None,
        contents_check: str | None = None,
    ) -> None:
        ds.Dataset.__init__(self)
        if not (isinstance(source, ds.Dataset) or callable(source)):
            raise TypeError(
                "the source of an ElasticDataset must be a mindspore.dataset pipeline, or a function that takes sample "
                f"numbers, not {type(source).__name__}; for arrays, use mindspore.dataset.NumpySlicesDataset"
            )
        pipeline = pipelines.take_apart(source) if isinstance(source, ds.Dataset) else None
        self._source = (
            Source(source, None, key_column) if pipeline is None
            else Source(pipeline.samples, pipeline.chosen, key_column)
        )  # fmt: skip
        folder = ledger if ledger is not None else env.LEDGER_DIR.get()
        if ledger_errors not in ERRORS:
            raise ValueError(f"ledger_errors must be {' or '.join(map(repr, ERRORS))}, got {ledger_errors!r}")
        if shards_check not in ("raise", "warn"):
            raise ValueError(f"shards_check must be 'raise' or 'warn', got {shards_check!r}")
        if shards is None and shards_check != "raise":
            raise ValueError("shards_check requires shards")
        self.awaits_shards = self.shards_are_chosen = isinstance(shards, str)
        """Whether the number of shards must still be chosen (``shards="auto"``)."""
        self._chosen_shards: int | None = None
        self._logged_shards: int | None = None
        if isinstance(shards, str):
            if shards != "auto":
                raise ValueError(f"shards must be a number, 'auto' or None, got {shards!r}")
            shards, shards_check = None, "warn"
        self._shards_check = shards_check
        self._contents_check = env.CONTENTS_CHECK.get() if contents_check is None else contents_check
        if self._contents_check not in contents.CHECKS:
            raise ValueError(
                f"contents_check must be {', '.join(map(repr, contents.CHECKS[:-1]))} or "
                f"{contents.CHECKS[-1]!r}, got {self._contents_check!r}"
            )
        self._contents_are_read = False
        every = _FINGERPRINTS
        if ledger_fingerprints is not None:
            every = at_least(0, ledger_fingerprints, "ledger_fingerprints")
            if shards is None and not self.awaits_shards:
                raise ValueError(
                    "ledger_fingerprints requires shards, because without shards the results depend on the cluster"
                )
        samples, passes = (None, 1) if pipeline is None else (pipeline.total, pipeline.passes)
        if total is not None:
            samples = at_least(1, total, "total")
        if samples is None:
            raise ValueError("the source of this ElasticDataset is a function; give total=, the number of samples")
        if pipeline is not None and pipeline.batch_size is not None:
            drop_remainder = drop_remainder or pipeline.drop_remainder
            if batch_size is None and global_batch_size is None:
                global_batch_size = _global_batch(pipeline, shuffle)
        Shares.__init__(
            self, samples, batch_size, global_batch_size,
            shuffle=shuffle, seed=seed, drop_remainder=drop_remainder, shards=shards, passes=passes,
            drawn_from=None if pipeline is None else pipeline.drawn_from,
        )  # fmt: skip
        self._number = number = ElasticDataset._made
        ElasticDataset._made += 1

        def open_ledger() -> None:
            sharded, replay = self.shards is not None, replaying.current()
            if replay is not None:
                self._recording.ledger = replay.begin(number, self.conditions) if sharded else None
            elif folder is not None:
                conditions = self.conditions if sharded else None
                self._recording.ledger = Ledger(
                    Path(folder), number, ledger_errors,
                    sharded=sharded, conditions=conditions, fingerprints=every, contents=lambda: self.contents,
                )  # fmt: skip

        self._open_ledger = open_ledger
        if not self.awaits_shards:
            open_ledger()

    def choose_shards(self, shards: int | None, reason: str = "") -> None:
        """Set the number of shards for ``shards="auto"``.

        All workers must make this call before the first step, with the same number. Later calls do
        nothing.

        Args:
            shards: the number of shards, or None for no shards.
            reason: why there are no shards, for the log.
        """
        if not self.awaits_shards:
            return
        self.awaits_shards = False
        replay = replaying.current()
        if replay is not None:  # use the number of the recorded run
            units = [step.unit for step in replay.orders.recorded if step.data == self._number]
            shards = (self._batch.of_all or 0) // units[0] if units else None
        if shards is not None and not 0 <= self._seed < 1 << 64:
            shards, reason = None, f"the seed {self._seed} isn't a number of 64 bits"
        self.partition_into(shards)
        self._chosen_shards = shards
        self._open_ledger()
        if shards is None and env.RANK_ID.get() == 0 and not membership.is_joining():
            _log.info('dataset: shards=none reason="%s"', reason)

    def begin_with_chosen_shards(self) -> None:
        """Undo `keep_all_busy` when a training call begins.

        All workers then begin the call with the same number of shards.
        """
        if self._chosen_shards is not None and self._batch.of_all is not None:
            shards = shard_choice.more(self._batch.of_all, 1, self._chosen_shards)
            if shards != self.shards:
                self.set_batch_size(global_batch_size=self._batch.of_all, shards=shards)

    def keep_all_busy(self) -> None:
        """Use more shards if there are more workers than shards.

        The method logs a new number, and does nothing unless ``shards="auto"`` has chosen a number.
        All workers must make this call after each change of the cluster, before the next step.
        """
        size, batch = runtime.current_cluster_size(), self._batch.of_all
        if not self.shards_are_chosen or self.shards is None or batch is None:
            return
        shards = shard_choice.more(batch, self.shards, size)
        if shards != self.shards:
            self.set_batch_size(global_batch_size=batch, shards=shards)
        if self.shards != self._logged_shards and runtime.current_rank() == 0:
            _log.info("dataset: shards=%d samples=%d", self.shards, self._cursor.unit)
        self._logged_shards = self.shards

    def conditions(self) -> dict[str, Any]:
        """Return the settings, besides the program, on which the exact results of training depend, as JSON.

        Returns:
            Versions of MindSpore, NumPy and ms_kungfu, processor and instruction set, cores per worker,
            shards, global batch and seed. The result is empty if there are no shards.
        """
        if self.shards is None:
            return {}
        own = {"shards": self.shards, "global_batch": self._batch.of_all, "seed": self._seed}
        return {**of_machine(membership.fixed_core_count()), **own}

    def read_contents(self) -> None:
        """Read the samples whose contents the workers compare.

        Further calls do nothing.

        Raises:
            ValueError: with ``contents_check="all"``, if a sample differs from one read to the next.
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
        """Return the number of steps in the current epoch, including steps already trained.

        With `batch_size`, the number of steps depends on the size of the cluster.
        """
        if self.suspended or runtime.detached():
            return max(self.steps, 1)  # Model.train rejects 0
        return max(self.steps + steps_left(self), 1)

    def get_batch_size(self) -> int:
        """Return the number of samples in this worker's full batch."""
        if self.shards is not None:
            return self._cursor.unit
        members = self.members
        step = sharding.Step(0, ((0, self.global_batch_size),), members, self._cursor.ranks)
        return max(sharding.count(step.share(runtime.current_rank())), 1)

    def batch_sizes(self) -> list[int]:
        """Return the batch sizes for which to compile this worker's step.

        In GRAPH mode, MindSpore compiles a step for each batch shape. `Model.train` compiles the step in
        advance for likely changes of the cluster. A loop of your own can do the same in `prepare`.

        Returns:
            Numbers of samples, without duplicates. The first is `get_batch_size()`. The other
            numbers can occur after another worker has failed, including at the end of an epoch.
            With `shards`, the result is `shard_sizes()`, because no failure changes the size of a
            shard.
        """
        if self.shards is not None:
            return self.shard_sizes()
        found = [self.get_batch_size()]
        if self.holds_global_batch:
            rank, size = runtime.current_rank(), runtime.current_cluster_size()
            found += batch_sizes.after_a_failure(self.same_at_all(), self.global_batch_size, rank, size)
        return list(dict.fromkeys(found))

    def shard_sizes(self) -> list[int]:
        """Return the number of samples per shard in this epoch.

        The dataset must have `shards`. The result is the size of a full shard. If the epoch's last shard
        is smaller, the result also contains the size of that shard.
        """
        unit = self._cursor.unit
        rest = 0 if self._cursor.drop_remainder else self._total % unit
        return [unit, rest] if rest else [unit]

    def create_tuple_iterator(
        self, columns: Any = None, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Any]:
        """Yield this worker's batches as lists of columns.

        Args:
            columns: the names of the columns to yield; by default, all columns.
            num_epochs: the number of epochs; -1 means unlimited.
            output_numpy: yield NumPy arrays instead of tensors.
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
            num_epochs: the number of epochs; -1 means unlimited.
            output_numpy: yield NumPy arrays instead of tensors.
            do_copy: as in MindSpore.

        Returns:
            The iterator.
        """
        options = {"output_numpy": output_numpy, "do_copy": do_copy}
        return self._batches("create_dict_iterator", num_epochs, options)

    def _batches(self, *arguments: Any) -> Batches:
        self.choose_shards(None, "the dataset isn't trained by Model.train with a KungFuElasticCallback")
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
        """Return a pipeline over one full batch, because a function mapped over batches may accept no other size."""
        batch = self.get_batch_size()
        return self._source.batches([0] * batch, batch, self._seed, self._cursor.epoch)

    def get_repeat_count(self) -> int:
        """Return the number of passes over the samples per epoch."""
        return self._passes

    def num_classes(self) -> int | None:
        """Return the number of classes of the source, or None if the source doesn't provide it."""
        return self._source.num_classes()

    def reset(self) -> None:
        """Do nothing when ``Model.train`` calls this, because each iterator has its own position."""

    def to_json(self, filename: str = "") -> Any:
        """Return the pipeline as JSON, for `SummaryCollector`, and write it to `filename` if given."""
        return self._source.batches([0], self._batch.of(1), self._seed, self._cursor.epoch).to_json(filename)

    def parse(self, children: Any = None) -> Any:
        """Reject `children` and never return, because no operation may follow an ElasticDataset.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an ElasticDataset must be the last part of a pipeline; put map and similar operations into its source, "
            "pass the batch size to ElasticDataset, and iterate over it instead of data_sink, which hides the steps"
        )

    def __deepcopy__(self, memory: Any) -> Any:
        return self.parse()  # MindSpore calls this if an operation follows
