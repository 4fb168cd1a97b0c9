"""Handle the launcher's signals until its process has ended.

`loop.add_signal_handler` restores a signal's default action when the loop closes. The default action of SIGTERM, and of
SIGUSR1 in a Slurm job, kills a process that is about to end with the job's exit code. A scheduler that takes nodes away
often sends the signal twice.
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
]  # arguments: signal number, callback in the loop, callback's argument


def hear(loop: asyncio.AbstractEventLoop, interrupt: Handler, pass_on: Handler, in_slurm: bool, catch: Catch) -> None:
    """Call `interrupt` for signals that end the job, and `pass_on` for signals to the workers, in the event loop.

    Call this in the main thread. `catch` is `outlive`, except in a simulated process.
    """
    for number in _ENDING:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
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
    """Act as `loop.add_signal_handler`, but ignore signals after the loop has closed."""

    def handler(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, argument)

    signal.signal(number, handler)
    signal.siginterrupt(number, False)


def ignore_from_now_on(in_slurm: bool) -> None:
    """Ignore signals: the exit code is final, and Python removes its handlers shortly before the process ends."""
    for number in [signal.SIGTERM, *([signal.SIGUSR1] if in_slurm else ())]:
        signal.signal(number, signal.SIG_IGN)
