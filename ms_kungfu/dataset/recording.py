"""What goes on record of the steps of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ms_kungfu.dataset.sharding import EpochCursor, Range, Step


class Record(Protocol):
    """Where what was trained goes on record: a `Ledger`."""

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        """Whether this step of the epoch, the `step`-th since training began, goes on record with a fingerprint."""

    def step(self, epoch: int, step: Step, rank: int, share: Iterable[Range], common: dict[str, Any]) -> None:
        """A step was trained, of which `share` was delivered to this worker."""

    def end(self, cursor: EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """An epoch is over."""

    def sync(self) -> None:
        """What is on record outlives the machine."""


class Recording:
    """Of one data set. It does nothing without a `ledger`."""

    def __init__(self, ledger: Record | None) -> None:
        self.ledger = ledger
        self._delivered: list[tuple[Range, ...]] = []  # to this worker, of the first of the steps taken
        self._fingerprint: dict[str, Any] | None = None  # of the step that is over

    def sync(self) -> None:
        """What is on record outlives the machine from now on."""
        if self.ledger is not None:
            self.ledger.sync()

    @contextmanager
    def off(self) -> Iterator[None]:
        """What is handed out meanwhile isn't trained but evaluated."""
        ledger, self.ledger = self.ledger, None
        try:
            yield
        finally:
            self.ledger = ledger

    def wants_fingerprint(self, cursor: EpochCursor, step: int) -> bool:
        """Whether the step that is over, the `step`-th since training began, goes on record with a fingerprint."""
        if self.ledger is None or not cursor.taken:
            return False
        return self.ledger.wants_fingerprint(cursor.epoch, cursor.steps, step)

    def keep_fingerprint(self, step: int, tensors: Mapping[str, str]) -> None:
        """It goes on record with the next step."""
        self._fingerprint = {"step": step, "tensors": tensors}

    def deliver(self, share: tuple[Range, ...]) -> None:
        """What has really come to this worker in the step that was taken last."""
        if self.ledger is not None:
            self._delivered.append(share)

    def forget(self) -> None:
        """What was delivered isn't trained."""
        self._delivered = []

    def commit(self, epoch: int, steps: Sequence[Step], rank: int, common: dict[str, Any], by_shards: bool) -> None:
        """The steps are trained. `by_shards` it is one, to which belongs all that was delivered."""
        delivered, self._delivered = self._delivered, []
        if by_shards:
            delivered = [tuple(part for each in delivered for part in each)]
        if self._fingerprint is not None:
            common["fingerprint"], self._fingerprint = self._fingerprint, None
        if self.ledger is not None:
            for step, share in zip(steps, delivered):
                self.ledger.step(epoch, step, rank, share, common)
