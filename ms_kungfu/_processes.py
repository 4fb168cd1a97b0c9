"""What the programs of this package do about processes: limits of their own, who is below whom, jobs that end with
whoever starts them."""

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
# For a worker to write the Python stacks of its threads to stderr. Of those for real time, which programs hardly use.
STACK_SIGNAL = signal.SIGRTMIN + 13


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as the system allows it: the usual soft limit of 1024 is for programs
    that use select(2). Its children inherit what holds when they are forked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stat_of(pid: int | str) -> list[str]:
    """What /proc tells of a process, from its state on. OSError where it is gone."""
    # The name in parentheses may hold spaces and parentheses itself.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def pin_threads(pid: int | str, cores: set[int]) -> bool:
    """Moves the threads of process `pid` to `cores`. Whether one had to be moved: it may have started others since."""
    moved = False
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(int(task.name)) != cores:
                    os.sched_setaffinity(int(task.name), cores)
                    moved = True
    return moved


def is_above(pid: int) -> bool:
    """Whether that process has started this one, or one that has."""
    above = os.getppid()
    while above > 1 and above != pid:
        try:
            above = int(stat_of(above)[1])
        except OSError:
            return False
    return above == pid


def children(pid: int) -> list[int]:
    """None where the process is gone."""
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
    """From now on STACK_SIGNAL has this process write its threads' stacks, whatever they do; unless the program has a
    use of its own for it."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def ask_for_stack(pid: int) -> bool:
    """Has a worker write its stacks. Whether it will: one that hasn't joined yet doesn't know the signal, and would end
    by it. `pid` may be a script's, with the worker below it."""
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
    """What is printed in it may have characters that the terminal lacks, and may end early (`... | head`). Where it
    can't be written, as on a full disk, that is the program's last word."""
    if sys.stdout is None:  # >&-
        sys.exit(f"{program}: what it has to say can't be written: standard output is closed")
    with contextlib.suppress(AttributeError):  # somebody's own stream
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is still in its buffer goes nowhere when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"{program}: what it has to say can't be written: {error.strerror}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block by SystemExit, so that its `finally` clauses run; further ones are ignored then.

    Does nothing outside of the main thread, nor for a signal that is ignored (nohup) or that somebody handles already.
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
    """Ends a kungfu-run that may be running, and so its job."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its supervisor ends the rest
            process.wait()
