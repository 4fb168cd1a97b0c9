"""Limit the time of an awaited task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Return or raise what `work` does.

    Raises asyncio.TimeoutError after `seconds`, once `work` is cancelled and has ended.

    Before Python 3.12, `asyncio.wait_for` fails if its caller is cancelled at the moment at which the work fails.
    Nested calls swallow the cancellation, or leave an exception that no task retrieves. Here a cancelled caller always
    ends with CancelledError, after the work has ended.
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
