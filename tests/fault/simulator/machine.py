"""What a launcher asks of its machine: processes, the broker's connections, output, a network. The launcher is real."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from ms_kungfu import env
from ms_kungfu.launcher import machine
from ms_kungfu.launcher.agent.relay import Relay
from ms_kungfu.launcher.core_claims import CoreClaims
from ms_kungfu.launcher.devices import Devices
from ms_kungfu.launcher.wire.messages import Exited, Started
from tests.fault.simulator.broker import Broker
from tests.fault.simulator.cluster_store import LeadershipKeys, Store
from tests.fault.simulator.network import Socket
from tests.fault.simulator.processes import Process
from tests.fault.simulator.setting import JOIN_TIMEOUT_S
from tests.fault.simulator.transports import Memory, Transport


class Runtime:
    """`_core`, as a launcher uses it."""

    def __init__(self, world, host):
        self._world, self._host = world, host

    def create_segment(self, size, version, cores, recovers, board=False):
        return self._host.descriptor_of(Memory(self._world, size, version, recovers))

    def SegmentControl(self, fd):
        return self._host.descriptors[fd]


class Machine(machine.Machine):
    """A host's: without processes, and with a network that is simulated."""

    standby_delay_s = 0.5
    tls = None

    def __init__(self, world, host):
        self._world, self._host = world, host
        self.environ = host.launcher.environ
        self.sleep = world.sleep
        self.time = self.monotonic = lambda: world.loop.now
        self.runtime = lambda: Runtime(world, host)

    def start_thread(self, name, function):
        self._host.launcher.start(name, function)

    def allowed_cores(self):
        return [0, 1]

    def claim_cores(self, pins):
        return CoreClaims(self.allowed_cores, lambda: None, ())

    async def cpu_isa(self, wanted):
        return None

    def free_bytes(self):
        return self._world.setup.processes - len(self._host.workers())

    def resident_bytes(self, pid):
        return None

    def taken_bytes(self, pid):
        return 1

    def spare_descriptors(self):
        return float("inf")

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

    def make_broker(self, **options):
        self._host.made_broker = Broker(self._world, **options)
        if self._host is self._world.head:  # a controller that has stood still may go on when it isn't one any more
            self._world.broker = self._host.made_broker
        return self._host.made_broker

    def make_relay(self, send, segments):
        return Relay(send, segments, is_alive=self._world.is_alive)

    def serve_broker(self, broker, secret):
        self._host.server = BrokerServer(self._host, broker)
        return self._host.server

    def make_transport(self, local_fd, board_fd, **options):
        return Transport(
            self._world, self._host, self._host.descriptors[local_fd], self._host.descriptors[board_fd], **options
        )

    def make_socket(self, family):
        return Socket(self._world.network, self._host)

    def catch_signal(self, loop, number, callback, argument):
        loop.add_signal_handler(number, callback, argument)

    def serve_status(self, answer):
        return SimpleNamespace(path=None, inode=0, close=lambda: None)

    def open_leadership(self, url, timeout_s):
        return LeadershipKeys(self._world)

    def open_store(self, url, secret, writer):
        return Store(self._world, writer)

    def make_config_server(self, store, secret, **options):
        on_change = options["on_change"]
        return self._world.server.embed(store, lambda cluster: self._host.loop.within(on_change, cluster))

    def secret_of(self, url):
        return "00"

    def leave_secret(self, url, secret):
        return SimpleNamespace(path=None, inode=0, remove=lambda: None)


class BrokerServer:
    """A host's socket for its workers."""

    def __init__(self, host, broker):
        self._host, self.broker = host, broker
        self.address = f"broker of {host.name}"

    def connections(self):
        return 0

    def end(self):
        if self._host.server is self:
            self._host.server = None
            for process in self._host.workers():
                for request in process.requests:
                    request.end()


class Guard:
    """Starts, signals and reaps the workers of one host."""

    def __init__(self, world, host):
        self._world, self._host = world, host
        self.events = []

    def fileno(self):
        return 0

    def tell(self, event):
        if not self._host.is_over:
            self.events.append(event)
            self._host.loop.guard_has_news()

    def next_event(self):
        return self.events.pop(0)

    def start(self, key, environment, cores, stdout, stderr, *, has_device):
        world, host = self._world, self._host
        environ = {name: value for name, value in environment.items() if value is not None}
        environ[env.JOIN_TIMEOUT.name] = str(JOIN_TIMEOUT_S)
        environ[env.COLLECTIVE_TIMEOUT.name] = str(world.collective_timeout_s)
        who = environ.get("KUNGFU_SELF", f"standby {environ.get('KUNGFU_STANDBY')}")
        process = Process(world, f"process {key} ({who})", environ)
        process.key, process.pid, process.host = key, next(world.pids), host
        world.processes[key] = process
        world.everybody.append(process)
        world.loop.at(world.short(world.random), self.tell, Started(key, process.pid))
        process.start("main", lambda: world.run_worker(process), world.short(world.random) * 3)
        if host.stands_still:
            world.stop(process)

    def has_ended(self, process, code, error):
        self.tell(Exited(process.key, code, error))

    def signal(self, number, key=None):
        for process in self._host.workers():
            if key in (None, process.key) and number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                self._world.kill(process, -number)

    def wake(self):
        pass

    def remove_at_end(self, path, inode):
        pass

    def close(self):
        """No process is left, whatever has ended the launcher."""
        for process in self._host.workers():
            process.alive = False
            self._world.processes.pop(process.key, None)


class Output:
    """Of which the last words are kept."""

    last_words = None
    is_terminal = shows_workers = False

    def attach(self, key, name, rank, held=False):
        return os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)

    def release(self, key):
        pass

    def place(self, key, rank):
        pass

    def cut(self):
        pass

    def close(self, timeout_s, last_words=None, block=None):
        self.last_words = last_words
