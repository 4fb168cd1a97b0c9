"""The workers of this host that write a checkpoint when the job is about to end by a signal."""

from __future__ import annotations

from typing import Callable, Protocol


class Waiter(Protocol):
    """A worker's request that is open for as long as the worker would write a checkpoint, or writes it."""

    def note_end(self, number: int) -> None:
        """Notify the worker that the job is about to end by this signal."""


class LastCheckpoints:
    """These workers, in the agent's event loop. `on_written` is called when none is left, after `begin`."""

    def __init__(self, on_written: Callable[[], None]) -> None:
        self._on_written = on_written
        self._waiters: list[Waiter] = []
        self._number = 0  # the signal that ends the job

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: Waiter) -> None:
        self._waiters.append(waiter)
        if self._number:
            waiter.note_end(self._number)

    def remove(self, waiter: Waiter) -> None:
        """Remove a worker that has hung up; do nothing for any other request."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._look()

    def begin(self, number: int) -> None:
        """Have all write a checkpoint; another controller may say it again."""
        if not self._number:
            self._number = number
            for waiter in self._waiters:
                waiter.note_end(number)
        self._look()

    def _look(self) -> None:
        if self._number and not self._waiters:
            self._on_written()
