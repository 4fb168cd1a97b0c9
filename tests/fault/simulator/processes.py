"""Processes: the launcher, workers, a user at another terminal. Each is a member of its own, with its own ports."""

from __future__ import annotations

import itertools

from ms_kungfu import membership
from ms_kungfu.elastic import program
from tests.fault.simulator.broker import BrokerClient
from tests.fault.simulator.clock import Event, Thread
from tests.fault.simulator.cluster_store import Store
from tests.fault.simulator.setting import MAX_WORKERS


class Process:
    """The launcher, a worker, or a user at another terminal."""

    def __init__(self, world, name, environ):
        self.world, self.name, self.environ = world, name, environ
        self.host = None  # of several, where it is
        self.threads = itertools.count()
        self.alive = True
        self.killed = False
        self.stopped_at = None  # when SIGSTOP came
        self.loops = False  # its program does, for ever; its heart beats
        self.frozen = False  # it doesn't run, and SIGKILL has to wait until it does
        self.fatal = None  # the signal that waits
        self.held = []  # threads that would run if it was not stopped
        self.requests = []  # of its host's agent, that wait for an answer
        self.end_watches = []  # of its trainings
        self.slow = 1.0
        self.terminated = False  # told to end, from outside
        self.core = world.make_core(self)
        self.member = membership.Member(
            membership.Ports(
                core=self.core,
                environ=environ,
                broker=lambda: BrokerClient(world),
                store=lambda url, secret, writer: Store(world, writer),
                monotonic=lambda: world.loop.now,
                sleep=world.sleep,
                event=lambda: Event(world),
                start_thread=lambda name, function: self.start(name, function),
                close=lambda fd: None,
                max_workers=MAX_WORKERS,
                poll_s=0.05,
                owns_process=False,
            )
        )
        self.in_program = program.Program()  # where it is in it, as ElasticTraining counts
        self.program = None  # of a worker, once it has begun
        self.granted = None  # peer ID and incarnation
        self.key = self.pid = None  # of a worker

    def hang_up(self):
        """It has ended."""
        for request in list(self.requests):
            request.withdraw()
        for watch in self.end_watches:
            watch.hang_up()

    def start(self, name, function, delay=0.0):
        thread = Thread(self.world, self, name, function)
        self.world.loop.at(delay, self.world.resume, thread, 0)
        return thread
