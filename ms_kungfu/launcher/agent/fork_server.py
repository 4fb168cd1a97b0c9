"""Start workers by forking a process that has imported MindSpore (`launcher/preloading.py` says for which programs).

The fork server is a child of the supervisor. It starts when the first worker does, with that worker's environment and
number of cores, because libraries read both while they are imported. A worker that needs others gets a fork server of
its own kind, which replaces the previous one.

If anything about the fork server fails, the supervisor starts the workers as usual: the fork server only saves time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ms_kungfu import env
from ms_kungfu._run_time import run_time
from ms_kungfu.broker_protocol import close_all

if TYPE_CHECKING:
    from ms_kungfu.launcher.preloading import Preloading

_PROGRAM = Path(__file__).with_name("fork_program.py")
_READY_S = 60.0
_ANSWER_S = 10.0
_OF_ONE_WORKER = frozenset(
    each.name
    for each in env.VARIABLES
    if each.name.startswith("KUNGFU_")
    or each in (env.RANK_ID, env.RANK_SIZE, env.PLAIN_RANK, env.WORLD_SIZE, env.PLAIN_LOCAL_RANK)
    or each in (env.LOCAL_WORLD_SIZE, env.DEVICE_ID)
)


@dataclass(frozen=True)
class Start:
    """A worker to start. Its environment is `os.environ` with `changes`; None removes a variable.

    `has_device`: whether the worker uses a GPU or an Ascend device.
    """

    key: int
    has_device: bool
    changes: Mapping[str, str | None]
    cores: list[int]
    stdout: int
    stderr: int

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in {**os.environ, **self.changes}.items() if value is not None}

    def close(self) -> None:
        close_all((self.stdout, self.stderr))


class ForkServer:
    """The fork server as the supervisor uses it. Used from one thread.

    Args:
        preloading: how to run the program, or None if its workers can't be forked.
        prepare: returns what the fork server's process runs between fork and exec, given its cores.
    """

    def __init__(self, preloading: Preloading | None, prepare: Callable[[list[int]], Callable[[], None]]) -> None:
        self._preloading, self._prepare = preloading, prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._kind: tuple[dict[str, str], int] | None = None  # what all workers of this process have in common
        self._is_ready = False
        self._ready_until = 0.0
        self.waiting: list[Start] = []
        """The workers that wait until MindSpore has been imported."""

    def news(self) -> tuple[int, float] | None:
        """Return when `is_ready` may return something new: if a descriptor is readable, or after a time in seconds."""
        if self._channel is None or self._is_ready:
            return None
        return self._channel.fileno(), max(0.0, self._ready_until - run_time())

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    def take(self, start: Start) -> bool:
        """Return whether the fork server will start this worker. If so, the worker is in `waiting` now."""
        if self._preloading is None or start.has_device or start.changes.get(env.MSRUN_SIZE.name):
            return False
        shared = {name: value for name, value in start.environment().items() if name not in _OF_ONE_WORKER}
        kind = shared, len(start.cores)
        if kind != self._kind:
            if self.waiting:
                return False
            self.close()
            self._begin(self._preloading, start)
            self._kind = kind
        if self.is_alive:
            self.waiting.append(start)
        return self.is_alive

    def _begin(self, preloading: Preloading, first: Start) -> None:
        told = {
            "python": preloading.python,
            "is_module": preloading.is_module,
            "program": preloading.program,
            "folder": preloading.folder,
        }
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._process = subprocess.Popen(
                    [*preloading.python, str(_PROGRAM), str(theirs.fileno()), json.dumps(told), *preloading.program],
                    env=first.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=first.stdout,
                    stderr=first.stderr,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=self._prepare(first.cores),
                )
                self._channel, self._ready_until = ours, run_time() + _READY_S
            finally:
                theirs.close()
                if self._channel is None:
                    ours.close()

    def is_ready(self) -> bool:
        """Return whether the fork server can fork workers now. If it has failed, `is_alive` is false from now on."""
        if self._channel is not None and not self._is_ready:
            try:
                self._is_ready = self._receive(socket.MSG_DONTWAIT) == b"ready"
                failed = not self._is_ready
            except BlockingIOError:  # MindSpore is still being imported
                failed = run_time() >= self._ready_until
            if failed:
                self.give_up()
        return self._is_ready

    def fork(self, start: Start) -> tuple[int, int] | None:
        """Fork a worker. Return its process ID and its gate, or None if the fork server has failed.

        The worker runs when a byte has been written to its gate.
        """
        assert self._channel is not None
        told = {
            "supervisor": os.getpid(),
            "cores": start.cores,
            "environment": {name: start.environment().get(name) for name in sorted(_OF_ONE_WORKER)},
        }
        with contextlib.suppress(OSError):
            closed, gate = os.pipe()
            try:
                self._channel.settimeout(_ANSWER_S)
                socket.send_fds(self._channel, [json.dumps(told).encode()], [start.stdout, start.stderr, closed])
                return int(self._receive()), gate
            except (OSError, ValueError):  # an empty answer: the fork server couldn't fork
                os.close(gate)
            finally:
                os.close(closed)
        self.give_up()
        return None

    def _receive(self, flags: int = 0) -> bytes:
        assert self._channel is not None
        try:
            return self._channel.recv(64, flags)
        except ConnectionError:
            return b""

    def has_exited(self, pid: int) -> None:
        """Tell that the supervisor has reaped this process, which may be the fork server."""
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = 0  # so that `Popen` signals no other process that has got this ID since
            self.give_up()

    def give_up(self) -> None:
        """End the fork server, and start all further workers as usual."""
        self.close()
        self._preloading = None

    def close(self) -> None:
        """End the fork server. The supervisor reaps it later, so a process that can't end now delays nothing."""
        if self._process is not None:
            assert self._channel is not None
            self._channel.close()
            self._process.kill()
            self._process.returncode = 0
        self._process = self._channel = self._kind = None
        self._is_ready = False
