"""Make workers of this host write a final checkpoint before a signal ends the job."""

from __future__ import annotations

from typing import Callable, Protocol


class Waiter(Protocol):
    """A worker's request that stays open until the worker has written its final checkpoint or exits."""

    def note_end(self, number: int) -> None:
        """Notify the worker that the signal `number` is about to end the job."""


class LastCheckpoints:
    """The workers that write a final checkpoint. Used only in the agent's event loop.

    `on_written` is called after `begin`, as soon as no worker has a checkpoint left to write.
    """

    def __init__(self, on_written: Callable[[], None]) -> None:
        self._on_written = on_written
        self._waiters: list[Waiter] = []
        self._number = 0  # the signal that ends the job; 0 before `begin`

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: Waiter) -> None:
        self._waiters.append(waiter)
        if self._number:
            waiter.note_end(self._number)

    def remove(self, waiter: Waiter) -> None:
        """Remove a worker's request whose connection has ended. Ignore requests that weren't added."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._look()

    def begin(self, number: int) -> None:
        """Make all workers write a checkpoint. A second call, for another controller, has no effect on the workers."""
        if not self._number:
            self._number = number
            for waiter in self._waiters:
                waiter.note_end(number)
        self._look()

    def _look(self) -> None:
        if self._number and not self._waiters:
            self._on_written()
