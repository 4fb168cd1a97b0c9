"""Detect ranks that wait for each other in different operations. This file contains the Python part.

A watching thread sleeps until another thread of this process has waited in a collective for 0.1 s. From then on, the
watching thread checks every 0.1 s whether the process makes progress. The code of
``ops_src/collectives/host/deadlock.h`` decides whether there is a deadlock; that header contains the correctness
argument. For point 1 of the argument, this Python file provides facts that only Python knows:

- whether only the main thread begins collectives. If other code may begin them (a user's thread, or the handler of a
  timer's signal), the missing collective may begin at any time.
- whether the main thread, if it isn't in a collective itself, is in a MindSpore call that waits for kernels.
- the main thread's position in the program.
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
_BEGIN_NOTHING = ("ms_kungfu", "mindspore")  # packages whose threads don't begin collectives
# Threads of multiprocessing.queues only write to pipes, but threads of multiprocessing.pool run user functions.
_FEEDERS = "multiprocessing.queues"
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_NOT_THE_PROGRAM = ("ms_kungfu", "mindspore")


_watched: set[int] = set()  # the IDs of this process and of the processes from which it was forked


def start(core: Any, start_thread: Callable[[str, Callable[[], None]], None]) -> None:
    """Start the thread that detects deadlocks, once per process."""
    if os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    start_thread("kungfu-deadlocks", lambda: watch(core))


def watch(core: Any) -> None:
    """Check for deadlocks until the process ends. The function runs in a separate thread."""
    while True:
        core.await_slow_wait()
        frames = sys._current_frames()
        main = threading.main_thread().ident
        frame = frames.pop(main, None) if main is not None else None
        frames.pop(threading.get_ident(), None)
        alone = core.device_engine() == "none" and begin_nothing(frames) and not awaits_timer()
        with contextlib.suppress(KungFuError):  # raised if this process is leaving the cluster
            core.look_for_deadlock(alone, waits_for_kernels(frame), place_in_program(frame))
        del frames, frame  # frames keep the local variables of their functions alive
        time.sleep(_LOOK_EVERY_S)


def begin_nothing(frames: Mapping[int, FrameType]) -> bool:
    """Return whether none of these frames is in a thread that may begin collectives."""
    for frame in frames.values():
        # `_worker` is the innermost frame of an idle executor thread: another thread has to submit its next task. If an
        # executor thread runs a task that is written in C, the thread's innermost frame is another function of that
        # module.
        if (_module(frame), frame.f_code.co_name) == ("concurrent.futures.thread", "_worker"):
            continue
        first = "threading"
        at: FrameType | None = frame
        while at is not None:  # go outwards to the thread's start function
            first = _module(at) if _module(at) != "threading" else first
            at = at.f_back
        if _package(first) not in _BEGIN_NOTHING and first != _FEEDERS:
            return False
    return True


def awaits_timer() -> bool:
    """Return whether a timer is running, because its signal's handler may begin a collective in the main thread."""
    return any(any(signal.getitimer(timer)) for timer in _TIMERS)


def waits_for_kernels(main: FrameType | None) -> bool:
    """Return whether the main thread is in a MindSpore call that runs kernels or waits for them."""
    return main is not None and _module(main) in _WAITS_FOR_KERNELS


def may_wait_for_others(main: FrameType | None) -> bool:
    """Return whether the main thread is in ms_kungfu or runs MindSpore kernels, and so may be in a collective."""
    if main is None:
        return False
    return _package(_module(main)) == "ms_kungfu" or (waits_for_kernels(main) and main.f_code.co_name != "compile")


def place_in_program(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program, such as ``train.py:12``; empty if the stack has no such line."""
    while frame is not None and _package(_module(frame)) in _NOT_THE_PROGRAM:
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]
