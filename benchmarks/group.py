"""Control the processes of one baseline from the main process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.contenders.base import Contender
from ms_kungfu._processes import stat_of

_GRACE_S = 10.0
_KILL_GRACE_S = 3.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class GroupError(Exception):
    """A baseline's process has failed, hangs or reports an error. The message contains the end of its output."""


class Group:
    """Starts the ranks, sends them tasks, ends them. Belongs to one thread."""

    def __init__(self, name: str, contender: type[Contender], size: int, timeout_s: float) -> None:
        self.name, self.contender, self.size = name, contender, size
        self._timeout_s = timeout_s
        self._folder = tempfile.mkdtemp(prefix="kungfu-bench-")  # mode 0700: no other user reaches the socket
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._failed = False  # after a failure, the other ranks may be waiting for the failed rank
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._listener.bind(str(Path(self._folder) / "socket"))
        self._listener.listen(self.size)
        started = self.contender.processes(self.size, self._folder)
        try:
            with open(Path(self._folder) / "log", "ab") as log:
                for one in started:
                    self._processes.append(
                        subprocess.Popen(
                            one.command,
                            env={**os.environ, **one.environ},
                            pass_fds=one.descriptors,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,  # so that its descendants can be ended, too, e.g. mpirun's
                        )
                    )
        finally:
            for descriptor in {d for one in started for d in one.descriptors}:
                os.close(descriptor)

    def wait_ready(self) -> None:
        """Wait until each rank has joined its baseline's cluster and is blocked in a read."""
        deadline = time.monotonic() + self._timeout_s
        self._listener.settimeout(0.2)
        while len(self._connections) < self.size:
            try:
                accepted, _ = self._listener.accept()
                accepted.setblocking(True)
                self._connections.append(Connection(accepted.detach()))
            except socket.timeout:
                if any(p.poll() not in (None, 0) for p in self._processes):
                    raise self._error("a process has ended before it was ready") from None
                if time.monotonic() > deadline:
                    raise self._error(f"not ready within {self._timeout_s:g} s") from None
        answers = dict(zip(self._connections, self._answers()))
        self._connections.sort(key=lambda connection: answers[connection]["rank"])
        self._pids = [answers[connection]["pid"] for connection in self._connections]

    def measure(self, task: Any) -> list[dict[str, Any]]:
        """Make all ranks execute `task`, and return their answers by rank."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # reading the answers detects a failed rank
                connection.send(task)
        answers = self._answers()
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise self._error(f"rank {rank}: {answer['error']}")
        return answers

    def _answers(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout_s
        received: dict[Any, dict[str, Any]] = {}
        while len(received) < self.size:
            missing = [connection for connection in self._connections if connection not in received]
            ready: list[Any] = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._error(f"no answer within {self._timeout_s:g} s")
            for connection in ready:
                try:
                    received[connection] = connection.recv()
                except (EOFError, ConnectionError):
                    raise self._error("a rank has died") from None
        return [received[connection] for connection in self._connections]

    def cpu_seconds(self, starters: bool = False) -> float:
        """Return the ranks' processor time so far. ``starters``: add that of the processes that started the ranks."""
        total = 0
        for pid in {*self._pids, *(process.pid for process in self._processes if starters)}:
            with contextlib.suppress(OSError):
                fields = stat_of(pid)
                total += int(fields[11]) + int(fields[12])
        return total / _TICKS_PER_S

    def _error(self, what: str) -> GroupError:
        self._failed = True
        log = (Path(self._folder) / "log").read_text(errors="replace").rstrip()
        tail = "".join(f"\n    {line}" for line in log.splitlines()[-15:])
        return GroupError(f"{self.name}: {what}" + (f"; the end of its log:{tail}" if tail else ""))

    def close(self) -> None:
        """End all processes. A rank ends when its connection closes; kill it if it doesn't."""
        self._listener.close()
        for connection in self._connections:
            connection.close()
        ready = bool(self._pids) and not self._failed
        deadline = time.monotonic() + (_GRACE_S if ready else 0.0)
        for process in self._processes:
            # mpirun ends its ranks if it gets a SIGTERM. After a SIGKILL it couldn't.
            for what in (signal.SIGTERM, signal.SIGKILL):
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, what)
                    deadline = time.monotonic() + _KILL_GRACE_S
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def running(kinds: Mapping[str, type[Contender]], ranks: int, timeout_s: float) -> Iterator[dict[str, Group]]:
    """Start all baselines and wait until they are ready. They start in parallel, since their imports take seconds."""
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(contextlib.closing(Group(name, kind, ranks, timeout_s)))
            for name, kind in kinds.items()
        }
        for group in groups.values():
            group.wait_ready()
        yield groups
