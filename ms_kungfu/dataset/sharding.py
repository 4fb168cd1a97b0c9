"""Divide an epoch into steps, and a step into the workers' shares. Equal calls return equal shares on every worker.

An epoch is a permutation of the samples, the same on every worker. The *pool* is a list of ranges that contains the
unused positions of the permutation, in training order. A step takes a *global batch* from the front of the pool. These
positions are assigned to the workers in contiguous blocks, the workers' *shares*. When the step is committed, the
shares of the participants count as trained. If a worker fails and the step is committed without it, that worker's share
goes back to the end of the pool. After a change of membership, a worker needs only the pool to continue.

Rules
- A step takes `global_batch` samples, but the last steps of an epoch may take fewer. If more than one but fewer than
  one and a half global batches remain, the last two steps divide the samples evenly. If one global batch or less
  remains, the last step takes all remaining samples. So no step is tiny, and no step is larger than requested. At any
  cluster size, an epoch has ``ceil(total / global_batch)`` steps, and more only if shares went back to the pool. With
  `drop_remainder`, samples that don't fill a global batch are left out.
- If steps are partitioned into shards, the same rules apply to shards instead of samples. A shard has `unit` samples,
  but the last shard of an epoch may have fewer.
- A step's samples are assigned in blocks that are as even as possible. If the division has a remainder, each of the
  first workers gets one sample more.
- With ``kungfu-run --msrun``, a worker may do the work of several ranks of a virtual world of fixed size. A step's
  samples are then assigned to the virtual ranks in blocks that are as even as possible. A worker's share consists of
  the blocks of its virtual ranks, one after the other.
- If a step has fewer samples than workers, the last workers have no sample. These workers still take part: they repeat
  the step's last sample and contribute with weight 0. If all workers with a sample of their own fail, the update uses
  the repeated sample, which then counts as trained and doesn't go back to the pool.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]
"""Positions ``[first, last)`` in an epoch's permutation."""


