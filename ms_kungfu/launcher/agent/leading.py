"""The job's controller, while it is on this host."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.state.head import Head
from ms_kungfu.launcher.state.policy import bug
from ms_kungfu.launcher.state.start_error import StartError

_log = logging.getLogger(__name__)
_END_S = 1.0
_LED_S = 10.0  # for a controller whose job is over, to tell the others and to give the lease back


@dataclass(eq=False)
class OwnController:
    """`end(code, words)` ends this host's launcher, `fail` by an error."""

    end: Callable[[int, str], None]
    fail: Callable[[BaseException], None]
    head: Head | None = None
    has_ended: bool = False  # and didn't leave the job to another host
    _leading: asyncio.Future[int] | None = None

    @property
    def for_ever(self) -> Head | None:
        """The controller, if it is here and stays here."""
        return None if self.head is None or self.head.moves else self.head

    def begin(self, head: Head) -> None:
        """This host decides from now on."""
        self.head = head
        self._leading = asyncio.ensure_future(head.run())
        self._leading.add_done_callback(self.has_led)

    async def leave(self) -> None:
        """Before this host ends: over its connections the job is told to end, or would be. A controller whose job is
        over gives the lease back last."""
        head, leading = self.head, self._leading
        if head is not None and leading is not None:
            if head.moves:
                await head.leave()
            if head.is_over or head.has_left:
                await asyncio.wait([leading], timeout=_LED_S)

    async def close(self) -> None:
        if self._leading is not None and not self._leading.done():
            self._leading.cancel()
            await asyncio.wait([self._leading])

    async def wait(self) -> None:
        """For it to say why it ends."""
        if self._leading is not None:
            await asyncio.wait([self._leading], timeout=_END_S)

    def has_led(self, leading: asyncio.Future[int]) -> None:
        head, self.head = self.head, None
        if leading.cancelled() or head is None:
            return
        error = leading.exception()
        if isinstance(error, StartError):
            self.fail(error)
        elif error is not None:
            _log.error("internal error: the job can't be led", exc_info=error)
            self.end(1, f"{PROGRAM}: internal error: {bug(error)}")
        elif head.has_left:
            _log.info("this host has left the job")
            self.end(0, "")
        elif not head.moves:
            self.has_ended = True
            self.end(leading.result(), head.last_words or "")
        elif not head.is_deposed:  # which has told so, but perhaps not here
            asyncio.get_running_loop().call_later(_END_S, self.end, leading.result(), head.last_words or "")
