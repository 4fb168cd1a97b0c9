"""A time limit for an awaited task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Return or raise what `work` does; asyncio.TimeoutError after so long, once it has been cancelled and has ended.

    `asyncio.wait_for` before Python 3.12 fails if its caller is cancelled in the moment in which the work fails.
    Nested, it swallows the cancellation, or leaves an exception that no task retrieves. Here a cancelled caller always
    ends by that, and the work has ended before.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_retrieve)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        if task.cancel():
            await asyncio.wait({task})
        elif not task.cancelled() and task.exception() is None:
            close = getattr(task.result(), "close", None)
            if close is not None:
                close()  # a connection without an owner
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


def _retrieve(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()
