"""What the programs of this package do about processes: limits, ancestors, and jobs that end with their starter."""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_GRACE_S = 10.0
# Has a worker write the Python stacks of its threads to stderr. A real-time signal, which programs hardly use.
STACK_SIGNAL = signal.SIGRTMIN + 13


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system allows it.

    The usual soft limit of 1024 is for programs that use select(2). Its children inherit the limit at their fork.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they claim
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(most: int) -> int:
    """Return how many of `most` connections there may be: the rest of the process needs descriptors, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(2, min(most, soft // 4))


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of a process in /proc, from its state on. OSError if it has ended."""
    # The name in parentheses may hold spaces and parentheses itself.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def pin_threads(pid: int | str, cores: set[int]) -> bool:
    """Move the threads of process `pid` to `cores`.

    Return whether one had to be moved: it may have started others since.
    """
    moved = False
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(int(task.name)) != cores:
                    os.sched_setaffinity(int(task.name), cores)
                    moved = True
    return moved


def is_above(pid: int) -> bool:
    """Return whether that process has started this one, or one that has."""
    above = os.getppid()
    while above > 1 and above != pid:
        try:
            above = int(stat_of(above)[1])
        except OSError:
            return False
    return above == pid


def children(pid: int) -> list[int]:
    """Return the children; None if the process has ended."""
    found: list[int] = []
    files = glob.glob(f"/proc/{pid}/task/*/children")
    for file in files:
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, Path(file).read_text().split())
    if not files:  # a kernel without CONFIG_PROC_CHILDREN
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                found += [int(entry)] if stat_of(entry)[1] == str(pid) else []
    return found


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [each for child in below for each in descendants(child)]


def show_stacks_when_asked() -> None:
    """Let STACK_SIGNAL have this process write its threads' stacks, unless the program uses the signal itself."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def ask_for_stack(pid: int) -> bool:
    """Have a worker write its stacks; return whether it will.

    One that hasn't joined yet doesn't handle the signal, and would end by it. `pid` may be a script's, with the worker
    below it.
    """
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{each}/status").read_text()
            caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
            if int(caught, 16) >> (STACK_SIGNAL - 1) & 1:
                os.kill(each, STACK_SIGNAL)
                return True
    return False


@contextlib.contextmanager
def printing(program: str) -> Iterator[None]:
    """Print in this block, whatever characters the terminal lacks, and even if the reader ends early (`... | head`).

    If the output can't be written, as on a full disk, that is the program's last message.
    """
    if sys.stdout is None:  # >&-
        sys.exit(f"{program}: what it has to say can't be written: standard output is closed")
    with contextlib.suppress(AttributeError):  # a stream of another program's
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # The rest of its buffer is discarded when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"{program}: what it has to say can't be written: {error.strerror}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the block at SIGTERM and SIGHUP by SystemExit, so that its `finally` clauses run; ignore further ones.

    It does nothing outside of the main thread, nor for a signal that is ignored (nohup) or has a handler already.
    """
    handled = []
    if threading.current_thread() is threading.main_thread():
        handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]

    def end_block(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in handled:
        signal.signal(number, end_block)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def end_launcher(process: subprocess.Popen[Any]) -> None:
    """End a kungfu-run that may be running, and so its job."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its supervisor ends the rest
            process.wait()
