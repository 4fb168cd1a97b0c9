"""Time and threads: everybody's clock, and greenlets in the place of processes' threads."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random

from greenlet import GreenletExit, greenlet

from ms_kungfu import membership
from ms_kungfu.elastic import program
from tests.fault.simulator.setting import Violation


class Loop(asyncio.AbstractEventLoop):
    """asyncio's loop and everybody's clock: runs what is due next, at once."""

    def __init__(self):
        self.now = 0.0
        self.queue = []
        self.reader = None
        self._count = itertools.count()
        self._on_error = None

    def at(self, delay, function, *args):
        heapq.heappush(self.queue, (self.now + delay, next(self._count), function, args, None))

    def run(self, until, done):
        """Runs until `done`, or no longer than `until`; False where nothing is left to do, or time is up."""
        queue = self.queue
        while not done():
            if not queue:
                return False
            when, _, function, args, handle = heapq.heappop(queue)
            if when > until:
                return False
            if handle is not None:
                if handle.cancelled():
                    continue
                function = handle._run
            self.now = when
            function(*args)
        return True

    # What `Job` and asyncio's tasks and futures use.

    def time(self):
        return self.now

    def call_at(self, when, callback, *args, context=None):
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self.queue, (max(when, self.now), next(self._count), None, (), handle))
        return handle

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        heapq.heappush(self.queue, (self.now, next(self._count), None, (), handle))
        return handle

    def call_soon_threadsafe(self, callback, *args, context=None):
        return self.call_later(self.thread_delay(), callback, *args, context=context)

    thread_delay = None  # how long news takes from another thread to this one

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coroutine, *, name=None):
        return asyncio.Task(coroutine, loop=self)

    def add_reader(self, fd, callback, *args):
        self.reader = callback

    def remove_reader(self, fd):
        self.reader = None

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

    def add_signal_handler(self, number, callback, *args):
        pass

    def get_debug(self):
        return False

    def is_running(self):
        return True

    def is_closed(self):
        return False


class Thread:
    """A greenlet that belongs to a process and runs only while that lives."""

    def __init__(self, world, process, name, function):
        self.world, self.process, self.name = world, process, name
        self.random = random.Random(f"{world.seed} {process.name} {name} {next(process.threads)}")
        self.turns = 0  # a wait that has ended is not ended again
        self.finished = False
        self.greenlet = greenlet(lambda: self._run(function), parent=world.hub)
        world.all_threads.append(self)

    def _run(self, function):
        membership.use(self.process.member)  # a greenlet has a context of its own
        program.use(self.process.in_program)
        try:
            function()
        except GreenletExit:
            pass
        finally:
            self.finished = True


class Condition:
    """Threads wait for a notification, or until a time. Also an Event's inside."""

    def __init__(self, world):
        self._world = world
        self._waiting = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout=None):
        thread = self._world.current
        self._waiting.append((thread, thread.turns))
        if timeout is not None:
            self._world.loop.at(timeout, self._world.resume, thread, thread.turns)
        self._world.switch_out()

    def notify_all(self):
        waiting, self._waiting = self._waiting, []
        for thread, turn in waiting:
            self._world.loop.at(self._world.short(thread.random), self._world.resume, thread, turn)


class Event:
    """threading.Event."""

    def __init__(self, world):
        self._world = world
        self._changed = Condition(world)
        self._set = False

    def is_set(self):
        return self._set

    def set(self):
        self._set = True
        self._changed.notify_all()

    def wait(self, timeout=None):
        deadline = None if timeout is None else self._world.loop.now + timeout
        while not self._set and (deadline is None or self._world.loop.now < deadline):
            self._changed.wait(None if deadline is None else deadline - self._world.loop.now)
        return self._set
