"""The signals that a launcher hears, until its process is gone.

`loop.add_signal_handler` gives a signal its default action back when the loop closes. For SIGTERM, and in a Slurm job
SIGUSR1, that kills the process in the moment in which it is about to end with the job's exit code; and whoever takes
nodes away may well say so twice.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Callable

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)


Handler = Callable[[int], Any]
Catch = Callable[[asyncio.AbstractEventLoop, int, Handler, int], None]  # number, what is called in the loop, with what


def hear(loop: asyncio.AbstractEventLoop, interrupt: Handler, pass_on: Handler, in_slurm: bool, catch: Catch) -> None:
    """Calls `interrupt` at those that end the job and `pass_on` at those that are the workers', in the loop. In the
    main thread. `catch` is `outlive` but in a simulated process."""
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
    """As `loop.add_signal_handler`, but what is heard after the loop has closed changes nothing."""

    def handler(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, argument)

    signal.signal(number, handler)
    signal.siginterrupt(number, False)


def ignore_from_now_on(in_slurm: bool) -> None:
    """The exit code is settled. Python takes its handlers away a little before the process is gone."""
    for number in [signal.SIGTERM, *([signal.SIGUSR1] if in_slurm else ())]:
        signal.signal(number, signal.SIG_IGN)
