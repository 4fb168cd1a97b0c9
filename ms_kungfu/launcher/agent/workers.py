"""Manage the worker processes on this host.

The controller orders which workers are started and signalled, and gets reports about these workers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import Callable

from ms_kungfu import _cpu_isa, env
from ms_kungfu.broker_protocol import close_all
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.core_claims import CoreClaims
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.last_lines import Ended, failure_block
from ms_kungfu.launcher.state.policy import CANT_RUN
from ms_kungfu.launcher.state.prestarted import lack_of_memory
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_MOST_ENDED = 1024  # a host keeps the exits of this many workers, for a resync report
_SPARE_DESCRIPTORS = 8  # kept free for requests to the config server, the memory of versions, and logs


class HostWorkers:
    """This host's workers. Used only in the agent's event loop.

    Args:
        name: the host's name.
        machine: the machine.
        supervisor: the supervisor of the workers.
        output: the workers' output.
        environment: this host's changes to the environment of all workers.
        has_devices: whether the host has GPUs or Ascend devices for the workers.
        send: sends a message to the current controller.
        claims: the cores that the job has claimed on this host.
        connected: returns how many processes are connected to the broker.
        before_exit: called before an exit is reported.
        after_exit: called after an exit has been reported.
        words: returns why ranks can't continue; the result is reported together with an exit.
    """

    def __init__(
        self, name: str, machine: Machine, supervisor: Supervisor, output: Output, environment: dict[str, str],
        has_devices: bool, send: Callable[[m.FromHost], None], claims: CoreClaims, connected: Callable[[], int],
        before_exit: Callable[[], None], after_exit: Callable[[], None], words: Callable[[], m.Words],
    ) -> None:  # fmt: skip
        self._name, self._machine, self._supervisor, self._output = name, machine, supervisor, output
        self._has_devices = has_devices
        self._environment, self._send, self._claims, self._connected = environment, send, claims, connected
        self._before_exit, self._after_exit, self._words = before_exit, after_exit, words
        self._loop = asyncio.get_running_loop()
        self._pids: dict[int, int] = {}  # key -> ID of a running process
        self._workers: dict[int, m.Worker] = {}
        self._cores: dict[int, tuple[int, ...]] = {}  # key -> cores of a running process
        self.cpu_isa = ""  # the limit on the workers' vector instructions
        self._reported: dict[int, tuple[int | None, int | None]] = {}  # key -> pid and exit code in the last report
        self._is_guardless = False  # whether the supervisor and therefore all workers have ended
        self._loop.add_reader(supervisor.fileno(), self._on_supervisor)

    def close(self) -> None:
        self._loop.remove_reader(self._supervisor.fileno())
        self._supervisor.close()

    def running(self) -> dict[int, int]:
        return self._pids

    def cores(self) -> tuple[list[int], tuple[int, ...]]:
        """Release the cores that no worker uses any more. Return the job's present cores (`CoreClaims.look`)."""
        if self._cores:
            self._claims.narrow({core for cores in self._cores.values() for core in cores})
        return self._claims.look()

    def exit_codes(self) -> set[int | None]:
        """Return the set of the workers' exit codes. It contains None if a worker is still running."""
        return {worker.code for worker in self._workers.values()}

    # ---- orders of the controller ----

    def start(self, launch: m.Launch) -> None:
        machine, environment = self._machine, launch.environment
        for key in [key for key, worker in self._workers.items() if worker.code is not None][:-_MOST_ENDED]:
            del self._workers[key]  # the entry is so old that no controller needs it
        if launch.needs:
            taken = max(map(machine.taken_bytes, self._pids.values()), default=0)
            if why := lack_of_memory(launch.needs, machine.free_bytes(), taken):
                self._send(m.NoMemory(launch.key, why))
                return
        standby = environment[env.STANDBY.name]
        self._workers[launch.key] = m.Worker(
            launch.key,
            environment[env.SELF.name],
            int(environment[env.INCARNATION.name] or 0),
            launch.rank,
            launch.log_name,
            launch.device,
            standby=None if standby is None else int(standby),
        )
        self.cpu_isa = environment.get(_cpu_isa.VARIABLE) or ""
        self._cores[launch.key] = launch.cores
        self._claims.extend(launch.cores)
        try:
            self._start(launch)
        except OSError as error:
            self._loop.call_soon(self.has_exited, m.Exited(launch.key, CANT_RUN, str(error.strerror)))

    def _start(self, launch: m.Launch) -> None:
        environment = {**launch.environment, **self._environment}
        if "PYTHONUNBUFFERED" not in self._machine.environ:
            # The output goes to a pipe. Without this setting, Python would write the output late and in blocks, and
            # output would be lost if a worker is killed.
            environment["PYTHONUNBUFFERED"] = "1"
        if self._machine.environ.get("MS_ENABLE_GRACEFUL_EXIT") == "1":
            # With graceful exit, MindSpore would average over RANK_SIZE ranks of its own communication, which isn't
            # used.
            environment[env.RANK_SIZE.name] = None
        if launch.threads is not None and "OMP_NUM_THREADS" not in self._machine.environ:
            environment["OMP_NUM_THREADS"] = str(launch.threads)
        if env.PYNATIVE_BLOCKS in self._machine.environ:
            environment.pop(env.PYNATIVE_BLOCKS, None)  # the user's value applies
        try:
            if launch.joins_later:
                self._check_descriptors()
            stdout, stderr = self._output.attach(launch.key, launch.log_name, launch.rank, held=launch.held)
        except OSError as error:
            raise OSError(
                error.errno, f"was not started, because no pipe for its output could be created: {error.strerror}"
            ) from None
        try:
            self._supervisor.start(
                launch.key, environment, self._allowed(launch), stdout, stderr, has_device=self._has_devices
            )
        finally:
            close_all((stdout, stderr))

    def _allowed(self, launch: m.Launch) -> tuple[int, ...]:
        """Return the cores to which a worker is pinned.

        The result is empty if this host may no longer use any of these cores, because its cpuset has changed.
        """
        allowed = self._machine.allowed_cores() if launch.cores else []
        if launch.cores and not set(launch.cores).intersection(allowed):
            _log.warning(
                "worker unpinned: rank=%d host=%s cpus=%s allowed=%s",
                launch.rank, self._name, ",".join(map(str, launch.cores)), ",".join(map(str, allowed)),
            )  # fmt: skip
            return ()
        return launch.cores

    def _check_descriptors(self) -> None:
        """Check that the launcher keeps enough free file descriptors if it starts another joining worker.

        Without free descriptors, the launcher couldn't accept the connections of new workers, or a resize request that
        corrects a size that is too large.

        Raises:
            OSError: too few file descriptors are free.
        """
        alive = sum(worker.code is None for worker in self._workers.values())
        if self._machine.spare_descriptors() < 4 + max(0, alive - self._connected()) + _SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def assign(self, said: m.Assign) -> None:
        """Assign a slot to a standby, and show the standby's output."""
        worker = self._workers[said.key]
        worker.peer, worker.incarnation, worker.rank = said.peer, said.incarnation, said.rank
        self._output.place(said.key, said.rank)
        self._output.release(said.key)

    def placed(self, peer: str, incarnation: int, rank: int | None) -> None:
        """Record the rank that a worker is about to get; None if the worker has left the cluster."""
        for key, worker in self._workers.items():
            if worker.code is None and (worker.peer, worker.incarnation) == (peer, incarnation):
                self._output.place(key, rank)

    def failure_block(self, failed: int | None) -> Callable[[], str] | None:
        """Return a function that describes the failure that ends the job. Call the function after all output is read.

        Return None if the process with the key `failed` isn't on this host. Also return None if the description isn't
        needed, because the process's last lines are the last lines of the job's output.
        """
        first = None if failed is None else self._workers.get(failed)
        if first is None or (len(self._workers) == 1 and self._output.shows_workers):
            return None
        return lambda: failure_block(
            self._ended(first), [self._ended(each) for each in self._workers.values() if each is not first]
        )

    def _ended(self, worker: m.Worker) -> Ended:
        name = f"{self._output.name_of(worker.key)} ({self._name}, pid {worker.pid})"
        return Ended(name, worker.code or 0, worker.error, self._output.last_of(worker.key))

    def signal(self, said: m.Signal) -> None:
        self._supervisor.signal(said.number, said.key)

    def pin(self, said: m.Pin) -> None:
        pid = self._pids.get(said.key)
        if pid is not None:
            self._cores[said.key] = said.cores
            self._claims.extend(said.cores)
            self._machine.pin(pid, said.cores)

    def ask_for_stack(self, said: m.Stack) -> None:
        pid = self._pids.get(said.key)
        if pid is not None and not self._machine.ask_for_stack(pid):
            _log.warning("stuck worker: no stack: process %d has not joined yet", pid)

    # ---- reports to the controller ----

    def _on_supervisor(self) -> None:
        event = self._supervisor.next_event()
        if event is None:
            self._loop.remove_reader(self._supervisor.fileno())
            self._is_guardless = True
            self._send(m.Guardless())
        elif isinstance(event, m.Exited):
            self._pids.pop(event.key, None)
            self.has_exited(event)
            self._after_exit()
        else:
            self._pids[event.key] = event.pid
            self._workers[event.key].pid = event.pid
            self._tell_started(self._workers[event.key])

    def has_exited(self, event: m.Exited) -> None:
        worker = self._workers[event.key]
        worker.code, worker.error = event.code, event.error
        self._cores.pop(event.key, None)
        self._before_exit()  # report a failed transport before the worker failures that it has caused
        self._tell_exited(worker)

    def _tell_started(self, worker: m.Worker) -> None:
        assert worker.pid is not None
        self._send(m.Started(worker.key, worker.pid))

    def _tell_exited(self, worker: m.Worker) -> None:
        assert worker.code is not None
        self._send(m.Exited(worker.key, worker.code, worker.error, self._words()))

    def report(self) -> list[m.Worker]:
        """Return the workers' part of the resync report, which the next controller receives."""
        self._reported = {key: (worker.pid, worker.code) for key, worker in self._workers.items()}
        return list(self._workers.values())

    def tell_what_is_new(self) -> None:
        """Report to the controller what has changed since the controller got the result of `report`."""
        for key, worker in self._workers.items():
            pid, code = self._reported.get(key, (None, None))
            if pid is None and worker.pid is not None:
                self._tell_started(worker)
            if code is None and worker.code is not None:
                self._tell_exited(worker)
        if self._is_guardless:
            self._send(m.Guardless())
