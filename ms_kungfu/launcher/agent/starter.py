"""What a host's launcher needs before its first worker, and how it starts one."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from typing import Callable

from ms_kungfu import env
from ms_kungfu.broker_protocol import close_all
from ms_kungfu.config_server.secret_file import SecretFileError
from ms_kungfu.devices.rank_table import RankTableError
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.devices import GPU, DeviceListError, Devices
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.status_socket import Answer
from ms_kungfu.launcher.wire.messages import Launch

_log = logging.getLogger(__name__)
_SPARE_DESCRIPTORS = 8  # for requests to the config server, the memory of versions, logs


def find_devices(options: Options, machine: Machine) -> Devices:
    """Return this host's devices. StartError if the user's settings for them are inconsistent."""
    try:
        found = machine.find_devices(
            options.host.name, single=options.size == 1 and not options.watch, allow_nvlink=options.allow_nvlink
        )
    except (DeviceListError, RankTableError) as error:
        raise StartError(str(error)) from None
    if options.allow_nvlink and found.kind is not GPU:
        _log.warning('flag ignored: flag=-allow-nvlink reason="the job has no GPUs"')
    return found


def serve_status(machine: Machine, supervisor: Supervisor, answer: Answer) -> Callable[[], None]:
    """Answer status requests from now on, until the returned function is called or the launcher ends.

    A failure here doesn't stop the job.
    """
    try:
        server = machine.serve_status(answer)
    except (OSError, SecretFileError) as error:
        _log.warning('status unavailable: error="%s". kungfu-run status does not list this job', error)
        return lambda: None
    supervisor.remove_at_end(server.path, server.inode)
    return server.close


@dataclass(eq=False)
class Starter:
    """Starts this host's workers.

    `unheard` returns how many of its processes haven't connected to the broker yet; `told` is the environment that all
    of its workers get because of the host.
    """

    name: str
    machine: Machine
    supervisor: Supervisor
    output: Output
    told: dict[str, str]
    unheard: Callable[[], int]

    def start(self, launch: Launch) -> None:
        environment = {**launch.environment, **self.told}
        if "PYTHONUNBUFFERED" not in self.machine.environ:
            # Output goes to a pipe: without this it comes in blocks, late, and a killed worker loses it.
            environment["PYTHONUNBUFFERED"] = "1"
        if self.machine.environ.get("MS_ENABLE_GRACEFUL_EXIT") == "1":
            # MindSpore would take the size for that of its own communication, which isn't there, and reduce by it.
            environment[env.RANK_SIZE.name] = None
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
        """Return the cores of a worker; none if its host has lost them all by a cpuset that was rewritten meanwhile."""
        allowed = self.machine.allowed_cores() if launch.cores else []
        if launch.cores and not set(launch.cores).intersection(allowed):
            _log.warning(
                "worker unpinned: rank=%d host=%s cores=%s allowed=%s",
                launch.rank, self.name, ",".join(map(str, launch.cores)), ",".join(map(str, allowed)),
            )  # fmt: skip
            return ()
        return launch.cores

    def _check_descriptors(self) -> None:
        """Raise OSError if another joining worker would take the last descriptors.

        Then the launcher could neither accept the workers that are starting, nor the request that corrects a mistaken
        size.
        """
        if self.machine.spare_descriptors() < 4 + max(0, self.unheard()) + _SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def told_of_the_host(broker: str, secret: str) -> dict[str, str]:
    """Return where its workers find their broker, and what they prove themselves by."""
    return {env.BROKER.name: broker, env.JOB_SECRET.name: secret}
