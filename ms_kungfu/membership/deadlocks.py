"""The worker's watch for ranks that wait for each other in different operations.

A thread sleeps until one of this process's threads has waited in a collective for 0.1 s. While one does, the thread
checks every 0.1 s whether the process stands still. ``ops_src/collectives/host/deadlock.h`` has the argument, and
decides. This file adds what only Python knows of point 1 there:

- whether only the main thread begins collectives. A user's thread may begin the missing one at any time, and so may
  the handler of a timer's signal;
- whether the main thread, if it isn't in a collective itself, is in a call of MindSpore's that waits for kernels;
- its position in the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ms_kungfu.errors import KungFuError

_LOOK_EVERY_S = 0.1
_WAITS_FOR_KERNELS = ("mindspore.graph.api", "mindspore.common.api")
_BEGIN_NOTHING = ("ms_kungfu", "mindspore")  # packages whose threads begin no collectives
_FEEDERS = "multiprocessing.queues"  # its threads only write; those of multiprocessing.pool run functions of the user
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_NOT_THE_PROGRAM = ("ms_kungfu", "mindspore")


_watched: set[int] = set()  # processes: this one, and the one which it was forked from


def start(core: Any, start_thread: Callable[[str, Callable[[], None]], None]) -> None:
    """Start the watch, once a process."""
    if os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    start_thread("kungfu-deadlocks", lambda: watch(core))


def watch(core: Any) -> None:
    """Look until the process ends. On a thread of its own."""
    while True:
        core.await_slow_wait()
        frames = sys._current_frames()
        main = threading.main_thread().ident
        frame = frames.pop(main, None) if main is not None else None
        frames.pop(threading.get_ident(), None)
        alone = core.device_engine() == "none" and begin_nothing(frames) and not awaits_timer()
        with contextlib.suppress(KungFuError):  # it leaves the cluster
            core.look_for_deadlock(alone, waits_for_kernels(frame), place_in_program(frame))
        del frames, frame  # they hold what their functions hold
        time.sleep(_LOOK_EVERY_S)


def begin_nothing(frames: Mapping[int, FrameType]) -> bool:
    """Return whether no thread with one of these frames begins collectives, as far as can be known."""
    for frame in frames.values():
        # An idle worker of an executor, in `_worker` itself, gets its next task from a thread that runs. One that runs
        # a function written in C is in another function of the same module.
        if (_module(frame), frame.f_code.co_name) == ("concurrent.futures.thread", "_worker"):
            continue
        first = "threading"
        at: FrameType | None = frame
        while at is not None:  # outwards, to the function that the thread was started with
            first = _module(at) if _module(at) != "threading" else first
            at = at.f_back
        if _package(first) not in _BEGIN_NOTHING and first != _FEEDERS:
            return False
    return True


def awaits_timer() -> bool:
    """Return whether a signal is due: its handler may begin a collective in the main thread."""
    return any(any(signal.getitimer(timer)) for timer in _TIMERS)


def waits_for_kernels(main: FrameType | None) -> bool:
    """Return whether the main thread is in a call of MindSpore's that runs kernels or waits for them."""
    return main is not None and _module(main) in _WAITS_FOR_KERNELS


def may_wait_for_others(main: FrameType | None) -> bool:
    """Return whether the main thread is in ms_kungfu, or in kernels of MindSpore's: either may be a collective."""
    if main is None:
        return False
    return _package(_module(main)) == "ms_kungfu" or (waits_for_kernels(main) and main.f_code.co_name != "compile")


def place_in_program(frame: FrameType | None) -> str:
    """Return ``train.py:12``, the innermost line that is the program's; empty if there is none."""
    while frame is not None and _package(_module(frame)) in _NOT_THE_PROGRAM:
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]
