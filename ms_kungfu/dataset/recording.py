"""Record the committed steps of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ms_kungfu.dataset.sharding import EpochCursor, Range, Step


class Record(Protocol):
    """The interface of a `Ledger`."""

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        """Return whether the record of this step gets a fingerprint. `step` counts from the start of training."""

    def step(self, epoch: int, step: Step, rank: int, share: Iterable[Range], common: dict[str, Any]) -> None:
        """Record a committed step. `share` contains the positions that were delivered to this worker."""

    def end(self, cursor: EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """Record the end of an epoch."""

    def sync(self) -> None:
        """Sync the records to disk, so that they survive a crash of the machine."""


class Recording:
    """Record the steps of one dataset in a ledger. If there is no `ledger`, all methods do nothing."""

    def __init__(self, ledger: Record | None) -> None:
        self.ledger = ledger
        # The positions that were delivered to this worker, one entry for each step that isn't committed yet.
        self._delivered: list[tuple[Range, ...]] = []
        self._fingerprint: dict[str, Any] | None = None  # the fingerprint of the step that has ended

    def sync(self) -> None:
        """Sync the records to disk, so that they survive a crash of the machine."""
        if self.ledger is not None:
            self.ledger.sync()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Record nothing in this context, because its samples are only evaluated."""
        ledger, self.ledger = self.ledger, None
        try:
            yield
        finally:
            self.ledger = ledger

    def wants_fingerprint(self, cursor: EpochCursor, step: int) -> bool:
        """Return whether the step that has ended gets a fingerprint. `step` counts from the start of training."""
        if self.ledger is None or not cursor.taken:
            return False
        return self.ledger.wants_fingerprint(cursor.epoch, cursor.steps, step)

    def keep_fingerprint(self, step: int, tensors: Mapping[str, str]) -> None:
        """Store a fingerprint, which the record of the next committed step will contain."""
        self._fingerprint = {"step": step, "tensors": tensors}

    def deliver(self, share: tuple[Range, ...]) -> None:
        """Store the positions that this worker received in the latest uncommitted step."""
        if self.ledger is not None:
            self._delivered.append(share)

    def forget(self) -> None:
        """Discard the delivered shares; no committed step has used them."""
        self._delivered = []

    def commit(self, epoch: int, steps: Sequence[Step], rank: int, common: dict[str, Any], by_shards: bool) -> None:
        """Record committed steps. With `by_shards`, there is only one step, to which all delivered shares belong."""
        delivered, self._delivered = self._delivered, []
        if by_shards:
            delivered = [tuple(part for each in delivered for part in each)]
        if len(steps) > 1:
            common["first"] = steps[0].number
        if self._fingerprint is not None:
            common["fingerprint"], self._fingerprint = self._fingerprint, None
        if self.ledger is not None:
            for step, share in zip(steps, delivered):
                self.ledger.step(epoch, step, rank, share, common)
