"""Start workers by forking a process that has imported MindSpore. `launcher/preloading.py` selects the programs.

The first worker imports MindSpore, forks the fork server, which is a copy of this worker, and then runs its own
program. Other workers are forked from the fork server (`fork_program`).

1. Libraries read the environment and the number of cores while they are imported. So all workers of a fork server have
   the same number of cores and, apart from the variables that describe one worker, the same environment. The first
   worker of another kind forks another fork server, which replaces the previous one.
2. Only the workers with which a job begins wait for the import. A worker that joins later is started without a fork
   server if there is none yet, because the controller expects the worker's process ID at once.
3. If anything about the fork server fails, workers are started without it: the fork server only saves time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ms_kungfu import env
from ms_kungfu._processes import stat_of
from ms_kungfu._run_time import SLICE_S, run_time
from ms_kungfu.broker_protocol import close_all

if TYPE_CHECKING:
    from ms_kungfu.launcher.preloading import Preloading

_PROGRAM = Path(__file__).with_name("fork_program.py")
_IMPORT_S = 60.0
_ANSWER_S = 2.0
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

    @property
    def joins_later(self) -> bool:
        return self.changes.get(env.PARKED.name) is not None

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in {**os.environ, **self.changes}.items() if value is not None}

    def close(self) -> None:
        close_all((self.stdout, self.stderr))


class ForkServer:
    """The supervisor's interface to the fork server. Used from one thread.

    `preloading`: how to run the program, or None if the program's workers can't be forked.
    """

    def __init__(self, preloading: Preloading | None) -> None:
        self._preloading = preloading
        self._kind: tuple[dict[str, str], int] | None = None  # what all workers of the fork server have in common
        self._channel: socket.socket | None = None
        self._pid: int | None = None  # None until MindSpore has been imported
        self._import_until = 0.0
        self.waiting: list[Start] = []
        """The workers that wait for the end of the import."""

    def suits(self, start: Start) -> bool:
        """Return whether the worker may be forked from this fork server, or may fork this fork server.

        If the worker needs a fork server of another kind, and no worker waits for this one, close this one.
        """
        if self._preloading is None or start.has_device or start.changes.get(env.MSRUN_SIZE.name):
            return False
        shared = {name: value for name, value in start.environment().items() if name not in _OF_ONE_WORKER}
        kind = shared, len(start.cores)
        if kind != self._kind and not self.waiting:
            self.close()
            self._kind = kind
        return kind == self._kind

    def news(self) -> tuple[int, float] | None:
        """Return what may end the import: a descriptor that becomes readable, or the time limit.

        The time in seconds is at most SLICE_S, because `run_time` doesn't count longer pauses in full.
        """
        if self._channel is None or self._pid is not None:
            return None
        return self._channel.fileno(), min(SLICE_S, max(0.0, self._import_until - run_time()))

    def is_importing(self) -> bool:
        """Return whether a worker is importing MindSpore and will then fork the fork server."""
        if self._channel is None or self._pid is not None:
            return False
        try:
            self._pid = int(self._channel.recv(64, socket.MSG_DONTWAIT)) or None
        except BlockingIOError:
            if run_time() < self._import_until:
                return True
            self.close()
        except (OSError, ValueError):  # the worker has ended
            self.close()
        else:
            if self._pid is None:  # with this MindSpore, a process can't fork workers
                self.close()
                self._preloading = None
        return False

    def command(self) -> tuple[list[str], socket.socket] | None:
        """Return the command of a worker that will fork the fork server, and the socket that its process inherits.

        The caller closes the socket. Return None if the worker must be started without a fork server.
        """
        assert self._preloading is not None
        preloading = self._preloading
        self.close_channel()
        try:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        told = {
            "python": preloading.python,
            "is_module": preloading.is_module,
            "program": preloading.program,
            "folder": preloading.folder,
            "supervisor": os.getpid(),
        }
        try:
            self._channel.send(json.dumps(told).encode())
        except OSError:  # the command line is too long
            theirs.close()
            self.close_channel()
            return None
        self._import_until = run_time() + _IMPORT_S
        return [*preloading.python, str(_PROGRAM), str(theirs.fileno()), *preloading.program], theirs

    def fork(self, start: Start) -> tuple[int, int] | None:
        """Fork a worker. Return its process ID and its gate, or None if there is no fork server.

        The worker runs when a byte has been written to its gate.
        """
        if self._channel is None or self._pid is None:
            return None
        told = {
            "cores": start.cores,
            "environment": {name: start.environment().get(name) for name in sorted(_OF_ONE_WORKER)},
        }
        with contextlib.suppress(OSError):
            if stat_of(self._pid)[0] not in "Tt":  # a stopped process doesn't answer
                closed, gate = os.pipe()
                try:
                    self._channel.settimeout(_ANSWER_S)
                    socket.send_fds(self._channel, [json.dumps(told).encode()], [start.stdout, start.stderr, closed])
                    return int(self._channel.recv(64)), gate
                except (OSError, ValueError):  # an empty answer: the fork server couldn't fork
                    os.close(gate)
                finally:
                    os.close(closed)
        self.close()
        return None

    def has_exited(self, pid: int) -> None:
        """Record that the supervisor has reaped this process, which may be the fork server."""
        self.is_importing()  # the fork server may have sent its ID just before it ended
        if pid == self._pid:
            self.close_channel()
            self._pid = None

    def close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def close(self) -> None:
        """End the fork server. The supervisor reaps it later."""
        self.close_channel()
        if self._pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
        self._pid = None
