"""A worker's shares of a global order of samples: which it is handed out, which count as trained, and what goes back.

What `ElasticDataset` is made of, without MindSpore. All workers make the same calls at the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Protocol

from ms_kungfu import _core, membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.dataset import contents, sharding
from ms_kungfu.dataset.shards import count as count_shards
from ms_kungfu.errors import KungFuError


class Driver(Protocol):
    """Who counts the steps that are trained of an `ElasticDataset`, and may undo one: `ElasticTraining`."""

    def begins(self) -> None:
        """A step begins, if it hasn't already."""

    def take_participants(self) -> list[int]:
        """The ranks whose samples are in the step that is over."""


class Record(Protocol):
    """Where what was trained goes on record: a `Ledger`."""

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        """Whether this step of the epoch, the `step`-th since training began, goes on record with a fingerprint."""

    def step(
        self, epoch: int, step: sharding.Step, rank: int, share: Iterable[sharding.Range], common: dict[str, Any]
    ) -> None:
        """A step was trained, of which `share` was delivered to this worker."""

    def end(self, cursor: sharding.EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """An epoch is over."""

    def sync(self) -> None:
        """What is on record outlives the machine."""


MOST_SHARDS = 4096  # ops_src/shards/tree.h


@dataclass(frozen=True)
class _Dealt:
    """The cluster to which the steps are dealt at present."""

    version: int
    size: int
    rank: int
    members: tuple[int, ...]  # ranks that aren't known to have died


class Shares:
    """The samples of a data set, dealt to the workers anew whenever the cluster changes.

    Args:
        total: how many samples there are.
        batch_size: samples a worker trains in a step; or `global_batch_size`: samples that all train together.
        shuffle, seed: the order, a function of (`seed`, epoch).
        drop_remainder: leave out what doesn't fill a global batch at the end of an epoch.
        ledger: keeps record of what was trained.
        shards: a step is a deal of so many (`ms_kungfu.dataset.shards`); None: each worker trains its part in one.
        passes: over all samples an epoch. On record each is an epoch of its own, in which each sample is trained once.
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
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError(
                "an ElasticDataset has either batch_size (samples of a worker) or global_batch_size (of all workers), "
                "or neither where its source has a batch() of its own; got "
                f"batch_size={batch_size!r} and global_batch_size={global_batch_size!r}"
            )
        self._shards = None if shards is None else at_least(1, shards, "shards")
        if shards is not None and global_batch_size is None:
            raise ValueError("shards are parts of a global batch: give global_batch_size instead of batch_size")
        self._weights: tuple[int, ...] = ()  # of how much each rank is dealt,
        self._weighed_in = -1  # in this cluster version: in another the ranks are others
        self._step_weights: list[int] = []  # by rank, that the step at hand was dealt by
        self._step_shards: tuple[int, ...] = ()
        self._sums = 0  # how often the step at hand has been made, shard by shard
        self._per_worker: int | None = None
        self._global: int | None = None
        self._cursor = sharding.EpochCursor(total, drop_remainder)
        self._hold(batch_size, global_batch_size, self._shards)
        self._total = total
        self._passes, self._steps_before = passes, 0  # steps of this epoch's passes that are over
        self._shuffle, self._seed = bool(shuffle), index(seed)
        if shards is not None and not 0 <= self._seed < 1 << 64:
            raise ValueError(f"with shards a seed is at least 0 and below 2**64, got {seed}")
        self._dealt = _Dealt(-1, 0, 0, ())  # until the first step
        self._reductions = membership.watch_reductions()
        self._deals = 0  # how often what was dealt lost its validity, other than by a new cluster version or epoch
        self._weight = 0
        self._ledger = ledger
        self.training: tuple[str, int] | None = None
        """For the ledger: which folder has the checkpoints, and the job's number there; None without one."""
        self._as_dealt: dict[str, Any] = {}  # of a step of shards: what may be others for the next one already
        self._delivered: list[tuple[sharding.Range, ...]] = []  # to this worker, of the first of the steps taken
        self._fingerprint: dict[str, Any] | None = None  # of the step that is over
        self._contents: contents.Contents | None = None  # once they are read
        self.driven: Driver | None = None  # which calls `commit`
        self.suspended = False  # nothing more is handed out

    @property
    def epoch(self) -> int:
        """Epochs that have been handed out in full, over all iterators."""
        return self._cursor.epoch // self._passes

    @property
    def _passes_left(self) -> int:
        """Of this epoch, behind the present one."""
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
        if now == (self._dealt.version, self._dealt.size, self._dealt.rank):
            return self._dealt
        members = tuple(range(now[1]))
        if self._shards is not None and not membership.is_deferred():  # to ask would be to join
            members = _members_of_a_step_of_shards()
        present = _Dealt(*now, members=members)
        if not self._cursor.taken:  # else the step that was handed out is of those to whom it was dealt
            self._dealt = present
        return present

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step at the present size of the cluster."""
        return self._global_batch_of(self._present())

    @global_batch_size.setter
    def global_batch_size(self, samples: int) -> None:
        """Hold it constant from now on, whatever the dataset was made with. At all workers at the same step."""
        self.set_batch_size(global_batch_size=samples)

    @property
    def total_samples(self) -> int:
        """Samples of an epoch, each counted as often as an epoch has passes over it."""
        return self._passes * self._total

    @property
    def holds_global_batch(self) -> bool:
        """Whether the batch stays the same when the cluster changes."""
        return self._global is not None

    @property
    def shards(self) -> int | None:
        """Into how many a full step is dealt; None: a step is one part for each worker."""
        return self._shards

    @property
    def step_shards(self) -> tuple[int, ...]:
        """Samples of each shard of the step that was handed out last; nothing where steps aren't deals of shards."""
        return self._step_shards

    @property
    def keeps_ledger(self) -> bool:
        """Whether what is trained is recorded."""
        return self._ledger is not None

    def sync_ledger(self) -> None:
        """What is on record outlives the machine from now on."""
        if self._ledger is not None:
            self._ledger.sync()

    @contextmanager
    def off_record(self) -> Iterator[None]:
        """What is handed out meanwhile isn't trained but evaluated."""
        ledger, self._ledger = self._ledger, None
        try:
            yield
        finally:
            self._ledger = ledger

    def conditions(self) -> dict[str, Any]:
        """What the bits of training depend on besides its program; nothing where that is the cluster, too."""
        return {}

    @property
    def contents(self) -> contents.Contents | None:
        """Hashes of samples by their numbers, which the workers compare; None before `read_contents`, and if each
        process may have other ones."""
        return self._contents

    def read_contents(self) -> None:
        """Read the samples that the workers compare, once. Nothing to do without a source."""

    def leave_out_contents(self) -> None:
        """Another worker has none to compare. At all workers alike."""
        self._contents = None

    def wants_fingerprint(self, step: int) -> bool:
        """Whether the step that is over, the `step`-th since training began, goes on record with a fingerprint."""
        if self._shards is None or self._ledger is None or not self._cursor.taken:
            return False
        return self._ledger.wants_fingerprint(self._cursor.epoch, self._cursor.steps, step)

    def keep_fingerprint(self, step: int, tensors: Mapping[str, str]) -> None:
        """It goes on record with the next `commit`: checksums of what decides the next step, by name."""
        self._fingerprint = {"step": step, "tensors": tensors}

    def set_batch_size(
        self, batch_size: int | None = None, global_batch_size: int | None = None, shards: int | None = None
    ) -> None:
        """Other batches from the next one on: of a worker, or of all together; one of the two. At all workers at the
        same step. The rest of the epoch is dealt out anew.

        `shards`: where steps are deals of shards, into how many; by default as many as before, of another shape, for
        which all workers compile. In proportion to `global_batch_size` they keep their shape. ValueError, and nothing
        changes, where they don't divide it.
        """
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("set_batch_size takes batch_size or global_batch_size, one of the two")
        if shards is not None and self._shards is None:
            raise ValueError("this ElasticDataset deals no shards; give shards= when it is made")
        self._hold(batch_size, global_batch_size, self._shards if shards is None else at_least(1, shards, "shards"))
        self._deals += 1

    def _hold(self, batch_size: int | None, global_batch_size: int | None, shards: int | None) -> None:
        """Constant from now on: one of the first two."""
        if shards is not None:
            if shards > MOST_SHARDS:
                raise ValueError(f"a step has at most {MOST_SHARDS} shards, got shards={shards}")
            if global_batch_size is None or at_least(1, global_batch_size, "global_batch_size") % shards:
                raise ValueError(
                    f"a step of {shards} shards takes a global_batch_size that they divide, so that all have the "
                    f"same shape, not {'a batch_size' if global_batch_size is None else global_batch_size}"
                )
            self._shards, self._cursor.unit = shards, global_batch_size // shards
        per_worker = None if batch_size is None else at_least(1, batch_size, "batch_size")
        self._global = None if global_batch_size is None else at_least(1, global_batch_size, "global_batch_size")
        self._per_worker = per_worker

    def commit(self, participants: Sequence[int] | None = None) -> int:
        """Count what was handed out as trained by these ranks (None: by all). What the others took goes back.

        Returns how many samples all of them have trained. Called at all workers with the same ranks, once the step's
        outcome is known and before the membership changes.
        """
        if not self._cursor.taken:
            return 0
        dealt, left = self._dealt, self._cursor.left
        if self._shards is not None:
            self._commit_sharded(dealt)
            return left - self._cursor.left
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
        return left - self._cursor.left

    def _commit_sharded(self, dealt: _Dealt) -> None:
        """All of the step is trained, whoever lives: its shards were computed by others where their owner died."""
        if not self._sums:
            raise KungFuError(
                "this ElasticDataset deals shards, and nothing summed those of the step: train with Model.train and "
                "KungFuElasticCallback, or call a ms_kungfu.elastic.ShardedStep with each batch"
            )
        living = dealt.members
        if dealt.version == runtime.cluster_version():
            living = _members_of_a_step_of_shards()
        epoch, delivered, common = self._cursor.epoch, self._delivered, self._ledger_common(dealt)
        # Those of the next step may be agreed already.
        weights = [self._step_weights[r] for r in dealt.members] if self._step_weights else []
        common.update(weights=weights, sums=self._sums, participants=living)
        if self._fingerprint is not None:
            common["fingerprint"], self._fingerprint = self._fingerprint, None
        steps, self._delivered, self._sums = self._cursor.commit(), [], 0
        self._weight, self._as_dealt = 0, {}
        if living != dealt.members:
            self._dealt = replace(dealt, members=living)
            self._deals += 1
        if self._ledger is not None:
            # One step at a time: the next begins where the sum over all shards is there.
            share = tuple(r for each in delivered for r in each)
            self._ledger.step(epoch, steps[0], dealt.rank, share, common)

    def shards_of(self, count: int) -> list[int]:
        """This worker's shards of a step that has `count`."""
        dealt = self._present()
        by_rank = self._weights_in(dealt)
        weights = [by_rank[r] for r in dealt.members] if by_rank else []
        return list(_core.deal_shards(count, list(dealt.members), weights, dealt.rank))

    def _weights_in(self, dealt: _Dealt) -> list[int]:
        """By rank; none: all alike. Who has joined knows no others."""
        return list(self._weights) if self._weighed_in == dealt.version else []

    def weigh(self, weights: Sequence[int]) -> None:
        """From the next step on each rank is dealt shards in proportion to its number. At all workers alike."""
        before, version = self._weights_in(self._present()), runtime.cluster_version()
        self._weights, self._weighed_in = tuple(weights), version
        if list(weights) != before:
            self._deals += 1

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
        """Who took part in the step that is over."""
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
        self._delivered, self._sums = [], 0

    def _ledger_common(self, dealt: _Dealt) -> dict[str, Any]:
        return {
            "version": dealt.version,
            "size": dealt.size,
            "global_batch": self._global_batch_of(dealt),
            "drop_remainder": self._cursor.drop_remainder,
            "total": self._total,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **({} if self._shards is None else {"shards": self._shards}),
            **({} if self.training is None else {"training": self.training}),
            **({"ranks": self._cursor.ranks} if self._cursor.ranks else {}),
            **self._as_dealt,
        }

    def _global_batch_of(self, dealt: _Dealt) -> int:
        if self._global is not None:
            return self._global
        assert self._per_worker is not None
        return self._per_worker * len(dealt.members)

    def _end_epoch(self) -> bool:
        """All of this pass is trained, or left out: the next one begins. Whether that was the last of the epoch."""
        if self._ledger is not None:
            dealt = self._present()
            self._ledger.end(self._cursor, dealt.rank, self._ledger_common(dealt))
        self._steps_before = self.steps if self._passes_left else 0
        self._cursor.end_epoch()
        return self._cursor.epoch % self._passes == 0

    def leave_out_the_rest(self) -> None:
        """Of this epoch, which nobody trains: the next one begins. At all workers at the same step."""
        self._put_back()
        while not self._end_epoch():
            pass
        self._deals += 1

    def same_at_all(self) -> dict[str, Any]:
        """What has to be the same at all workers that begin together, by the name that a user knows; JSON."""
        batch = {"batch_size": self._per_worker} if self._global is None else {"global_batch_size": self._global}
        return {
            "samples": self._total, **batch, "seed": self._seed, "shuffle": self._shuffle,
            "drop_remainder": self._cursor.drop_remainder, "passes": self._passes,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """What another worker needs to go on from here; JSON."""
        batch = [self._per_worker, self._global]
        more: dict[str, Any] = {"steps_before": self._steps_before} if self._passes > 1 else {}
        if self._contents is not None:
            more["contents"] = self._contents.state()
        return {**self._cursor.state(), "seed": self._seed, "batch": batch, "shards": self._shards, **more}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another worker's `state`. ValueError where that worker has other data."""
        self._cursor.restore(state)
        self._compare_contents(state.get("contents"))
        self._delivered, self._sums = [], 0
        self._seed, self._steps_before = state["seed"], state.get("steps_before", 0)
        # Where both deal shards the number is the training's; a checkpoint of another training may be without.
        shards = state.get("shards") or self._shards
        per_worker, of_all = state["batch"]
        self._hold(per_worker, of_all, None if self._shards is None else shards)
        self._deals += 1

    def _compare_contents(self, of_others: Sequence[Any] | None) -> None:
        if self._contents is None or of_others is None:
            self._contents = None  # nothing is known of theirs
            return
        if apart := contents.difference([self._contents, contents.restored(of_others)]):
            raise ValueError(
                f"ElasticDataset: {apart} of {self._total} at this worker differ from those that "
                f"training began with; {contents.REMEDY}"
            )

    def _deliver(self, share: tuple[sharding.Range, ...]) -> None:
        """What has really come to this worker in the step that was taken last: that goes on record."""
        if self._ledger is not None:
            self._delivered.append(share)

    def _take(self) -> sharding.Step | None:
        """Hands out a step, and tells the runtime what this worker's gradients count from now on."""
        cursor, dealt = self._cursor, self._present()
        step = cursor.take(self.global_batch_size, dealt.members)
        if step is not None and self._shards is not None:
            length, unit = sharding.count(step.batch), cursor.unit
            self._step_weights = self._weights_in(dealt)
            self._as_dealt = {"global_batch": self._global, "shards": self._shards}
            shards = self.shards_of(count_shards(length, unit))
            self._step_shards = tuple(min(unit, length - at) for at in range(0, length, unit))
            self._weight = sum(self._step_shards[shard] for shard in shards)
        elif step is not None:
            self._weight = sum(sharding.count(taken.share(dealt.rank)) for taken in cursor.taken)
            membership.set_weight(self._weight)
        return step


def _members_of_a_step_of_shards() -> tuple[int, ...]:
    """The ranks that the next one is dealt to. Some may be missing before a dataset's first step: who has died in a
    step of another one."""
    return tuple(membership.current().core.sharded_members())
