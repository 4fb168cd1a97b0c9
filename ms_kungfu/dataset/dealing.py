"""Assign the steps of a dataset to workers. All workers must make the same calls at the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ms_kungfu import _core, membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.dataset.sharding import EpochCursor

MOST_SHARDS = 4096  # the limit in ops_src/shards/tree.h


@dataclass(frozen=True)
class BatchSize:
    """How many samples a step has, per worker or for all workers together, and optionally how many shards.

    Raises ValueError if the values are invalid or contradict each other.
    """

    per_worker: int | None
    of_all: int | None
    shards: int | None = None

    def __post_init__(self) -> None:
        if (self.per_worker is None) == (self.of_all is None):
            raise ValueError(
                "pass either batch_size (samples per worker) or global_batch_size (samples of all "
                "workers) to ElasticDataset, or neither if its source has a batch(); got "
                f"batch_size={self.per_worker!r} and global_batch_size={self.of_all!r}"
            )
        for name, what in (("per_worker", "batch_size"), ("of_all", "global_batch_size"), ("shards", "shards")):
            if getattr(self, name) is not None:  # as a plain int, because the program may pass a NumPy integer
                object.__setattr__(self, name, at_least(1, getattr(self, name), what))
        if self.shards is None:
            return
        if self.shards > MOST_SHARDS:
            raise ValueError(f"a step has at most {MOST_SHARDS} shards, got shards={self.shards}")
        if self.of_all is None or self.of_all % self.shards:
            raise ValueError(
                f"shards={self.shards} must divide global_batch_size, so that all shards have the same "
                f"shape, got {'only batch_size' if self.of_all is None else self.of_all}"
            )

    @property
    def unit(self) -> int:
        """Return the number of samples per shard; 1 if there are no shards."""
        return 1 if self.shards is None or self.of_all is None else self.of_all // self.shards

    def of(self, workers: int) -> int:
        """Return the number of samples in a full step with this number of workers."""
        return self.of_all if self.of_all is not None else (self.per_worker or 0) * workers

    def named(self) -> dict[str, int | None]:
        """Return the batch size as a keyword argument, for example ``{"global_batch_size": 64}``."""
        return {"batch_size": self.per_worker} if self.of_all is None else {"global_batch_size": self.of_all}


@dataclass(frozen=True)
class Dealt:
    """The cluster to which steps are currently assigned."""

    version: int
    size: int
    rank: int
    members: tuple[int, ...]  # ranks that aren't known to have failed


class Dealing:
    """The partition of one dataset. With `by_shards`, its steps are partitioned into shards."""

    def __init__(self, cursor: EpochCursor, by_shards: bool) -> None:
        self._cursor, self._by_shards = cursor, by_shards
        self.dealt = Dealt(-1, 0, 0, ())  # no cluster before the first step
        self.changes = 0
        """How often the rest of an epoch was assigned again, not counting new cluster versions and new epochs."""
        self._weights: tuple[int, ...] = ()  # weights of the ranks in version `_weighed_in`
        self._weighed_in = -1  # the cluster version in which `_weights` is valid, because ranks change with the version

    def present(self) -> Dealt:
        """Return the current cluster. Store it in `dealt` too, unless an assigned step is still uncommitted."""
        now = runtime.cluster_version(), runtime.current_cluster_size(), runtime.current_rank()
        if now == (self.dealt.version, self.dealt.size, self.dealt.rank):
            return self.dealt
        members = tuple(range(now[1]))
        if self._by_shards and not membership.is_deferred():  # otherwise, the next call would join the cluster
            members = members_of_a_step_of_shards()
        present = Dealt(*now, members=members)
        if not self._cursor.taken:
            self.dealt = present
        return present

    def deal_to(self, living: Iterable[int]) -> None:
        """Assign steps only to the members in `living`, because the other members have failed."""
        members = tuple(rank for rank in self.dealt.members if rank in living)
        if members != self.dealt.members:
            self.dealt = replace(self.dealt, members=members)
            self.changes += 1

    def shards_of(self, count: int) -> list[int]:
        """Return this worker's shards of a step with `count` shards."""
        dealt = self.present()
        by_rank = self.weights(dealt)
        weights = [by_rank[r] for r in dealt.members] if by_rank else []
        return list(_core.partition_shards(count, list(dealt.members), weights, dealt.rank))

    def weights(self, dealt: Dealt) -> list[int]:
        """Return the weights by rank; empty if all ranks have equal weights, or a joining worker has none yet."""
        return list(self._weights) if self._weighed_in == dealt.version else []

    def weigh(self, weights: Sequence[int]) -> None:
        """Assign shards to ranks in proportion to these weights, beginning with the next step."""
        before = self.weights(self.present())
        self._weights, self._weighed_in = tuple(weights), runtime.cluster_version()
        if list(weights) != before:
            self.changes += 1


def members_of_a_step_of_shards() -> tuple[int, ...]:
    """Return the ranks to which the next sharded step is assigned.

    The result excludes failed ranks, including ranks that failed in a step of another dataset.
    """
    return tuple(membership.current().core.sharded_members())
