"""Helpers for processes: resource limits, parent and child processes, signals and output."""

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
FORK_SERVER = "kungfu-forks"  # the name that ps and top show
# This signal makes a worker write the Python stacks of its threads to stderr. Programs rarely use real-time signals.
STACK_SIGNAL = signal.SIGRTMIN + 13
# This signal notifies a worker that one of its `multiprocessing` children is running the worker's program from the
# beginning; see membership/children.py.
UNGUARDED_SIGNAL = signal.SIGRTMIN + 14


def raise_descriptor_limit() -> None:
    """Raise this process's limit on file descriptors to the system's maximum.

    The usual soft limit of 1024 protects programs that use select(2), which this package doesn't use. Child processes
    inherit the raised limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems reject the hard limit that they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(most: int) -> int:
    """Return how many connections the process may have: `most`, but at most a quarter of its descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(2, min(most, soft // 4))


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state. Raise OSError if the process has ended."""
    # The process's name, in parentheses, comes before the state. The name may contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def pin_threads(pid: int | str, cores: set[int]) -> bool:
    """Move the threads of process `pid` to `cores`.

    Return whether a thread had to be moved. In that case, call this function again, because that thread may have
    started other threads before it was moved.
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
    """Return whether process `pid` is an ancestor of this process."""
    above = os.getppid()
    while above > 1 and above != pid:
        try:
            above = int(stat_of(above)[1])
        except OSError:
            return False
    return above == pid


def children(pid: int) -> list[int]:
    """Return the PIDs of a process's children. The list is empty if the process has ended."""
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


def is_fork_server(pid: int) -> bool:
    """Return whether kungfu-run forks workers from process `pid` (`launcher.agent.fork_program`)."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == f"{FORK_SERVER}\n"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [each for child in below for each in descendants(child)]


def show_stacks_when_asked() -> None:
    """Install a handler for STACK_SIGNAL that writes the stacks of this process's threads to stderr.

    Do nothing if the program itself uses the signal.
    """
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def ask_for_stack(pid: int) -> bool:
    """Signal a worker to write its stacks, and return whether the signal was sent.

    A worker that hasn't joined yet gets no signal, because it has no handler and the signal would end it. `pid` may be
    the worker, or a script that has started the worker.
    """
    return any(send_handled(each, STACK_SIGNAL) for each in (pid, *descendants(pid)))


def send_handled(pid: int, number: int) -> bool:
    """Send signal `number` to a process, but only if the process handles this signal. Return whether it was sent."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) >> (number - 1) & 1:
            os.kill(pid, number)
            return True
    return False


@contextlib.contextmanager
def printing(program: str) -> Iterator[None]:
    """Handle errors of standard output in this block.

    Characters that the terminal lacks are escaped. If the reader ends early (`... | head`), further output is dropped.
    If the output can't be written, for example because the disk is full, the program ends with a message.
    """
    if sys.stdout is None:  # e.g. after ">&-" in a shell
        sys.exit(f"{program}: the output can't be written: standard output is closed")
    with contextlib.suppress(AttributeError):  # another module may have replaced the stream
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # Python flushes the stream's buffer when the process ends. That output now goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"{program}: the output can't be written: {error.strerror}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise SystemExit in this block on SIGTERM or SIGHUP, so that `finally` clauses run. Ignore further signals.

    The function has an effect only in the main thread, and only on signals with their default action (nohup makes a
    process ignore SIGHUP).
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
    """End a kungfu-run process, and thereby its job. Do nothing if the process has ended already."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # kungfu-run's supervisor ends the job's other processes
            process.wait()
