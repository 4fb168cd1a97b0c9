"""What a job asks of its machine: processes, the broker's connections, output. The launcher and its broker are real."""

from __future__ import annotations

import itertools
import os
import signal
from types import SimpleNamespace

from ms_kungfu import env
from ms_kungfu.launcher import job, machine
from ms_kungfu.launcher.devices import Devices
from ms_kungfu.launcher.supervisor import Started
from tests.fault.simulator.broker import Broker, BrokerServer
from tests.fault.simulator.cluster_store import Store
from tests.fault.simulator.processes import Process
from tests.fault.simulator.setting import JOIN_TIMEOUT_S, Violation


class Machine(machine.Machine):
    """A machine without processes."""

    standby_delay_s = 0.5

    def __init__(self, world):
        self._world = world
        self.environ = world.launcher.environ
        self.sleep = world.sleep

    def start_thread(self, name, function):
        self._world.launcher.start(name, function)

    def monotonic(self):
        return self._world.loop.now

    def allowed_cores(self):
        return [0, 1]

    def free_bytes(self):
        return self._world.setup.processes - len(self._world.processes)

    def taken_bytes(self, pid):
        return 1

    def find_devices(self, host, **wanted):
        return Devices()

    def is_stopped(self, pid):
        return any(
            p.pid == pid and p.alive and p.stopped_at is not None and not p.frozen
            for p in self._world.processes.values()
        )

    def is_starved(self, pid):
        return False

    def waits_for_a_core(self, pid):
        return False

    def ask_for_stack(self, pid):
        self._world.say("do", f"process {pid} is asked for its stack")
        return True

    def make_broker(self, cores, **options):
        self._world.broker = Broker(self._world, cores, **options)
        return self._world.broker

    def serve_broker(self, broker, secret):
        return BrokerServer()

    def catch_signal(self, loop, number, callback, argument):
        loop.add_signal_handler(number, callback, argument)

    def serve_status(self, answer):
        return SimpleNamespace(path=None, inode=0, close=lambda: None)

    def open_store(self, url, secret, writer):
        return Store(self._world, writer)

    def make_config_server(self, store, secret, **options):
        return self._world.server.embed(store, options["on_change"])

    def secret_of(self, url):
        return "00"

    def leave_secret(self, url, secret):
        return SimpleNamespace(path=None, inode=0, remove=lambda: None)


class Launcher(job.Job):
    """The real one, watched."""

    def on_cluster(self, cluster):
        self._world.wanted_at.setdefault(cluster.version, self._world.loop.now)
        super().on_cluster(cluster)

    def worker_ended(self, process, standing, code, error):
        super().worker_ended(process, standing, code, error)
        if not process.given_up:
            self._check_reaped(process)

    def worker_is_gone(self, process):
        super().worker_is_gone(process)
        self._check_reaped(process)

    def _check_reaped(self, process):
        for segment in self._agent.broker._segments.open.values():
            for rank, holder in segment.attached.items():
                if holder.key == process.key and rank in segment.deaths and rank not in segment.reaped:
                    raise Violation(f"{holder.name} is reaped, and version {segment.version} doesn't hear of it")

    def _settle(self, verdict):
        before = self._verdict.done()
        goes_on = super()._settle(verdict)
        if not before and self._verdict.done():
            self._world.verdict = self._verdict.result()
            self._world.survivors_at_verdict = sum(
                process.member.received and not process.terminated for process in self._world.members()
            )
        return goes_on


class Guard:
    """Starts, signals and reaps."""

    def __init__(self, world):
        self._world = world
        world.guard = self
        self.events = []
        self._pids = itertools.count(100)

    def fileno(self):
        return 0

    def tell(self):
        if self._world.loop.reader is not None and self.events:
            self._world.loop.reader()

    def next_event(self):
        return self.events.pop(0)

    def start(self, key, environment, cores, stdout, stderr):
        environ = {name: value for name, value in environment.items() if value is not None}
        environ[env.JOIN_TIMEOUT.name] = str(JOIN_TIMEOUT_S)
        environ[env.COLLECTIVE_TIMEOUT.name] = str(self._world.collective_timeout_s)
        who = environ.get("KUNGFU_SELF", f"standby {environ.get('KUNGFU_STANDBY')}").rpartition(":")[2]
        process = Process(self._world, f"process {key} ({who})", environ)
        process.key, process.pid = key, next(self._pids)
        self._world.processes[key] = process
        self._world.everybody.append(process)
        self.events.append(Started(key, process.pid))
        self._world.loop.at(self._world.short(self._world.random), self.tell)
        process.start("main", lambda: self._world.run_worker(process), self._world.short(self._world.random) * 3)

    def _workers(self):
        return list(self._world.processes.values())

    def signal(self, number, key=None):
        for process in self._workers():
            if key in (None, process.key) and number in (signal.SIGKILL, signal.SIGTERM):
                self._world.kill(process, -number)

    def wake(self):
        pass

    def remove_at_end(self, path, inode):
        pass

    def close(self):
        for process in self._world.processes.values():
            process.alive = False


class Output:
    def log_paths(self, name):
        return []

    def attach(self, name, colour, held=False):
        return os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)

    def release(self, name):
        pass

    def close(self, timeout_s, last_words=None):
        pass
