"""A host: a launcher with an event loop of its own, its guard, its descriptors; all may stand still."""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import SimpleNamespace

from ms_kungfu import env
from ms_kungfu.launcher.agent import agent
from ms_kungfu.launcher.controller import controller
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import encode
from tests.fault.simulator.machine import Guard, Machine, Output
from tests.fault.simulator.network import Socket
from tests.fault.simulator.processes import Process
from tests.fault.simulator.setting import JOIN_TIMEOUT_S, Violation

_HEARD_S = 1.0  # until a message of the launcher to itself is heard


class HostLoop(asyncio.AbstractEventLoop):
    """The event loop of a launcher, on the clock of all processes. What is due while the host stands still waits."""

    def __init__(self, world, host):
        self._world, self._host = world, host
        self._held = []
        self._readers = {}  # sockets and descriptors
        self._writers = {}
        self.signal_handlers = {}
        self._on_error = None

    def time(self):
        return self._world.loop.now

    def call_at(self, when, callback, *args, context=None):
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.loop.at(max(when - self.time(), 0.0), self._run, handle)
        return handle

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        self._world.loop.at(0.0, self._run, handle)
        return handle

    def call_soon_threadsafe(self, callback, *args, context=None):
        """News takes a moment from one thread to another."""
        return self.call_later(self._world.short(self._world.random), callback, *args, context=context)

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coroutine, *, name=None):
        return asyncio.Task(coroutine, loop=self)

    def set_exception_handler(self, handler):
        self._on_error = handler

    def call_exception_handler(self, context):
        error = context.get("exception")
        if error is None:  # a task that is left over from a job that was cut off
            return
        if isinstance(error, Violation) or self._on_error is None:
            raise error
        self._on_error(self, context)

    def _timer_handle_cancelled(self, handle):
        pass

    def get_debug(self):
        return False

    def is_running(self):
        return True

    def is_closed(self):
        return False

    def _run(self, handle):
        if self._host.is_over or handle.cancelled():
            return
        if self._host.stands_still:
            self._held.append(handle)
        else:
            self.within(handle._run)

    def within(self, function, *args):
        """As if the loop had called it."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            return function(*args)
        finally:
            asyncio._set_running_loop(before)

    def go_on(self):
        held, self._held = self._held, []
        for handle in held:
            self._world.loop.at(0.0, self._run, handle)

    # ---- sockets ----

    async def sock_recv(self, end, count):
        return await end.receive(count)

    async def sock_connect(self, end, address):
        await end.connect(address)

    def add_reader(self, fd, callback, *args):
        self._readers[fd] = callback
        if isinstance(fd, Socket):
            self.look_at(fd)

    def remove_reader(self, fd):
        return self._readers.pop(fd, None) is not None

    def add_writer(self, fd, callback, *args):
        self._writers[fd] = callback

    def remove_writer(self, fd):
        return self._writers.pop(fd, None) is not None

    def look_at(self, end):
        """There may be something to do."""
        if end in self._readers:
            for _ in end.queue:
                self.call_soon(self._ready, self._readers, end)
        if end in self._writers:
            self.call_soon(self._ready, self._writers, end)

    def _ready(self, of, fd):
        if fd in of:
            of[fd]()

    def guard_has_news(self):
        self.call_soon(self._ready, self._readers, 0)

    def add_signal_handler(self, number, callback, *args):
        self.signal_handlers[number] = lambda: callback(*args)


class WatchedController(controller.Controller):
    """The real one, watched."""

    def __init__(self, options, machine, registration, remove_at_end, stop, term=None):
        super().__init__(options, machine, registration, remove_at_end, stop, term)
        self._world, self._machine_of = machine._world, machine._host
        self.make_broker = machine.make_broker
        if term is None:
            self._world.job = self
        else:
            self._world.takes_the_lease(self, options.hosts.self_name)
        self.context.events.listeners.append(lambda event: self._world.event_lines.append(encode(event)))
        self._watch_resizes()
        self._watch_nodes()
        self._watch_the_end()

    def _watch_resizes(self):
        real = self._resizes.on_cluster

        def on_cluster(cluster):
            self._world.wanted_at.setdefault(cluster.version, self._world.loop.now)
            real(cluster)

        self._resizes.on_cluster = on_cluster

    def _watch_nodes(self):
        real_host_lost, real_lose = self._nodes.host_lost, self._nodes._lose

        def host_lost(name, reason):
            if self._machine_of.has_been_seen:
                return
            if not self.moves:
                self._world.host_is_lost(name, reason)
            real_host_lost(name, reason)

        def lose(name, reason):
            if self.moves:
                self._world.host_is_lost(name, reason)
                if all(
                    name not in dict(snapshot["versions"]["lost"]) for snapshot in self._world.server.leadership.history
                ):
                    raise Violation(f"{name} is lost to the others, and that isn't on record")
            real_lose(name, reason)

        self._nodes.host_lost, self._nodes._lose = host_lost, lose
        real_joined = self._nodes.host_joined

        def host_joined(host, agent):
            self._world.host_joins(host.name)
            real_joined(host, agent)

        self._nodes.host_joined = host_joined

    def _watch_the_end(self):
        real = self.course.settle

        def settle(verdict):
            was_over = self.course.is_over
            goes_on = real(verdict)
            if not was_over and self.course.is_over and self._world.job is self:
                self._world.job_is_settled(verdict)
            return goes_on

        self.course.settle = settle


class Agent(agent.Agent):
    """The real one, watched."""

    def __init__(self, *args):
        super().__init__(*args)
        real = self.own.has_led

        def has_led(leading):
            if not leading.cancelled() and isinstance(leading.exception(), Violation):
                raise leading.exception()
            real(leading)

        self.own.has_led = has_led

    def _new_host(self, *args):
        host = super()._new_host(*args)
        world, real_report, real_exit = self._machine._world, host.report, host.workers.has_exited

        def report():
            world.reports(self._machine._host)
            return real_report()

        def has_exited(event):
            real_exit(event)
            if world.checks_reaped:
                world.loop.at(_HEARD_S, self._check_reaped, event.key)

        host.report, host.workers.has_exited = report, has_exited
        return host

    def _obey(self, said):
        is_end = isinstance(said, m.End)
        goes_on = is_end and (said.left or "the job goes on" in str(said.words))
        if (isinstance(said, m.Signal) and said.key is None) or (is_end and not goes_on):
            self._machine._world.end_is_heard(self._options.host.name)
        if goes_on and not said.left:
            self._machine._world.loss_is_heard(self._options.host.name)
        super()._obey(said)

    def _check_reaped(self, key):
        """All versions have heard of it by now."""
        host = self._machine._host
        if host.is_over or self.own.controller is None or self.own.controller.is_over:
            return
        for segment in self._host.segments.open.values():
            memory = segment._segment
            for rank, holder in memory.attached.items():
                if holder.key == key and rank in memory.deaths and rank not in memory.reaped:
                    raise Violation(f"{holder.name} is reaped, and version {memory.version} doesn't hear of it")


class Host:
    """A host, and what runs there. One that comes back is another one of the same name."""

    def __init__(self, world, number, options):
        self.world, self.number = world, number
        self.name = self.address = options.host.name
        self.is_head = options.hosts.is_head
        self.is_on = True
        self.stands_still = False
        self.is_over = False  # its launcher is gone
        self.has_been_seen = False
        self.was_killed = False  # before any launcher knew how the job ends
        self.was_disturbed = False  # in a way for which it may be declared lost
        self.had_reset_links = False
        self.is_leaving = self.is_told = False  # by a SIGTERM; by another signal
        self.is_lost = False  # the controller has said so
        self.descriptors = {}
        self.server = None
        environ = {env.JOB_SECRET.name: "00", env.JOIN_TIMEOUT.name: str(JOIN_TIMEOUT_S)}
        environ[env.COLLECTIVE_TIMEOUT.name] = str(world.collective_timeout_s)
        self.launcher = Process(world, f"launcher of {self.name}", environ)
        self.launcher.host = self
        self.loop = HostLoop(world, self)
        self.guard, self.output = Guard(world, self), Output()
        self.program = self.loop.within(
            Agent, options, self.guard, self.output, WatchedController, Machine(world, self)
        )
        self.made_broker = None
        self.task = None

    def start(self):
        self.task = self.loop.within(self.loop.create_task, self.program.run())
        self.task.add_done_callback(self._has_ended)

    def _has_ended(self, task):
        if not task.cancelled():
            task.exception()  # which `outcome` tells
        self.is_over = True
        self.launcher.alive = False
        self._close_all()
        self.guard.close()

    def _close_all(self):
        network = self.world.network
        for end in [*network.listeners.values(), *network.sockets]:
            if end.host is self:
                end.close()

    def workers(self):
        return [process for process in self.world.processes.values() if process.host is self]

    def descriptor_of(self, thing):
        fd = os.open(os.devnull, os.O_RDONLY)
        self.descriptors[fd] = thing
        return fd

    # ---- what happens to it ----

    def kill(self):
        """Its launcher; the guard ends the workers."""
        self.is_over = self.was_disturbed = True
        self.was_killed = self.world.verdict is None
        self.launcher.alive = False
        self._close_all()
        self.world.loop.at(self.world.short(self.world.random), self.guard.close)

    def switch_off(self):
        self.is_on, self.was_disturbed = False, True
        self.is_over, self.was_killed = True, self.world.verdict is None
        self.launcher.alive = False
        for end in [*self.world.network.sockets]:
            if end.host is self:  # no process hears of it
                end.is_open, end.outgoing = False, type(end.outgoing)()
        for listener in [*self.world.network.listeners.values()]:
            if listener.host is self:
                del self.world.network.listeners[listener.name]
        self.guard.close()

    def stand_still(self):
        self.stands_still = True
        for process in (self.launcher, *self.workers()):
            self.world.stop(process)

    def go_on(self):
        self.stands_still = False
        for process in (self.launcher, *self.workers()):
            self.world.go_on(process)
        self.loop.go_on()

    def close_descriptors(self):
        """Those that are left, as the kernel does."""
        null = os.stat(os.devnull).st_rdev
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                if fd > 2 and os.fstat(fd).st_rdev == null:
                    os.close(fd)

    def finish(self):
        """After all has been seen."""
        if not self.task.done():
            self.is_over = self.stands_still = False
            self.has_been_seen = True  # what it does in its end concerns no other host
            self.loop.within(self.task.cancel)

    def close_coroutines(self):
        """Those of a killed launcher, which no process goes on with. Left to the garbage collector they would end
        in the midst of another world, and take its loop for theirs."""
        self.is_over = True
        for _ in range(3):  # what ends may begin something
            for task in asyncio.all_tasks(self.loop):
                task._log_destroy_pending = False
                for _ in range(20):  # each time up to its next `await`
                    if task.get_coro().cr_frame is None:
                        break
                    with contextlib.suppress(BaseException):
                        self.loop.within(task.get_coro().close)

    def signal(self, number):
        if not self.is_over and number in self.loop.signal_handlers:
            self.loop.call_soon(self.loop.signal_handlers[number])

    @property
    def outcome(self):
        """Exit code and last words; None: it was killed, or hasn't ended."""
        if self.task is None or not self.task.done() or self.task.cancelled():
            return None
        error = self.task.exception()
        if isinstance(error, Violation):
            raise error
        return SimpleNamespace(
            code=1 if error else self.task.result(), words=str(error or "") or self.output.last_words or ""
        )
