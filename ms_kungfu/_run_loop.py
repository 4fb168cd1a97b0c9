"""asyncio by `run_time`, which `_run_time.py` explains."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Callable, TypeVar

from ms_kungfu._run_time import SLICE_S, run_time

T = TypeVar("T")


class _Slices(selectors.DefaultSelector):
    """A selector that waits in slices: an idle loop reads its clock, too."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(SLICE_S if timeout is None else min(timeout, SLICE_S))


class RunTimeLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, whose timers, timeouts and `time` leave pauses out.

    After a pause it first handles what has come meanwhile: a timer fires once its remaining time has run.
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
    """Run `asyncio.run` in a RunTimeLoop. Threads that call `asyncio.run` meanwhile get one, too."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())  # asyncio.run has no other way to choose a loop before Python 3.12
    try:
        return asyncio.run(main)
    finally:
        asyncio.set_event_loop_policy(before)
