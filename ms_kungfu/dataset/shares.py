"""A worker's shares of a global order of samples.

`Shares` decides which samples a worker receives, which count as trained, and which go back. It has no MindSpore, which
`ElasticDataset` adds. All workers make the same calls at the same steps.

The arguments of `Shares` are those of `ElasticDataset`, and `passes`: over all samples an epoch. The ledger counts each
pass as an epoch of its own, in which each sample is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ms_kungfu import membership, runtime
from ms_kungfu.dataset import contents, sharding, shards
from ms_kungfu.dataset.contents import Contents
from ms_kungfu.dataset.dealing import BatchSize, Dealing, Dealt, members_of_a_step_of_shards
from ms_kungfu.dataset.recording import Record, Recording
from ms_kungfu.errors import KungFuError


class Driver(Protocol):
    """The driver that counts the trained steps of an `ElasticDataset`, and may undo one: `ElasticTraining`."""

    def begins(self) -> None:
        """Begin a step, unless one has begun."""

    def take_participants(self) -> list[int]:
        """Return the ranks whose samples are in the step that is over."""


class Shares:
    """The samples of a data set, partitioned again whenever the cluster changes."""

    weight = 0
    """Samples of this worker in the batches since the last step: what its gradients count. It is 0 for a
    batch that repeats a sample, in a step of fewer samples than workers."""
    step_shards: tuple[int, ...] = ()
    """Samples of each shard of the step that was handed out last; empty without shards."""
    contents: Contents | None = None
    """Hashes of samples by their numbers, which the workers compare. None before `read_contents`, and
    if each process may have other ones."""

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
        self._passes, self._steps_before = passes, 0  # steps of this epoch's passes that are over
        self._seed = index(seed)
        if shards is not None and not 0 <= self._seed < 1 << 64:
            raise ValueError(f"with shards a seed is at least 0 and below 2**64, got {seed}")
        self._order = sharding.Order(total, drawn_from or total, shuffle)
        self._dealing = Dealing(self._cursor, shards is not None)
        self._recording = Recording(ledger)
        self._step_weights: list[int] = []  # by rank, for the partition of this step
        self.weight = self._sums = 0  # the latter: how often this step has been made, shard by shard
        self._as_dealt: dict[str, Any] = {}  # of a step of shards: values that may be others for the next one already
        self.training: tuple[str, int] | None = None
        """For the ledger: the folder of the checkpoints, and the job's number there; None without one."""
        self.driven: Driver | None = None  # which calls `commit`
        self.suspended = False  # nothing more is handed out

    @property
    def epoch(self) -> int:
        """Epochs that have been handed out in full, over all iterators."""
        return self._cursor.epoch // self._passes

    @property
    def _passes_left(self) -> int:
        """Return the passes of this epoch after the present one."""
        return self._passes - 1 - self._cursor.epoch % self._passes

    @property
    def position(self) -> int:
        """Samples of this epoch that are trained, over all workers."""
        return (self._passes - self._passes_left) * self._total - self._cursor.left

    @property
    def steps(self) -> int:
        """Steps of this epoch that are trained."""
        return self._steps_before + self._cursor.steps

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that get the next step: those of the cluster that aren't known to have failed."""
        return self._dealing.present().members

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step at the present size of the cluster; an assigned value is held constant."""
        return self._batch.of(len(self.members))

    @global_batch_size.setter
    def global_batch_size(self, samples: int) -> None:
        """Hold the global batch constant from now on, whatever it was made with. At all workers at the same step."""
        self.set_batch_size(global_batch_size=samples)

    @property
    def total_samples(self) -> int:
        """Samples of an epoch, each counted as often as an epoch has passes over it."""
        return self._passes * self._total

    @property
    def holds_global_batch(self) -> bool:
        """Whether the batch stays the same when the cluster changes."""
        return self._batch.of_all is not None

    @property
    def shards(self) -> int | None:
        """How many shards a full step has; None: a step is one part for each worker."""
        return self._batch.shards

    @property
    def keeps_ledger(self) -> bool:
        """Whether what is trained is recorded."""
        return self._recording.ledger is not None

    def sync_ledger(self) -> None:
        """Write the ledger to disk: what is recorded outlives the machine from now on."""
        self._recording.sync()

    def off_record(self) -> AbstractContextManager[None]:
        """Return a context in which what is handed out isn't trained but evaluated."""
        return self._recording.off()

    def conditions(self) -> dict[str, Any]:
        """Return the numeric environment of the bits; empty if they depend on the cluster, too."""
        return {}

    def read_contents(self) -> None:
        """Read the samples that the workers compare, once. Does nothing without a source."""

    def leave_out_contents(self) -> None:
        """Compare no contents, at all workers alike: another worker has none."""
        self.contents = None

    def wants_fingerprint(self, step: int) -> bool:
        """Return whether the step just ended, the `step`-th of training, gets a fingerprint."""
        return self.shards is not None and self._recording.wants_fingerprint(self._cursor, step)

    def keep_fingerprint(self, step: int, tensors: Mapping[str, str]) -> None:
        """Record checksums of `tensors` by name, after `step`, with the next `commit`."""
        self._recording.keep_fingerprint(step, tensors)

    def set_batch_size(
        self, batch_size: int | None = None, global_batch_size: int | None = None, shards: int | None = None
    ) -> None:
        """Change the batches from the next one on, at all workers at the same step.

        The rest of the epoch is partitioned again. Nothing changes if it raises.

        Args:
            batch_size: samples of a worker in a step; or the next.
            global_batch_size: samples of all workers together, held constant.
            shards: how many shards a step has; by default as many as before, of another shape, for which
                all workers compile. In proportion to `global_batch_size` they keep their shape.

        Raises:
            ValueError: for both sizes or none, or shards that don't divide the global batch.
        """
        if shards is not None and self.shards is None:
            raise ValueError("this ElasticDataset has no shards; give shards= when it is made")
        self._hold(BatchSize(batch_size, global_batch_size, self.shards if shards is None else shards))
        self._dealing.changes += 1

    def _hold(self, batch: BatchSize) -> None:
        """Hold it constant from now on."""
        self._batch, self._cursor.unit = batch, batch.unit

    def commit(self, participants: Sequence[int] | None = None) -> int:
        """Count what was handed out as trained by these ranks; what the others took goes back.

        Called at all workers alike, once the step's outcome is known and before the membership changes.
        KungFuError if this rank took no part in the step.

        Args:
            participants: the ranks whose samples are in the step, the same at all workers; None: all.

        Returns:
            How many samples all of them have trained.
        """
        if not self._cursor.taken:
            return 0
        dealt, epoch, left = self._dealing.dealt, self._cursor.epoch, self._cursor.left
        common = self._ledger_common(dealt)
        if self.shards is None:
            if dealt.version != runtime.cluster_version():
                # Handed out in a cluster of other ranks, which a resize by hand has ended since.
                participants = membership.participants_of(dealt.version)
            living = dealt.members if participants is None else tuple(r for r in dealt.members if r in participants)
            if dealt.rank not in living:
                raise KungFuError(f"rank {dealt.rank} lives but took no part in the step of ranks {list(living)}")
        else:
            participants, living = None, self._living_of_shards(dealt)
            common["sums"] = self._sums
        steps = self._cursor.commit(participants)
        self._recording.commit(epoch, steps, dealt.rank, {**common, "participants": living}, self.shards is not None)
        self._end_step()
        self._dealing.deal_to(living)
        return left - self._cursor.left

    def _living_of_shards(self, dealt: Dealt) -> tuple[int, ...]:
        """Return the members of a step of shards. All of it is trained, whichever workers live."""
        if not self._sums:
            raise KungFuError(
                "this ElasticDataset has shards, and nothing summed those of the step: train with Model.train and "
                "KungFuElasticCallback, or call a ms_kungfu.elastic.ShardedStep with each batch"
            )
        return members_of_a_step_of_shards() if dealt.version == runtime.cluster_version() else dealt.members

    def _end_step(self) -> None:
        """Forget this step, also for reductions that aren't of this dataset."""
        self.weight, self._sums, self._as_dealt = 0, 0, {}
        if self.shards is None:
            membership.set_weight(1)

    def shards_of(self, count: int) -> list[int]:
        """Return this worker's shards of a step that has `count`."""
        return self._dealing.shards_of(count)

    def weigh(self, weights: Sequence[int]) -> None:
        """Assign shards in proportion to `weights`, one a rank, from the next step, at all workers alike."""
        self._dealing.weigh(weights)

    def take_back(self, participants: Sequence[int]) -> None:
        """Hand out again what was handed out, to the ranks in `participants`: the step was undone.

        Called at all workers with the same ranks, before the membership changes.
        """
        self._put_back()
        self._end_step()
        self._dealing.deal_to(participants)
        self._dealing.changes += 1

    def _put_back(self) -> None:
        """Hand out again what was handed out and doesn't count."""
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
        """Begin the next pass: all of this one is trained, or left out. Return whether the epoch is over."""
        if self._recording.ledger is not None:
            dealt = self._dealing.present()
            self._recording.ledger.end(self._cursor, dealt.rank, self._ledger_common(dealt))
        self._steps_before = self.steps if self._passes_left else 0
        self._cursor.end_epoch()
        return self._cursor.epoch % self._passes == 0

    def leave_out_the_rest(self) -> None:
        """Begin the next epoch without the rest of this one, at all workers at the same step."""
        self._put_back()
        while not self._end_epoch():
            pass
        self._dealing.changes += 1

    def same_at_all(self) -> dict[str, Any]:
        """Return what has to be equal at all workers that begin together, by the user's names, as JSON."""
        return {
            "samples": self._total, **self._batch.named(), "seed": self._seed, **self._order.named(),
            "drop_remainder": self._cursor.drop_remainder, "passes": self._passes,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return what another worker needs to go on from here, as JSON."""
        batch = [self._batch.per_worker, self._batch.of_all]
        more: dict[str, Any] = {"steps_before": self._steps_before} if self._passes > 1 else {}
        if self.contents is not None:
            more["contents"] = self.contents.state()
        return {**self._cursor.state(), "seed": self._seed, "batch": batch, "shards": self.shards, **more}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another worker's `state`; ValueError if that worker has other data."""
        self._cursor.restore(state)
        self.contents = contents.the_same(self.contents, state.get("contents"), self._total)
        self._recording.forget()
        self._sums, self._seed, self._steps_before = 0, state["seed"], state.get("steps_before", 0)
        # If both have shards the number is the training's; a checkpoint of another training may be without.
        shards = None if self.shards is None else state.get("shards") or self.shards
        per_worker, of_all = state["batch"]
        self._hold(BatchSize(per_worker, of_all, shards))
        self._dealing.changes += 1

    def _take(self) -> sharding.Step | None:
        """Hand out a step, and set what this worker's gradients count from now on."""
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
        """Return positions and lengths of this worker's batches or shards, if nothing changes this epoch."""
        cursor, dealt = self._cursor, self._dealing.present()
        if self.shards is None:
            return cursor.deal(self.global_batch_size, dealt.members, dealt.rank)
        rest = sharding.positions(cursor.rest)
        return shards.deal(rest, self.global_batch_size, cursor.unit, cursor.drop_remainder, self.shards_of)
