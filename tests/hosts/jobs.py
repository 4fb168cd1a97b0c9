"""One kungfu-run on each host, and what becomes of them together."""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from tests.hosts.namespaces import Host, Network
from tests.multiprocess.launching import IN_VERSION, RECOVERY_PROGRAM, Program
from tests.ports import free_port

LAUNCHER = "ms_kungfu.launcher"
SECRET = "5ec2e7" * 8


@dataclass(frozen=True)
class Address:
    """What plays a host, as a `namespaces.Host` does."""

    name: str
    address: str
    port: int
    """Of the launchers; 0: this machine is the only host, and its launcher isn't told of hosts."""

    def within(self) -> list[str]:
        return []

    def words(self) -> list[object]:
        return ["-self", self.address, "-port", self.port] if self.port else []


class Loopback:
    """Addresses of this machine that play hosts, as a `namespaces.Network` has them. A job begins with `begun`."""

    def __init__(self, count: int, begun: int | None = None) -> None:
        addresses = [f"127.0.0.{number}" for number in range(1, count + 1)]
        port = free_port(*addresses)
        self.hosts = [Address(f"host{number}", address, port) for number, address in enumerate(addresses)]
        self.begun, self.config_port = begun or count, free_port(*addresses)


class Machine:
    """This one, as the only host, of whose config server the launcher chooses the port."""

    hosts, begun, config_port = [Address("host0", "127.0.0.1", 0)], 1, None


Hosts = Union[Network, Loopback, Machine]


class Jobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Program] = []

    def start(self, host: Host | Address, module: str, *arguments: object, environment=None) -> Program:
        """``python -m MODULE ARGUMENTS`` on a host, in a folder of its own."""
        folder = self._folder / host.name
        folder.mkdir(exist_ok=True)
        environment = {"KUNGFU_JOB_SECRET": SECRET, **(environment or {})}
        self._started.append(Program(module, arguments, folder, environment, within=host.within()))
        return self._started[-1]

    def start_here(self, module: str, *arguments: object, environment) -> Program:
        """The same on none of the hosts, without a secret."""
        self._started.append(Program(module, arguments, self._folder, environment))
        return self._started[-1]

    def over(
        self, network: Hosts, size: int, *flags: object, slots: int = 2, watch: bool = True, program=(),
        worker=RECOVERY_PROGRAM, launcher=LAUNCHER, environment=None, url: str = "",
    ) -> Job:  # fmt: skip
        """``kungfu-run`` with the same words on each host. `program`: the arguments of `worker`. `url`: of a store that
        is there; by default the head has one."""
        return Job(self, network, size, flags, slots, watch, [worker, *program], launcher, environment, url)

    def kill_all(self) -> None:
        for program in self._started:
            program.kill_all()


class Job:
    """Of one launcher a host. The first host is the head."""

    def __init__(
        self, jobs: Jobs, network: Hosts, size, flags, slots, watch, program, launcher, environment, url
    ) -> None:  # fmt: skip
        self.network = network
        self._jobs, self._launcher, self._environment = jobs, launcher, environment
        port = None if url else network.config_port
        self.url = url or (f"http://{network.hosts[0].address}:{port}/config" if port else "")
        begun = network.hosts[: network.begun]
        words: list[object] = ["-np", size]
        if network.config_port is not None:
            words += ["-H", ",".join(f"{host.address}:{slots}" for host in begun)]
        if watch:
            words += ["-w", *(["-config-server", self.url] if self.url else [])]
            words += ["-builtin-config-port", port] if port else []
        self._words = [*words, *flags, sys.executable, *program]
        self.launchers = [self.begin(number) for number in range(len(begun))]

    def begin(self, number: int) -> Program:
        """The launcher of a host, as at the job's start."""
        host = self.network.hosts[number]
        return self._jobs.start(host, self._launcher, *host.words(), *self._words, environment=self._environment)

    @property
    def output(self) -> str:
        return "\n".join(f"--- {each.process.pid}\n{each.output}" for each in self.launchers)

    def in_version(self, version: int, size: int, timeout: float = 120) -> dict[int, tuple[int, int]]:
        """rank -> (host, process ID) of a version, once all of its workers are in it."""
        deadline = time.monotonic() + timeout
        pattern = re.compile(IN_VERSION.format(version, size))
        while True:
            found = {
                int(match[1]): (number, int(match[2]))
                for number, launcher in enumerate(self.launchers)
                for match in filter(None, map(pattern.search, list(launcher.lines)))
            }
            if len(found) == size:
                return found
            ended = [launcher.process.poll() for launcher in self.launchers]
            assert None in ended, f"all have ended, with {ended}:\n{self.output}"
            assert time.monotonic() < deadline, f"{len(found)} of {size} workers in version {version}:\n{self.output}"
            time.sleep(0.02)

    def newest(self, version: int, size: int) -> dict[int, tuple[int, int]]:
        """The same for the first version from `version` on that has this size."""
        for _ in range(1200):
            for at in range(version, version + 5):
                pattern = re.compile(IN_VERSION.format(at, size))
                if any(map(pattern.search, [line for each in self.launchers for line in list(each.lines)])):
                    return self.in_version(at, size)
            time.sleep(0.1)
        raise AssertionError(f"nobody in a version of {size} workers:\n{self.output}")

    def command(self, number: int, *words: object, environment=None) -> Program:
        """``kungfu-run WORDS`` on a host."""
        words = (*words, "-config-server", self.url)
        return self._jobs.start(self.network.hosts[number], LAUNCHER, *words, environment=environment)

    def finish(self, code: int = 0, among=None) -> list[tuple[int, str]]:
        """(step, weights) of the survivors: all end at the same step with the same weights, and nothing is left."""
        among = range(len(self.launchers)) if among is None else among
        for number in among:
            self.launchers[number].signal(signal.SIGUSR1)
        self.end(code, among)
        ends = [
            (int(match[1]), match[2])
            for number in among
            for match in self.launchers[number].wait_for(r"^finished pid \d+ step (\d+) weights (\w+)", 0)
        ]
        assert len(set(ends)) <= 1, ends
        assert "Traceback" not in self.output, self.output
        return ends

    def end(self, code: int, among=None) -> None:
        """Each launcher ends with that code, and leaves nothing."""
        for number in range(len(self.launchers)) if among is None else among:
            self.launchers[number].assert_exit(code)
            self.launchers[number].assert_gone(time.monotonic())
