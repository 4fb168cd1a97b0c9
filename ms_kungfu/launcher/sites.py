"""Where workers run: what the head asks of a host, and what a host's launcher does then."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Protocol

from ms_kungfu import env
from ms_kungfu.broker_protocol import close_all
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.devices import Devices
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.output import Output
from ms_kungfu.launcher.supervisor import Supervisor
from ms_kungfu.launcher.wire.messages import Launch

_log = logging.getLogger(__name__)
CANT_RUN = 126  # the code of a process that never ran, as a shell has it
_SPARE_DESCRIPTORS = 8  # for requests to the config server, the memory of versions, logs


class Site(Protocol):
    """A host of the job, as the head sees it. Used from the event loop."""

    name: str
    devices: Devices
    shares: Shares  # of its cores

    def start(self, launch: Launch) -> None:
        """An event tells what has come of it. OSError: the host is lost."""

    def signal(self, number: int, key: int | None = None) -> None:
        """To the process group of one worker, or of all that this host has."""

    def pin(self, key: int, cores: Sequence[int]) -> None: ...

    def ask_for_stack(self, key: int) -> None:
        """Has it write its Python stacks to its output."""

    def release(self, log_name: str) -> None:
        """From now on what it prints is shown."""

    def log_paths(self, log_name: str) -> list[Path]: ...


@dataclass(eq=False)
class Starter:
    """Starts this host's workers. `unheard` tells how many of its processes haven't come to the broker yet; `told` is
    what all of its workers have in their environment because of the host."""

    name: str
    machine: Machine
    supervisor: Supervisor
    output: Output
    told: dict[str, str]
    unheard: Callable[[], int]

    def start(self, launch: Launch) -> None:
        environment = {**launch.environment, **self.told}
        if "PYTHONUNBUFFERED" not in self.machine.environ:
            # Output goes to a pipe: without this it comes in blocks, late, and not at all from a worker that is killed.
            environment["PYTHONUNBUFFERED"] = "1"
        if launch.threads is not None and "OMP_NUM_THREADS" not in self.machine.environ:
            environment["OMP_NUM_THREADS"] = str(launch.threads)
        try:
            if launch.joins_later:
                self._check_descriptors()
            stdout, stderr = self.output.attach(launch.log_name, launch.rank, held=launch.held)
        except OSError as error:
            raise OSError(error.errno, f"was not started: no pipe for its output: {error.strerror}") from None
        try:
            self.supervisor.start(launch.key, environment, self._allowed(launch), stdout, stderr)
        finally:
            close_all((stdout, stderr))

    def _allowed(self, launch: Launch) -> tuple[int, ...]:
        """The cores of a worker; none where its host has lost them all, by a cpuset that was rewritten meanwhile."""
        allowed = self.machine.allowed_cores() if launch.cores else []
        if launch.cores and not set(launch.cores).intersection(allowed):
            _log.warning(
                "worker %d starts unpinned: host=%s cores=%s allowed=%s", launch.rank, self.name,
                ",".join(map(str, launch.cores)), ",".join(map(str, allowed)),
            )  # fmt: skip
            return ()
        return launch.cores

    def _check_descriptors(self) -> None:
        """OSError where another newcomer would take the last descriptors: nobody would hear those who are starting
        already, nor whoever takes a mistaken size back."""
        if self.machine.spare_descriptors() < 4 + max(0, self.unheard()) + _SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class AbsentSite:
    """A host whose launcher hasn't come to the new head of the job, and is lost therefore."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.devices = Devices()
        self.shares = Shares([0], None)

    def start(self, launch: Launch) -> None:
        raise OSError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))

    def signal(self, number: int, key: int | None = None) -> None:
        pass

    def pin(self, key: int, cores: Sequence[int]) -> None:
        pass

    def ask_for_stack(self, key: int) -> None:
        pass

    def release(self, log_name: str) -> None:
        pass

    def log_paths(self, log_name: str) -> list[Path]:
        return []


def told_of_the_host(broker: str, secret: str) -> dict[str, str]:
    """Of `Starter`: where its workers find their broker, and what they prove themselves by."""
    return {env.BROKER.name: broker, env.JOB_SECRET.name: secret}
