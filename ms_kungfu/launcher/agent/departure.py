"""Handle signals to this host's launcher: the host leaves the job, or the job ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.launcher.agent.leading import OwnController
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.policy import signal_name
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_HEAD_S = 5.0  # time for the controller to end the job after a signal to this launcher
_OUTPUT_S = 1.0  # time to write the remaining output after a signal
_LET_GO_S = 15.0  # time after -leave-grace for the controller, and for the exit of killed workers


@dataclass(eq=False)
class Departure:
    """Make this host leave the job, or end the job, after a signal to the launcher.

    Args:
        options: the launcher's options.
        own: the controller, while it runs on this host.
        send: sends a message to the controller.
        end: ends this host's launcher with an exit code and a last message.
        is_alone: returns whether this host isn't in a job.
        wait_s: returns how many seconds it may take to find the next controller.
        is_leaving: whether the host is leaving after a SIGTERM.
    """

    options: Options
    own: OwnController
    send: Callable[[m.FromHost], None]
    end: Callable[[int, str], None]
    is_alone: Callable[[], bool]
    wait_s: Callable[[], float]
    is_leaving: bool = False
    interrupted: int = 0  # the signal that must end the job
    cut_output: Callable[[], None] | None = None
    """Drops the remaining output; set when the job has ended on this host and only output remains to be written."""

    def on_signal(self, number: int) -> None:
        """Leave the job, or end the job.

        - After SIGTERM, this host leaves if the controller decides that the job can continue without this host. If the
          controller runs on this host and can move, another host then controls the job.
        - After any other signal, the controller ends the job on all hosts within -grace-period.
        - After a second signal to this launcher, the job ends at once. This launcher exits even if the controller
          doesn't react.
        - If the job has ended already, a signal sets a limit of `_OUTPUT_S` seconds for writing the remaining
          output. A second signal drops the remaining output.
        """
        if self.cut_output is not None:
            asyncio.get_running_loop().call_later(0.0 if self.interrupted else _OUTPUT_S, self.cut_output)
            self.interrupted = number
            return
        controller = self.own.controller
        again = bool(self.interrupted) or (number == signal.SIGTERM and self.is_leaving)
        if controller is not None and controller.is_over and not controller.has_stepped_down:
            if again:
                controller.hurry()
            # A signal to another host may have ended the job. This is the first signal to this launcher.
            self.interrupted = number
            return
        if self.interrupted:
            self._tell(m.Interrupted(number, again=True))
        if again or self.is_alone():
            self.interrupted = number
            self.end(128 + number, f"{PROGRAM}: interrupted by {signal_name(number)}")
            return
        if number == signal.SIGTERM and self.options.watch and self.own.for_ever is None:
            self.is_leaving = True
            self._tell(m.Leave())
            limit_s = self.options.leave_grace_s
            _log.info(
                "host leaving: host=%s limit_s=%g. Its workers leave within this time (-leave-grace)",
                self.options.host.name, limit_s,
            )  # fmt: skip
            # If too few workers would remain, the job ends instead. Ending the job may take -grace-period.
            limit_s = max(limit_s, self.options.grace_period_s) + _LET_GO_S
            self._end_later(limit_s, signal_name(number), number, "the controller has not released this host")
            return
        self._interrupt(number)

    def stop_job(self) -> None:
        """End the job on all hosts, because the user of the dashboard has requested that.

        The controller on this host serves the dashboard. If another controller takes over before the job has ended,
        this launcher repeats the request to that controller, as it does after a signal.
        (`test_stop_of_the_dashboard_is_repeated_to_the_next_controller`.)
        """
        self._interrupt(signal.SIGTERM, " from the dashboard")

    def _interrupt(self, number: int, where: str = "") -> None:
        self.interrupted = number
        self._tell(m.Interrupted(number), where)
        limit_s = _HEAD_S + self.options.grace_period_s + self.wait_s()
        self._end_later(limit_s, f"{signal_name(number)}{where}", number, "the controller has not ended the job")

    def _end_later(self, seconds: float, by: str, number: int, reason: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._end_late, by, number, reason)

    def _end_late(self, by: str, number: int, reason: str) -> None:
        controller = self.own.controller
        error = None if controller is None else controller.store_error
        because = "" if error is None else f", because the store accepts no change: {error}"
        self.end(128 + number, f"{PROGRAM}: interrupted by {by}, but {reason}{because}")

    def _tell(self, message: m.Leave | m.Interrupted, where: str = "") -> None:
        """Pass a message to the controller. A controller on this host gets it even before this host has registered."""
        controller, own = self.own.controller, self.options.host.name
        if controller is None or controller.has_stepped_down:
            self.send(message)
        elif isinstance(message, m.Leave):
            controller.host_leaves(own)
        else:
            controller.interrupted(message.number, where or (f" on host {own}" if controller.moves else ""))
            if message.again:
                controller.hurry()

    def tell_again(self) -> None:
        """Send the messages about earlier signals to the next controller, too."""
        if self.is_leaving:
            self.send(m.Leave())
        if self.interrupted:
            self.send(m.Interrupted(self.interrupted))

    @property
    def exit_code(self) -> int:
        """Return the launcher's exit code for the case that no controller is left."""
        number = self.interrupted or (signal.SIGTERM if self.is_leaving else 0)
        return 128 + number if number else 1