def permutation(total: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the order of the samples in `epoch`, which is the same on every worker: int64 of shape (total,)."""
    if not shuffle:
        return np.arange(total, dtype=np.int64)
    return np.random.default_rng((seed, epoch)).permutation(total)


@dataclass(frozen=True)
class Drawing:
    """Draw an epoch's samples at random, by weight, instead of using a permutation of the samples."""

    weights: tuple[float, ...]
    """The weight of each sample. The sum of the weights need not be 1."""
    replacement: bool
    """Whether a sample may be drawn more than once per epoch."""

    def samples(self, total: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of `total` samples, the same on every worker: int64 of shape (total,)."""
        weights = np.array(self.weights, np.float64)
        random = np.random.default_rng((seed, epoch))
        return random.choice(len(weights), total, self.replacement, weights / weights.sum())


class Order:
    """Map each position of an epoch to a sample.

    `drawn_from` is a `Drawing`, or the number of samples from which each epoch takes `total`. With a number, each epoch
    takes different samples.
    """

    def __init__(self, total: int, drawn_from: int | Drawing, shuffle: bool) -> None:
        self._drawing = drawn_from if isinstance(drawn_from, Drawing) else None
        self.drawn_from = len(drawn_from.weights) if isinstance(drawn_from, Drawing) else drawn_from
        self.shuffle = bool(shuffle) and self._drawing is None
        self._total = total
        self._known: tuple[tuple[int, int], Any] = ((-1, -1), None)  # (seed, epoch), and the order for them

    def named(self) -> dict[str, Any]:
        """Return the settings that must be equal on all workers, as JSON."""
        weights = {} if self._drawing is None else {"weights": zlib.crc32(repr(self._drawing).encode())}
        return {"shuffle": self.shuffle, **weights}

    def samples(self, where: NDArray[np.int64], seed: int, epoch: int) -> list[int]:
        """Return the numbers of the samples at the positions `where` of an epoch."""
        if self._known[0] != (seed, epoch):
            if self._drawing is not None:
                order = self._drawing.samples(self._total, seed, epoch)
            else:
                order = permutation(self.drawn_from, seed, epoch, self.shuffle)[: self._total]
            self._known = (seed, epoch), order
        samples: list[int] = self._known[1][where].tolist()
        return samples


def keys(samples: Sequence[int], seed: int, epoch: int) -> NDArray[np.uint32]:
    """Return a key for random numbers for each of `samples` in `epoch`: uint32 of shape (len(samples), 4).

    A key consists of the seed's 64 bits, the epoch and the sample's number. ``np.random.default_rng`` accepts a key
    directly as a seed, and mixes its values.
    """
    made = np.empty((len(samples), 4), np.uint32)
    made[:, 0], made[:, 1], made[:, 2] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch & 0xFFFFFFFF
    made[:, 3] = np.asarray(samples, np.int64) & 0xFFFFFFFF
    return made


def step_length(left: int, global_batch: int, drop_remainder: bool = False, unit: int = 1) -> int:
    """Return the number of samples in the next step if `left` samples remain; 0 at the end of the epoch.

    The number is a multiple of `unit`, except in the last step. `unit` must divide `global_batch`.
    """
    if drop_remainder:
        return global_batch if left >= global_batch else 0
    if left <= global_batch:
        return left
    units = -(-left // unit)
    return (units + 1) // 2 * unit if 2 * units * unit < 3 * global_batch else global_batch


def count_full(left: int, global_batch: int, drop_remainder: bool = False, unit: int = 1) -> int:
    """Return the number of steps with a full global batch if `left` samples remain in the epoch."""
    if drop_remainder:
        return left // global_batch
    left = -(-left // unit) * unit
    return max(0, (2 * left - 3 * global_batch) // (2 * global_batch) + 1)


def count_steps(left: int, global_batch: int, drop_remainder: bool = False) -> int:
    """Return the number of steps that `left` samples need."""
    return left // global_batch if drop_remainder else -(-left // global_batch)


def block(length: int, place: int, workers: int) -> Range:
    """Return the range ``[first, last)`` of a step's `length` samples that worker number `place` of `workers` gets.

    The range is empty if there are more workers than samples.
    """
    each, extra = divmod(length, workers)
    first = place * each + min(place, extra)
    return first, first + each + (1 if place < extra else 0)


def blocks(length: int, place: int, workers: int, ranks: int = 0) -> list[Range]:
    """Return the ranges of a step's `length` samples that worker number `place` of `workers` gets.

    If `ranks` isn't 0, it is the size of a virtual world of at least `workers` ranks. The result is then one block for
    each virtual rank whose work this worker does. If `ranks` is 0, the result is one range.
    """
    if not ranks:
        return [block(length, place, workers)]
    return [block(length, r, ranks) for r in range(-(-place * ranks // workers), -(-(place + 1) * ranks // workers))]


def count(ranges: Iterable[Range]) -> int:
    """Return the number of positions in `ranges`."""
    return sum(last - first for first, last in ranges)


def part(ranges: Iterable[Range], first: int, last: int) -> tuple[Range, ...]:
    """Return the slice [first:last] of the list of all positions in `ranges`, as ranges."""
    found = []
    for begin, end in ranges:
        low, high = max(begin, begin + first), min(end, begin + last)
        if low < high:
            found.append((low, high))
        first, last = first - (end - begin), last - (end - begin)
    return tuple(found)


def positions(ranges: Iterable[Range]) -> NDArray[np.int64]:
    """Return the positions in `ranges`: int64 of shape (count,)."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, last, dtype=np.int64) for first, last in ranges)])


def ranges(where: NDArray[np.int64]) -> tuple[Range, ...]:
    """Return `where` as ranges of consecutive positions, in the same order. This is the inverse of `positions`."""
    cuts = np.flatnonzero(np.diff(where) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(where, cuts) if run.size)


@dataclass(frozen=True)
class Step:
    """An assigned step: its batch and its members."""

    number: int
    """Number of the step in its epoch, starting at 0."""
    batch: tuple[Range, ...]
    members: tuple[int, ...]
    """The ranks to which the step is assigned, in the order of their blocks."""
    ranks: int = 0
    """Size of the virtual world whose work the members do; 0 if there is none."""

    def share(self, rank: int) -> tuple[Range, ...]:
        """Return the positions that `rank` gets; empty if the step has no sample for this rank."""
        own = self._blocks(rank)
        return part(self.batch, own[0][0], own[-1][1])

    def parts(self, rank: int) -> list[int]:
        """Return how many samples each virtual rank of `rank` has. Virtual ranks without a sample are left out."""
        return [last - first for first, last in self._blocks(rank) if last > first]

    def _blocks(self, rank: int) -> list[Range]:
        return blocks(count(self.batch), self.members.index(rank), len(self.members), self.ranks)

    def outcome(self, participants: Iterable[int]) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Return (trained positions, positions that return to the pool) after a commit by these participants."""
        alive = set(participants)
        trained: tuple[Range, ...] = ()
        back: tuple[Range, ...] = ()
        for rank in self.members:
            if rank in alive:
                trained += self.share(rank)
            else:
                back += self.share(rank)
        if not trained:  # all participants had repeated the last sample
            last = count(self.batch) - 1
            return part(self.batch, last, last + 1), part(self.batch, 0, last)
        return trained, back


class EpochCursor:
    """Track which samples of an epoch are used, which are assigned and which are left.

    All workers make the same calls and so have the same pool. `take` assigns a step, and `commit` counts the shares of
    the step's participants as trained. `put_back` returns the positions of uncommitted steps to the pool.
    """

    def __init__(self, total: int, drop_remainder: bool = False) -> None:
        self.total = total
        self.unit = 1
        """Number of samples per shard, if steps are partitioned into shards."""
        self.ranks = 0
        """See `Step.ranks`."""
        self.drop_remainder = drop_remainder
        self.epoch = 0
        self.steps = 0
        """Number of committed steps in this epoch."""
        self.pool: tuple[Range, ...] = ((0, total),)
        """The positions that aren't used yet, in the order of their use."""
        self.taken: list[Step] = []
        """Steps that are assigned but not committed. Their positions are at the front of the pool."""

    @property
    def left(self) -> int:
        """Return the number of the epoch's samples that aren't used yet."""
        return count(self.pool)

    @property
    def rest(self) -> tuple[Range, ...]:
        """Return the pool without the assigned steps."""
        return part(self.pool, sum(count(step.batch) for step in self.taken), self.total)

    def take(self, global_batch: int, members: Sequence[int]) -> Step | None:
        """Assign the next step to `members` and return it; None at the end of the epoch."""
        rest = self.rest
        length = step_length(count(rest), global_batch, self.drop_remainder, self.unit)
        if length == 0:
            return None
        step = Step(self.steps + len(self.taken), part(rest, 0, length), tuple(members), self.ranks)
        self.taken.append(step)
        return step

    def commit(self, participants: Sequence[int] | None = None) -> list[Step]:
        """Count the assigned steps as trained by `participants` (None means all members), and return these steps."""
        steps, self.pool, self.taken = self.taken, self.rest, []
        for step in steps:
            if participants is not None and not set(participants).issuperset(step.members):
                self.pool += step.outcome(participants)[1]
        self.steps += len(steps)
        return steps

    def put_back(self) -> None:
        """Return the positions of uncommitted steps to the pool."""
        self.taken = []

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.steps, self.pool, self.taken = self.epoch + 1, 0, ((0, self.total),), []

    def deal(self, global_batch: int, members: Sequence[int], rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions that will be assigned to `rank` if nothing changes until the end of the epoch.

        The result consists of the positions in all batches, one batch after the other, and the length of each batch.
        Each batch has at least one position.
        """
        rest = positions(self.rest)
        left, place, workers = rest.size, tuple(members).index(rank), len(members)
        full = count_full(left, global_batch, self.drop_remainder)
        first, last = self._share(global_batch, place, workers)
        steps = rest[: full * global_batch].reshape(full, global_batch)
        shares = [(steps[:, first:last] if last > first else steps[:, -1:]).ravel()]
        lengths = [np.full(full, max(last - first, 1), dtype=np.int64)]
        rest = rest[full * global_batch :]
        while length := step_length(rest.size, global_batch, self.drop_remainder):
            first, last = self._share(length, place, workers)
            shares.append(rest[first:last] if last > first else rest[length - 1 : length])
            lengths.append(np.array([shares[-1].size], dtype=np.int64))
            rest = rest[length:]
        return np.concatenate(shares), np.concatenate(lengths)

    def _share(self, length: int, place: int, workers: int) -> Range:
        own = blocks(length, place, workers, self.ranks)
        return own[0][0], own[-1][1]

    def state(self) -> dict[str, Any]:
        """Return the state that another worker needs to continue after the committed steps, as JSON."""
        return {"epoch": self.epoch, "steps": self.steps, "pool": [list(r) for r in self.pool], "total": self.total}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from another worker's `state`. Raise ValueError if that worker has different data."""
        if state["total"] != self.total:
            raise ValueError(
                f"this worker's data has {self.total} samples, and the other workers' data has "
                f"{state['total']}; start all workers with the same data"
            )
        self.epoch, self.steps, self.taken = state["epoch"], state["steps"], []
        self.pool = tuple((first, last) for first, last in state["pool"])
