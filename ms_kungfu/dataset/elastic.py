"""A MindSpore dataset whose samples are dealt to the workers anew whenever the cluster changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, Protocol

import mindspore.dataset as ds
import numpy as np
from numpy.typing import NDArray

from ms_kungfu import env, membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.dataset import sharding
from ms_kungfu.dataset.ledger import ERRORS, Ledger
from ms_kungfu.dataset.source import Source, pipeline_of, size_of
from ms_kungfu.errors import KungFuError
from ms_kungfu.ops import wait_for_queue


class Driver(Protocol):
    """Who counts the steps that are trained of an `ElasticDataset`, and may undo one: `ElasticTraining`."""

    def begins(self) -> None:
        """A step begins, if it hasn't already."""

    def take_participants(self) -> list[int]:
        """The ranks whose samples are in the step that is over."""


@dataclass(frozen=True)
class _Dealt:
    """The cluster to which the steps are dealt at present."""

    version: int
    size: int
    rank: int
    members: tuple[int, ...]  # ranks that aren't known to have died


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
        ledger: a folder in which each worker records what it trained, for ``python -m ms_kungfu.dataset.audit``; by
            default that of ``KUNGFU_LEDGER_DIR``, else nothing is recorded.
        ledger_errors: what a ledger that can't be written (a full disk) does: ``"raise"`` ends training with an
            OSError, ``"warn"`` goes on without a record, which the audit says.

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
    ) -> None:
        super().__init__()
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError(
                "an ElasticDataset has either batch_size (samples of a worker) or global_batch_size (of all workers), "
                f"got batch_size={batch_size!r} and global_batch_size={global_batch_size!r}"
            )
        self._source = source
        self._per_worker = None if batch_size is None else at_least(1, batch_size, "batch_size")
        self._global = None if global_batch_size is None else at_least(1, global_batch_size, "global_batch_size")
        self._total = at_least(1, total, "total") if total is not None else size_of(source)
        self._shuffle, self._seed = bool(shuffle), index(seed)
        self._cursor = sharding.EpochCursor(self._total, drop_remainder)
        self._dealt = _Dealt(-1, 0, 0, ())  # until the first step
        self._reductions = membership.watch_reductions()
        self._deals = 0  # how often what was dealt lost its validity, other than by a new cluster version or epoch
        self._order: tuple[tuple[int, int], Any] = ((-1, -1), None)  # (seed, epoch) and its permutation
        self._weight = 0
        folder = ledger if ledger is not None else env.LEDGER_DIR.get()
        if ledger_errors not in ERRORS:
            raise ValueError(f"ledger_errors is {' or '.join(map(repr, ERRORS))}, got {ledger_errors!r}")
        self._ledger = None if folder is None else Ledger(Path(folder), ElasticDataset._made, ledger_errors)
        self._delivered: list[tuple[sharding.Range, ...]] = []  # to this worker, of the first of the steps taken
        ElasticDataset._made += 1
        self.driven: Driver | None = None  # which calls `commit`
        self.suspended = False  # iterators end at once

    # -- where training is --------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epochs that have been handed out in full, over all iterators."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that are trained, over all workers."""
        return self._total - self._cursor.left

    @property
    def steps(self) -> int:
        """Steps of this epoch that are trained."""
        return self._cursor.steps

    @property
    def weight(self) -> int:
        """Samples of this worker's own in the batches handed out since the last step: what its gradients count. 0 for
        a batch that repeats a sample because the step has fewer samples than there are workers."""
        return self._weight

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that the next step is dealt to: those of the cluster without those that are known to have died."""
        return self._present().members

    def _present(self) -> _Dealt:
        now = runtime.cluster_version(), runtime.current_cluster_size(), runtime.current_rank()
        if now != (self._dealt.version, self._dealt.size, self._dealt.rank):
            self._dealt = _Dealt(*now, members=tuple(range(now[1])))
        return self._dealt

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step at the present size of the cluster."""
        return self._global_batch_of(self._present())

    @global_batch_size.setter
    def global_batch_size(self, samples: int) -> None:
        """Hold it constant from now on, whatever the dataset was made with. At all workers at the same step."""
        self._global, self._per_worker = at_least(1, samples, "global_batch_size"), None
        self._deals += 1

    @property
    def total_samples(self) -> int:
        """Samples of an epoch."""
        return self._total

    @property
    def holds_global_batch(self) -> bool:
        """Whether the batch stays the same when the cluster changes."""
        return self._global is not None

    @property
    def keeps_ledger(self) -> bool:
        """Whether what is trained is recorded."""
        return self._ledger is not None

    def set_batch_size(self, batch_size: int | None = None, global_batch_size: int | None = None) -> None:
        """Other batches from the next one on: of a worker, or of all together; one of the two. At all workers at the
        same step. The rest of the epoch is dealt out anew."""
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("set_batch_size takes batch_size or global_batch_size, one of the two")
        self._per_worker = None if batch_size is None else at_least(1, batch_size, "batch_size")
        self._global = None if global_batch_size is None else at_least(1, global_batch_size, "global_batch_size")
        self._deals += 1

    def commit(self, participants: Sequence[int] | None = None) -> None:
        """Count what was handed out as trained by these ranks (None: by all). What the others took goes back.

        Called at all workers with the same ranks, once the step's outcome is known and before the membership changes.
        """
        if not self._cursor.taken:
            return
        dealt = self._dealt
        if dealt.version != runtime.cluster_version():
            # Handed out in a cluster of other ranks, which a resize by hand has ended since.
            participants = membership.participants_of(dealt.version)
        living = dealt.members if participants is None else tuple(r for r in dealt.members if r in participants)
        if dealt.rank not in living:
            raise KungFuError(f"rank {dealt.rank} lives but took no part in the step of ranks {list(living)}")
        epoch, delivered = self._cursor.epoch, self._delivered
        common = {**self._ledger_common(dealt), "participants": living}
        steps, self._delivered = self._cursor.commit(participants), []
        self._weight = 0
        membership.set_weight(1)  # for reductions that have nothing to do with this dataset
        if living != dealt.members:
            self._dealt = replace(dealt, members=living)
            self._deals += 1
        if self._ledger is not None:
            for step, share in zip(steps, delivered):
                self._ledger.step(epoch, step, dealt.rank, share, common)

    def take_back(self, participants: Sequence[int]) -> None:
        """Hand out again what was handed out, to these ranks alone: the step has been undone.

        Called at all workers with the same ranks, before the membership changes.
        """
        self._put_back()
        self._weight = 0
        membership.set_weight(1)
        self._dealt = replace(self._dealt, members=tuple(r for r in self._dealt.members if r in participants))
        self._deals += 1

    def _participants(self) -> list[int]:
        """Who took part in the step that is over. What PyNative mode has queued belongs to it."""
        wait_for_queue()
        if self.driven is not None:
            return self.driven.take_participants()
        _, partly = self._reductions.take_commits()
        if partly:
            raise KungFuError(
                f"rank {', '.join(map(str, partly))} died between two gradient reductions of a step, so its samples "
                "are in the first update and not in the last; ElasticTraining undoes such a step, a loop without it "
                "can't go on"
            )
        return self._reductions.take_participants()

    def _put_back(self) -> None:
        """What was handed out and doesn't count is handed out again."""
        self._cursor.put_back()
        self._delivered = []

    def _ledger_common(self, dealt: _Dealt) -> dict[str, Any]:
        return {
            "version": dealt.version,
            "size": dealt.size,
            "global_batch": self._global_batch_of(dealt),
            "drop_remainder": self._cursor.drop_remainder,
            "total": self._total,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _global_batch_of(self, dealt: _Dealt) -> int:
        if self._global is not None:
            return self._global
        assert self._per_worker is not None
        return self._per_worker * len(dealt.members)

    def _end_epoch(self) -> None:
        if self._ledger is not None:
            dealt = self._present()
            self._ledger.end(self._cursor, dealt.rank, self._ledger_common(dealt))
        self._cursor.end_epoch()

    def state(self) -> dict[str, Any]:
        """What another worker needs to go on from here; JSON."""
        return {**self._cursor.state(), "seed": self._seed, "batch": [self._per_worker, self._global]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another worker's `state`. ValueError where that worker has other data."""
        self._cursor.restore(state)
        self._delivered = []
        self._seed = state["seed"]
        self._per_worker, self._global = state["batch"]
        self._deals += 1

    # -- what MindSpore calls -----------------------------------------------------------------------------------------

    def get_dataset_size(self) -> int:
        """Steps of the present epoch, those already trained included; with batch_size it depends on the size."""
        cursor = self._cursor
        if self.suspended or runtime.detached():
            return max(cursor.steps, 1)  # Model.train refuses 0
        return max(cursor.steps + sharding.count_steps(cursor.left, self.global_batch_size, cursor.drop_remainder), 1)

    def get_batch_size(self) -> int:
        """Samples of this worker's full batch."""
        members = self.members
        first, last = sharding.block(self.global_batch_size, members.index(runtime.current_rank()), len(members))
        return max(last - first, 1)

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

    def to_json(self, filename: str = "") -> Any:
        """The pipeline that batches come from, for whoever draws it (``SummaryCollector``)."""
        return self._pipeline([0]).batch(max(1, self._per_worker or self._global or 1)).to_json(filename)

    def parse(self, children: Any = None) -> Any:
        raise TypeError(
            "an ElasticDataset is the last part of a pipeline; put map, filter and the like into its source, and give "
            "the size of a batch to the ElasticDataset"
        )

    # -- sharding -----------------------------------------------------------------------------------------------------

    def _pipeline(self, indices: list[int]) -> ds.Dataset:
        return pipeline_of(self._source, indices)

    def _deal(self) -> tuple[ds.Dataset, NDArray[np.int64]] | None:
        """A pipeline over this worker's batches of the rest of the epoch, and the positions of what comes out of it;
        None at its end."""
        cursor, dealt = self._cursor, self._present()
        where, lengths = cursor.deal(self.global_batch_size, dealt.members, dealt.rank)
        if lengths.size == 0:
            return None
        if self._order[0] != (self._seed, cursor.epoch):
            order = sharding.permutation(self._total, self._seed, cursor.epoch, self._shuffle)
            self._order = (self._seed, cursor.epoch), order
        pipeline = self._pipeline(self._order[1][where].tolist())
        if (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]:
            return pipeline.batch(int(lengths[0])), where
        return pipeline.batch(lambda info: int(lengths[info.get_batch_num()])), where

    def _take(self) -> sharding.Step | None:
        """Hands out a step, and tells the runtime what this worker's gradients count from now on."""
        cursor, dealt = self._cursor, self._present()
        step = cursor.take(self.global_batch_size, dealt.members)
        if step is not None:
            self._weight = sum(sharding.count(taken.share(dealt.rank)) for taken in cursor.taken)
            membership.set_weight(self._weight)
        return step


class _Batches:
    """Walks through the epochs of an ElasticDataset, on one stock pipeline while the deal stays the same."""

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
        if cursor.taken and not (dataset.driven and dataset._dealt.version == runtime.cluster_version()):
            dataset.commit(dataset._participants())
        elif dataset.driven is None:
            dataset._reductions.take_commits()  # of no step
        wanted = (runtime.cluster_version(), cursor.epoch, dataset._deals)
        if wanted != self._dealt_for:
            self.stop()
            dealt = dataset._deal()
            if dealt is not None:
                pipeline, self._coming = dealt
                self._inner = getattr(pipeline, self._kind)(**self._options)
            self._dealt_for = wanted
        step = dataset._take()
        if step is None and cursor.taken:  # gradients accumulated to the end of the epoch, which have been applied
            dataset.commit(dataset._participants())
            return next(self)  # what a worker that died had taken is still to be trained
        if step is None:
            return self._end_epoch()
        assert self._inner is not None
        batch = next(self._inner, None)
        expected = max(sharding.count(step.share(dataset._dealt.rank)), 1)
        given = 0 if batch is None else next(iter(batch.values() if isinstance(batch, dict) else batch)).shape[0]
        if given != expected:
            raise ValueError(
                f"a step takes {expected} samples from the source of this ElasticDataset, which gave {given}; a source "
                "gives each sample that it is asked for, once"
            )
        # By what has come, not by what the step says: the audit compares the two.
        if dataset.keeps_ledger:
            dataset._delivered.append(sharding.ranges(self._coming[:given]))
            self._coming = self._coming[given:]
        if dataset.driven is not None:
            dataset.driven.begins()
        return batch

    def _end_epoch(self) -> Any:
        dataset, cursor = self._dataset, self._dataset._cursor
        if cursor.steps == 0:
            raise ValueError(
                f"drop_remainder leaves nothing of {dataset._total} samples where a step takes "
                f"{dataset.global_batch_size}; train smaller batches or fewer workers, or keep the remainder"
            )
        self.stop()
        self._epochs_left -= 1
        dataset._end_epoch()
        raise StopIteration

    def stop(self) -> None:
        """Let the pipeline and what it has prefetched go."""
        inner, self._inner, self._dealt_for = self._inner, None, ()
        if inner is not None:
            inner.stop()  # type: ignore[attr-defined]
