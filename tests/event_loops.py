"""What Python 3.9 does with asyncio's events, for tests in newer versions."""

from __future__ import annotations

import asyncio
import warnings


def _loop_of_this_thread() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return asyncio.get_event_loop_policy().get_event_loop()
        except RuntimeError:
            return None


class EventOfPython39(asyncio.Event):
    """An event that knows the loop of the thread that makes it. In Python 3.9, only that loop may wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in = _loop_of_this_thread()
