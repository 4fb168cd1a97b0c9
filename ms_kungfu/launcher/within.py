"""Limit the time of an awaited task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Await `work`. Return its result, or raise its exception.

    If `work` takes longer than `seconds`, cancel it, wait until it has ended, and raise asyncio.TimeoutError.

    Before Python 3.12, `asyncio.wait_for` misbehaves if its caller is cancelled at the moment when the work fails.
    Nested calls swallow the cancellation, or leave an exception that no task retrieves. With this function, a cancelled
    caller always gets CancelledError, after the work has ended.
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
                close()  # the result is a connection that has no owner
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
