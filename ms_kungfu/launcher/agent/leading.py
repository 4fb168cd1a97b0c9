"""Run the job's controller on this host."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.state.local_controller import LocalController
from ms_kungfu.launcher.state.policy import bug
from ms_kungfu.launcher.state.start_error import StartError

_log = logging.getLogger(__name__)
_END_S = 1.0
_LED_S = 10.0  # time for the controller to notify the other hosts and release the lease at the end of the job


@dataclass(eq=False)
class OwnController:
    """This host's controller.

    Args:
        end: `end(code, words, failed)` ends this host's launcher with an exit code and a last message. `failed` is the
            key of the process whose failure ends the job, or None.
        fail: ends this host's launcher because of an error.
        controller: the controller, while it runs on this host.
        has_ended: whether the controller has ended and no other host continues the job.
    """

    end: Callable[[int, str, int | None], None]
    fail: Callable[[BaseException], None]
    controller: LocalController | None = None
    has_ended: bool = False
    _leading: asyncio.Future[int] | None = None

    @property
    def for_ever(self) -> LocalController | None:
        """Return the controller if it runs on this host and can't move to another host."""
        return None if self.controller is None or self.controller.moves else self.controller

    def begin(self, controller: LocalController) -> None:
        """Run a controller on this host."""
        self.controller = controller
        self._leading = asyncio.ensure_future(controller.run())
        self._leading.add_done_callback(self.has_led)

    async def leave(self) -> None:
        """End the controller before this host's launcher ends.

        If the job is over, first wait until the controller has notified the other hosts and released the lease.
        """
        controller, leading = self.controller, self._leading
        if controller is not None and leading is not None:
            if controller.moves:
                await controller.leave()
            if controller.is_over or controller.has_left:
                await asyncio.wait([leading], timeout=_LED_S)

    async def close(self) -> None:
        if self._leading is not None and not self._leading.done():
            self._leading.cancel()
            await asyncio.wait([self._leading])

    async def wait(self) -> None:
        """Wait a short time for the controller to end, because it can report why the job ended."""
        if self._leading is not None:
            await asyncio.wait([self._leading], timeout=_END_S)

    def has_led(self, leading: asyncio.Future[int]) -> None:
        controller, self.controller = self.controller, None
        if leading.cancelled() or controller is None:
            return
        error = leading.exception()
        if isinstance(error, StartError):
            self.fail(error)
        elif error is not None:
            _log.error("internal error: where=controller", exc_info=error)
            self.end(1, f"{PROGRAM}: internal error: {bug(error)}", None)
        elif controller.has_left:
            _log.info("host left: host=this")
            self.end(0, "", None)
        elif not controller.moves:
            self.has_ended = True
            self.end(leading.result(), controller.last_words or "", controller.failed)
        elif not controller.has_stepped_down:  # the controller has notified the agents, but perhaps not this agent
            words = controller.last_words or ""
            asyncio.get_running_loop().call_later(_END_S, self.end, leading.result(), words, controller.failed)
