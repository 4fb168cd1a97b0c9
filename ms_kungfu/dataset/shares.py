"""Assign shares of the samples to a worker. The samples have the same order on all workers.

`Shares` decides which samples a worker receives, which samples count as trained and which go back
to the pool. `Shares` doesn't depend on MindSpore, but its subclass `ElasticDataset` does. All
workers must make the same calls at the same steps.

`Shares` accepts the arguments of `ElasticDataset`, and also `passes`, the number of passes over all
samples per epoch. The ledger counts each pass as a separate epoch, in which each sample is used
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ms_kungfu import membership, runtime
from ms_kungfu.dataset import contents, shard_choice, sharding, shards
from ms_kungfu.dataset.contents import Contents
from ms_kungfu.dataset.dealing import BatchSize, Dealing, Dealt, members_of_a_step_of_shards
from ms_kungfu.dataset.recording import Record, Recording
from ms_kungfu.errors import KungFuError


class Driver(Protocol):
    """The interface of `ElasticTraining`, which counts the trained steps of a dataset and may undo a step."""

    def begins(self) -> None:
        """Begin a step, unless a step is already running."""

    def take_participants(self) -> list[int]:
        """Return the ranks whose samples are in the step that has ended."""


class Shares:
    """Assign the samples of a dataset to the workers. Assign them again whenever the cluster changes."""

    weight = 0
    """Number of this worker's samples since the last step, which is the weight of its gradients.

    If the worker only repeats another worker's sample, the number is 0.
    """
    step_shards: tuple[int, ...] = ()
    """Number of samples in each shard of the last assigned step; empty if there are no shards."""
    shards_are_chosen = False
    """Whether ms_kungfu chooses the number of shards (``shards="auto"``)."""
    contents: Contents | None = None
    """The sample hashes that the workers compare.

    None before `read_contents`, or if contents aren't compared.
    """

    def __init__(
        self,
        total: int,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_remainder: bool = False,
        ledger: Record | None = None,
        shards: int | None = None,
        passes: int = 1,
        drawn_from: int | sharding.Drawing | None = None,
    ) -> None:
        self._cursor = sharding.EpochCursor(total, drop_remainder)
        self._hold(BatchSize(batch_size, global_batch_size, shards))
        self._total = total
        self._passes, self._steps_before = passes, 0  # `_steps_before`: steps in this epoch's finished passes
        self._seed = index(seed)
        if shards is not None and not 0 <= self._seed < 1 << 64:
            raise ValueError(f"with shards, seed must be at least 0 and below 2**64, got {seed}")
        self._order = sharding.Order(total, drawn_from or total, shuffle)
        self._dealing = Dealing(self._cursor, shards is not None)
        self._recording = Recording(ledger)
        self._step_weights: list[int] = []  # weights by rank, used to assign this step's shards
        self.weight = self._sums = 0  # _sums: how many ShardedSteps have run on this step
        self._as_dealt: dict[str, Any] = {}  # ledger entries of the current sharded step
        self.training: tuple[str, int] | None = None
        """For the ledger: the checkpoint folder and the job's number in that folder; None without checkpoints."""
        self.driven: Driver | None = None  # if set, this driver calls `commit`
        self.suspended = False  # if true, no more steps are assigned

    @property
    def epoch(self) -> int:
        """Number of finished epochs, counted over all iterators."""
        return self._cursor.epoch // self._passes

    @property
    def _passes_left(self) -> int:
        """Return the number of passes that remain in this epoch after the current pass."""
        return self._passes - 1 - self._cursor.epoch % self._passes

    @property
    def position(self) -> int:
        """Number of samples of this epoch on which all workers together have trained."""
        return (self._passes - self._passes_left) * self._total - self._cursor.left

    @property
    def steps(self) -> int:
        """Number of committed steps of this epoch."""
        return self._steps_before + self._cursor.steps

    def _assignment(self) -> tuple[int, ...]:
        """Return a value that changes whenever the rest of the epoch is assigned to the workers again."""
        return runtime.cluster_version(), self._cursor.epoch, self._dealing.changes

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks to which the next step is assigned: all ranks that aren't known to have failed."""
        return self._dealing.present().members

    @property
    def global_batch_size(self) -> int:
        """Number of samples in a full step at the current cluster size; constant if you set it."""
        return self._batch.of(len(self.members))

    @global_batch_size.setter
    def global_batch_size(self, samples: int) -> None:
        """Set a constant global batch size, on all workers at the same step."""
        self.set_batch_size(global_batch_size=samples)

    @property
    def total_samples(self) -> int:
        """Number of samples in an epoch, in which each sample counts once per pass."""
        return self._passes * self._total

    @property
    def holds_global_batch(self) -> bool:
        """Whether the global batch size stays the same if the cluster size changes."""
        return self._batch.of_all is not None

    @property
    def shards(self) -> int | None:
        """Number of shards in a full step; None if each step has one share per worker instead."""
        return self._batch.shards

    @property
    def keeps_ledger(self) -> bool:
        """Whether a ledger records the samples that training uses."""
        return self._recording.ledger is not None

    def sync_ledger(self) -> None:
        """Sync the ledger to disk, so that its records survive a crash of the machine."""
        self._recording.sync()

    def off_record(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is recorded, because samples are only evaluated."""
        return self._recording.off()

    def conditions(self) -> dict[str, Any]:
        """Return the settings on which the exact results depend; {} if the results also depend on the cluster size."""
        return {}

    def read_contents(self) -> None:
        """Read the samples whose contents the workers compare. If there is no source, do nothing."""

    def leave_out_contents(self) -> None:
        """Stop comparing contents, because a worker has no hashes; call this on all workers."""
        self.contents = None

    def wants_fingerprint(self, step: int) -> bool:
        """Return whether the step that has just ended, number `step` of training, gets a fingerprint."""
        return self.shards is not None and self._recording.wants_fingerprint(self._cursor, step)

    def keep_fingerprint(self, step: int, tensors: Mapping[str, str]) -> None:
        """Store the checksums after `step`, until the next `commit` records them.

        `tensors` maps each tensor's name to its checksum.
        """
        self._recording.keep_fingerprint(step, tensors)

    def set_batch_size(
        self, batch_size: int | None = None, global_batch_size: int | None = None, shards: int | None = None
    ) -> None:
        """Change the batch size, beginning with the next batch.

        Call this on all workers at the same step. The rest of the epoch is partitioned again. If this
        method raises an exception, nothing changes.

        Args:
            batch_size: number of samples per worker in a step. Pass either this or `global_batch_size`.
            global_batch_size: number of samples of all workers together in a step. It stays constant
                when the cluster changes.
            shards: number of shards in a step; unchanged by default. If the shape of a shard changes,
                all workers compile again. The shape is unchanged if `shards` changes in proportion to
                `global_batch_size`.

        Raises:
            ValueError: if both sizes or neither size is given, or if `shards` doesn't divide the global
                batch.
        """
        if shards is not None and self.shards is None:
            raise ValueError("this ElasticDataset has no shards; pass shards= to its constructor")
        if shards is None:
            shards = self.shards
            if shards is not None and self.shards_are_chosen and global_batch_size is not None:
                shards = shard_choice.more(global_batch_size, 1, shards)
        self._hold(BatchSize(batch_size, global_batch_size, shards))
        self._dealing.changes += 1

    def partition_into(self, shards: int | None) -> None:
        """Set the number of shards before the first step.

        Args:
            shards: the number of shards, or None for no shards.
        """
        self._hold(BatchSize(self._batch.per_worker, self._batch.of_all, shards))
        self._dealing = Dealing(self._cursor, shards is not None)

    def _hold(self, batch: BatchSize) -> None:
        self._batch, self._cursor.unit = batch, batch.unit

    def commit(self, participants: Sequence[int] | None = None) -> int:
        """Count the assigned steps as trained by `participants`.

        Shares of other ranks go back to the pool. Call this on all workers with the same arguments,
        when the outcome of the step is known and the membership hasn't changed yet.

        Args:
            participants: the ranks whose samples are in the step, the same on all workers. None means
                all ranks.

        Returns:
            The number of samples on which all participants together trained.

        Raises:
            KungFuError: if this rank didn't take part in the step.
        """
        if not self._cursor.taken:
            return 0
        dealt, epoch, left = self._dealing.dealt, self._cursor.epoch, self._cursor.left
        common = self._ledger_common(dealt)
        if self.shards is None:
            if dealt.version != runtime.cluster_version():
                # The step was assigned in an earlier cluster with different ranks. A manual resize has ended that
                # cluster.
                participants = membership.participants_of(dealt.version)
            living = dealt.members if participants is None else tuple(r for r in dealt.members if r in participants)
            if dealt.rank not in living:
                raise KungFuError(
                    f"rank {dealt.rank} is alive but didn't take part in the step of ranks {list(living)}"
                )
        else:
            participants, living = None, self._living_of_shards(dealt)
            common["sums"] = self._sums
        steps = self._cursor.commit(participants)
        self._recording.commit(epoch, steps, dealt.rank, {**common, "participants": living}, self.shards is not None)
        self._end_step()
        self._dealing.deal_to(living)
        return left - self._cursor.left

    def _living_of_shards(self, dealt: Dealt) -> tuple[int, ...]:
        """Return the workers that took part in a sharded step. The step uses its whole batch even if workers fail."""
        if not self._sums:
            raise KungFuError(
                "this ElasticDataset has shards, but the gradients of this step's shards were never summed: train with "
                "Model.train and KungFuElasticCallback, or call a ms_kungfu.elastic.ShardedStep with each batch"
            )
        return members_of_a_step_of_shards() if dealt.version == runtime.cluster_version() else dealt.members

    def _end_step(self) -> None:
        """Reset the values of this step, including the weight for gradient reductions."""
        self.weight, self._sums, self._as_dealt = 0, 0, {}
        if self.shards is None:
            membership.set_weight(1)

    def shards_of(self, count: int) -> list[int]:
        """Return this worker's shards of a step with `count` shards."""
        return self._dealing.shards_of(count)

    def weigh(self, weights: Sequence[int]) -> None:
        """From the next step on, assign shards by `weights`, one per rank; call this on all workers."""
        self._dealing.weigh(weights)

    def take_back(self, participants: Sequence[int]) -> None:
        """Assign uncommitted steps again, to `participants`, because a step was undone.

        Call this on all workers, with the same `participants`, before the membership changes.
        """
        self._put_back()
        self._end_step()
        self._dealing.deal_to(participants)
        self._dealing.changes += 1

    def _put_back(self) -> None:
        """Return the samples of uncommitted steps to the pool."""
        self._cursor.put_back()
        self._recording.forget()
        self._sums = 0

    def _ledger_common(self, dealt: Dealt) -> dict[str, Any]:
        return {
            "version": dealt.version, "size": dealt.size, "global_batch": self._batch.of(len(dealt.members)),
            "drop_remainder": self._cursor.drop_remainder, "total": self._total,
            "seed": self._seed, "shuffle": self._order.shuffle,
            **({} if self.shards is None else {"shards": self.shards}),
            **({} if self.training is None else {"training": self.training}),
            **({"ranks": self._cursor.ranks} if self._cursor.ranks else {}),
            **self._as_dealt,
        }  # fmt: skip

    def _end_epoch(self) -> bool:
        """Begin the next pass after the current pass has ended. Return whether the epoch is over."""
        if self._recording.ledger is not None:
            dealt = self._dealing.present()
            self._recording.ledger.end(self._cursor, dealt.rank, self._ledger_common(dealt))
        self._steps_before = self.steps if self._passes_left else 0
        self._cursor.end_epoch()
        return self._cursor.epoch % self._passes == 0

    def leave_out_the_rest(self) -> None:
        """Skip the rest of this epoch; call this on all workers at the same step."""
        self._put_back()
        while not self._end_epoch():
            pass
        self._dealing.changes += 1

    def same_at_all(self) -> dict[str, Any]:
        """Return a dict of the settings that must be equal on all workers when a job begins."""
        return {
            "samples": self._total, **self._batch.named(), "shards": self.shards, "seed": self._seed,
            **self._order.named(),
            "drop_remainder": self._cursor.drop_remainder, "passes": self._passes,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return the state, as JSON, that another worker needs to continue from the current position."""
        batch = [self._batch.per_worker, self._batch.of_all]
        more: dict[str, Any] = {"steps_before": self._steps_before} if self._passes > 1 else {}
        if self.contents is not None:
            more["contents"] = self.contents.state()
        return {**self._cursor.state(), "seed": self._seed, "batch": batch, "shards": self.shards, **more}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from another worker's `state`; raise ValueError if that worker has different data."""
        self._cursor.restore(state)
        self.contents = contents.the_same(self.contents, state.get("contents"), self._total)
        self._recording.forget()
        self._sums, self._seed, self._steps_before = 0, state["seed"], state.get("steps_before", 0)
        # If this dataset and `state` both have shards, use the number in `state`. The checkpoint of another training
        # run may have no shards.
        shards = None if self.shards is None else state.get("shards") or self.shards
        per_worker, of_all = state["batch"]
        self._hold(BatchSize(per_worker, of_all, shards))
        self._dealing.changes += 1

    def _take(self) -> sharding.Step | None:
        """Assign the next step, and set the weight of this worker's gradients in it."""
        cursor, dealt = self._cursor, self._dealing.present()
        step = cursor.take(self.global_batch_size, dealt.members)
        if step is not None and self.shards is not None:
            length, unit = sharding.count(step.batch), cursor.unit
            self._step_weights = weights = self._dealing.weights(dealt)
            self._as_dealt = {"global_batch": self._batch.of_all, "shards": self.shards}
            self._as_dealt["weights"] = [weights[r] for r in dealt.members] if weights else []
            own = self.shards_of(shards.count(length, unit))
            self.step_shards = tuple(min(unit, length - at) for at in range(0, length, unit))
            self.weight = sum(self.step_shards[shard] for shard in own)
        elif step is not None:
            self.weight = sum(sharding.count(taken.share(dealt.rank)) for taken in cursor.taken)
            membership.set_weight(self.weight)
        return step

    def _deal(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions and lengths of this worker's batches or shards until the end of the epoch."""
        cursor, dealt = self._cursor, self._dealing.present()
        if self.shards is None:
            return cursor.deal(self.global_batch_size, dealt.members, dealt.rank)
        rest = sharding.positions(cursor.rest)
        return shards.deal(rest, self.global_batch_size, cursor.unit, cursor.drop_remainder, self.shards_of)


def steps_left(shares: Shares, epochs: int = 1) -> int:
    """Return the number of steps left in `epochs` epochs, including the current epoch, at the current batch size."""
    cursor, batch = shares._cursor, shares.global_batch_size
    full = sharding.count_steps(shares._total, batch, cursor.drop_remainder)
    passes = shares._passes_left + (epochs - 1) * shares._passes
    return sharding.count_steps(cursor.left, batch, cursor.drop_remainder) + passes * full
