"""A limit on time, for what a loop awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """What `work` returns, or raises; asyncio.TimeoutError after so long, when it has been cancelled and is over.

    `asyncio.wait_for` before Python 3.12 goes wrong where its caller is cancelled in the moment in which the work
    fails: nested, it swallows the cancellation, or leaves an exception that nobody retrieves. Here who is cancelled
    always ends by that, and the work has ended before.
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
                close()  # a connection that nobody gets
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
