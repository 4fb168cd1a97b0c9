"""Run asyncio with the clock `run_time`, which `_run_time.py` explains."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Callable, TypeVar

from ms_kungfu._run_time import SLICE_S, run_time

T = TypeVar("T")


class _Slices(selectors.DefaultSelector):
    """A selector that waits in slices, so that even an idle loop reads the clock regularly."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(SLICE_S if timeout is None else min(timeout, SLICE_S))


class RunTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that doesn't count times when the process was paused.

    After a pause, the loop first handles the events that arrived during the pause. A pending timer fires when its
    remaining time has passed.
    """

    def __init__(self, clock: Callable[[], float] = run_time) -> None:
        self._run_time = clock
        super().__init__(_Slices())

    def time(self) -> float:
        return self._run_time()


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return RunTimeLoop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Call `asyncio.run` with a RunTimeLoop as its event loop.

    If another thread calls `asyncio.run` at the same time, that thread also gets a RunTimeLoop.
    """
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())  # before Python 3.12, asyncio.run can't choose a loop in another way
    try:
        return asyncio.run(main)
    finally:
        asyncio.set_event_loop_policy(before)
