"""Time and threads: the clock of all processes, and greenlets in the place of processes' threads."""

from __future__ import annotations

import heapq
import itertools
import random

from greenlet import GreenletExit, greenlet

from ms_kungfu import membership
from ms_kungfu.elastic import program


class Clock:
    """The clock of all processes: runs what is due next, at once."""

    def __init__(self):
        self.now = 0.0
        self._queue = []
        self._count = itertools.count()

    def at(self, delay, function, *args):
        heapq.heappush(self._queue, (self.now + delay, next(self._count), function, args))

    def run(self, until, done):
        """Runs until `done`, or no longer than `until`; False where nothing is left to do, or time is up."""
        while not done():
            if not self._queue:
                return False
            when, _, function, args = heapq.heappop(self._queue)
            if when > until:
                return False
            self.now = when
            function(*args)
        return True


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
