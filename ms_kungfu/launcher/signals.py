"""Handle the launcher's signals until its process has ended.

With `loop.add_signal_handler`, a signal would get its default action again when the loop closes. The default action
would kill a launcher that is about to exit with the job's exit code. This matters for SIGTERM, and for SIGUSR1 in a
Slurm job, because a scheduler that takes nodes away often sends the signal twice.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Callable

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)


Handler = Callable[[int], Any]
Catch = Callable[
    [asyncio.AbstractEventLoop, int, Handler, int], None
]  # arguments: the event loop, the signal's number, the callback in the loop, and the callback's argument


def hear(loop: asyncio.AbstractEventLoop, interrupt: Handler, pass_on: Handler, in_slurm: bool, catch: Catch) -> None:
    """Install handlers for the signals that end the job (`interrupt`) and for those meant for the workers (`pass_on`).

    The event loop calls both handlers. Call this function in the main thread. `catch` is the function `outlive`, or its
    replacement in simulated processes.
    """
    for number in _ENDING:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup ignores it
            continue
        if number == signal.SIGTERM:
            catch(loop, number, interrupt, number)
        else:
            loop.add_signal_handler(number, interrupt, number)
    for number in _PASSED_ON:
        if number == signal.SIGUSR1 and in_slurm:
            catch(loop, number, interrupt, signal.SIGTERM)
        else:
            loop.add_signal_handler(number, pass_on, number)


def outlive(loop: asyncio.AbstractEventLoop, number: int, callback: Handler, argument: int) -> None:
    """Do the same as `loop.add_signal_handler`, but ignore the signal after the loop has closed."""

    def handler(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, argument)

    signal.signal(number, handler)
    signal.siginterrupt(number, False)


def ignore_from_now_on(in_slurm: bool) -> None:
    """Ignore signals, because the job's exit code is final.

    Python's own handlers aren't enough, because Python removes them shortly before the process exits.
    """
    for number in [signal.SIGTERM, *([signal.SIGUSR1] if in_slurm else ())]:
        signal.signal(number, signal.SIG_IGN)
