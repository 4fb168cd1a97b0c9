"""Process handling for this package's programs: limits, ancestors, and jobs that end with their starter."""

from __future__ import annotations

import contextlib
import faulthandler
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
# Makes a worker write the Python stacks of its threads to stderr. Programs rarely use this real-time signal.
STACK_SIGNAL = signal.SIGRTMIN + 13
# Tells a worker that a child of `multiprocessing` runs the worker's program from its start; see membership/children.py.
UNGUARDED_SIGNAL = signal.SIGRTMIN + 14


def raise_descriptor_limit() -> None:
    """Raise this process's limit on file descriptors to the system's maximum.

    The usual soft limit of 1024 exists for programs that use select(2), which this package doesn't. Child processes
    inherit the limit when they fork.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than the hard limit that they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(most: int) -> int:
    """Return how many connections are allowed, at most `most`: all other code of the process needs descriptors, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(2, min(most, soft // 4))


def stat_of(pid: int | str) -> list[str]:
    """Return a process's fields in /proc, beginning with its state. Raise OSError if it has ended."""
    # The name in parentheses may contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def pin_threads(pid: int | str, cores: set[int]) -> bool:
    """Move the threads of process `pid` to `cores`.

    Return whether a thread had to be moved. If so, that thread may have started other threads in the meantime, so call
    this again.
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
    """Return whether that process is an ancestor of this process."""
    above = os.getppid()
    while above > 1 and above != pid:
        try:
            above = int(stat_of(above)[1])
        except OSError:
            return False
    return above == pid


def children(pid: int) -> list[int]:
    """Return a process's children. The list is empty if the process has ended."""
    found, is_listed = [], False
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                    found += [int(child) for child in file.readall().split()]
                is_listed = True
    if not is_listed:  # a kernel without CONFIG_PROC_CHILDREN
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                found += [int(entry)] if stat_of(entry)[1] == str(pid) else []
    return found


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [each for child in below for each in descendants(child)]


def show_stacks_when_asked() -> None:
    """Make STACK_SIGNAL write this process's thread stacks, unless the program itself uses the signal."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def ask_for_stack(pid: int) -> bool:
    """Make a worker write its stacks, and return whether it will.

    A worker that hasn't joined yet doesn't handle the signal, so the signal would end it; none is sent. `pid` may be a
    script with the worker below it.
    """
    return any(send_handled(each, STACK_SIGNAL) for each in (pid, *descendants(pid)))


def send_handled(pid: int, number: int) -> bool:
    """Send a signal to a process if the process has a handler for it; return whether it has."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) >> (number - 1) & 1:
            os.kill(pid, number)
            return True
    return False


@contextlib.contextmanager
def printing(program: str) -> Iterator[None]:
    """Make printing in this block safe: the terminal may lack characters, and the reader may end early (`... | head`).

    If the output can't be written, for example because the disk is full, the program ends with a message.
    """
    if sys.stdout is None:  # >&-
        sys.exit(f"{program}: the output can't be written: standard output is closed")
    with contextlib.suppress(AttributeError):  # a stream that another program has replaced
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # The rest of the stream's buffer is discarded when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"{program}: the output can't be written: {error.strerror}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the block at SIGTERM or SIGHUP with SystemExit, so that `finally` clauses run. Ignore further signals.

    This has no effect outside of the main thread, or on a signal that is ignored (nohup) or already has a handler.
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
    """End a kungfu-run process if it is running, and thereby its job."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # kungfu-run's supervisor ends the rest
            process.wait()
