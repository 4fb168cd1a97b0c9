"""A job without processes, on a virtual clock: kungfu-run, its broker, a config server and workers in one thread.

What runs is the code of the package: the launcher's `Job` with its policy, the `Broker` with its `Membership`, the
`Follower`, the config server's store, and a worker's side, `ms_kungfu.membership`. What it would block in or
ask the kernel for is replaced: processes and threads are greenlets, asyncio's loop is `Loop`, messages take a random
time, and the collectives of the runtime are `Core`, which does what `docs/recovery.md` argues for: final words,
generations, steps that settle. A worker may die wherever it waits, and it waits at each place that matters.

One seed and one list of events give one course of things, every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import itertools
import logging
import os
import random
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from ms_kungfu import broker_protocol, env, membership
from ms_kungfu.cluster_store import StaleVersionError, StoreUnreachableError
from ms_kungfu.config_server.store import ConfigStore
from ms_kungfu.dataset import audit, sharding
from ms_kungfu.errors import CollectiveTimeoutError, ConfigServerError, KungFuError, PeerLostError, ResizeError
from ms_kungfu.launcher import broker, commands, job, machine
from ms_kungfu.launcher.devices import Devices
from ms_kungfu.launcher.hosts import Host, PortRange
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.policy import Action, Recover, Verdict
from ms_kungfu.launcher.supervisor import Exited, Started
from ms_kungfu.membership import step_agreement

JOIN_TIMEOUT_S = 15.0
PEER_TIMEOUT_S = 1.0
UNANSWERED_KILL_S = 10.0  # of launcher.agent
MAX_WORKERS = 8  # a segment has no room for more
_PORTS = range(10000, 10100)


class Violation(AssertionError):
    """The protocol has broken a promise."""


class StateLost(KungFuError):
    """All who had the training state are dead."""


# ---- time and threads ------------------------------------------------------------------------------------------------


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


class Process:
    """The launcher, a worker, or somebody at another terminal."""

    def __init__(self, world, name, environ):
        self.world, self.name, self.environ = world, name, environ
        self.threads = itertools.count()
        self.alive = True
        self.killed = False
        self.stopped_at = None  # when SIGSTOP came
        self.frozen = False  # it doesn't run, and SIGKILL has to wait until it does
        self.fatal = None  # the signal that waits
        self.held = []  # threads that would run if it was not stopped
        self.slow = 1.0
        self.terminated = False  # told to end, from outside
        self.core = Core(world, self)
        self.member = membership.Member(
            membership.Ports(
                core=self.core,
                environ=environ,
                broker=lambda: BrokerClient(world),
                store=lambda url, secret: Store(world),
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
        self.training = None
        self.granted = None  # peer ID and incarnation
        self.key = self.pid = None  # of a worker

    def start(self, name, function, delay=0.0):
        thread = Thread(self.world, self, name, function)
        self.world.loop.at(delay, self.world.resume, thread, 0)
        return thread


# ---- the runtime's collectives ---------------------------------------------------------------------------------------


class Segment:
    """The shared memory of a cluster version: final words of operations, and the list of deaths."""

    def __init__(self, world, size, version, recovers):
        if world.loop.now < world.no_descriptors_until:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if size > MAX_WORKERS:
            raise ValueError(f"{size} ranks are too many")
        self.world, self.size, self.version, self.recovers = world, size, version, recovers
        self.fd = world.new_segment(self)
        self.announced = version
        self.meetings = 0
        self.deaths = []
        self.reaped = set()
        self.lost = {}  # rank -> reason, where nobody goes on
        self.attached = {}  # rank -> process
        self.words = {}  # (name, generation, number) -> {rank: what it brings}
        self.changed = Condition(world)
        self.waits = {}  # the same keys -> Condition

    def members(self, generation):
        dead = self.deaths[:generation]
        return [rank for rank in range(self.size) if rank not in dead]

    # What the launcher does.

    def mark_lost(self, rank, reason, recover, reaped):
        process = self.attached.get(rank)
        if process is not None and process.alive and process.fatal is None:
            raise Violation(f"{process.name}, rank {rank} of version {self.version}, is marked dead and lives")
        if reaped:
            self.reaped.add(rank)
        if rank in self.deaths or rank in self.lost:
            return
        if recover:
            self.deaths.append(rank)
        else:
            self.lost[rank] = reason
        self.changed.notify_all()
        for wait in self.waits.values():
            wait.notify_all()

    def gave_up(self, rank):
        return ""

    def heartbeat(self, rank):
        process = self.attached.get(rank)
        if process is None:
            return 0
        now = self.world.loop.now if process.stopped_at is None else process.stopped_at
        return 1 + int(now * 10)

    def announce(self, version):
        if version < self.announced:
            raise Violation(f"version {version} is announced after {self.announced}")
        self.announced = version

    def close(self):
        pass


class Lost(Exception):
    """A member's part is unfinished for ever."""


class Core:
    """`ms_kungfu._core` in one process."""

    def __init__(self, world, process):
        self.world, self.process = world, process
        self.segment = None
        self.own_rank = 0
        self.generations = {}  # name -> the generation it has come to
        self.numbers = {}  # (name, generation) -> operations so far
        self.committed_in = self.reduced_in = 0  # the latest generation of a step's gradients, of anything; from 1
        self.has_state = False

    def set_join_handler(self, handler):
        pass

    def join(self, fd, rank, address, has_state, collective_timeout_s, join_timeout_s):
        world, segment = self.world, self.world.segments[fd]
        world.place("joining")
        if self.segment is not None and segment.version <= self.segment.version:
            raise Violation(f"{self.process.name} goes from version {self.segment.version} to {segment.version}")
        if rank in segment.attached:
            raise Violation(
                f"{self.process.name} and {segment.attached[rank].name} are both rank {rank} of version "
                f"{segment.version}"
            )
        self.segment, self.own_rank = segment, rank
        self.generations, self.numbers, self.committed_in, self.reduced_in = {}, {}, 0, 0
        segment.attached[rank] = self.process
        self.has_state = has_state
        segment.changed.notify_all()
        world.say("in", f"{self.process.name} is rank {rank} of {segment.size} in version {segment.version}")
        deadline = world.loop.now + join_timeout_s
        while any(r not in segment.attached and r not in segment.deaths for r in range(segment.size)):
            self._check_lost()
            if world.loop.now >= deadline:
                raise CollectiveTimeoutError(f"cluster version {segment.version} has not assembled")
            segment.changed.wait(deadline - world.loop.now)
        world.place("joined")

    def leave(self, reason):
        pass

    def rank(self):
        return self.own_rank

    def size(self):
        return self.segment.size

    def cluster_version(self):
        return self.segment.version

    def announced_version(self):
        return self.segment.announced

    def sync_points(self):
        return self.segment.meetings

    def request_sync_point(self, number):
        self.segment.meetings = max(self.segment.meetings, number)

    def living(self):
        return self.segment.members(len(self.segment.deaths))

    def state_root(self):
        segment = self.segment
        for rank in self.living():
            if rank in segment.attached and segment.attached[rank].core.has_state:
                return rank
        return segment.size

    def take_reductions(self):
        gradient, latest = self.committed_in, self.reduced_in
        self.committed_in = self.reduced_in = 0
        return gradient, latest, int(gradient > 0), gradient, gradient

    def members_of(self, generation):
        return self.segment.members(generation)

    def all_reduce(self, name, input, output, op, dtype=-1):
        assert op == step_agreement._MAX
        brought, generation = self.run(name, input.copy())
        output[:] = np.maximum.reduce(list(brought.values()))
        self.reduced_in = max(self.reduced_in, generation + 1)

    def broadcast(self, name, input, output, root, dtype=-1):
        brought, _ = self.run(name, input.copy() if root == self.own_rank else None, root)
        output[:] = brought[root]

    def commit(self, names, contribution):
        """A step's gradient groups: what each participant brought to all of them, once they are of one mind."""
        results = [self.run(name, contribution) for name in names]
        while True:
            latest = max(generation for _, generation in results)
            behind = [k for k, (_, generation) in enumerate(results) if generation < latest]
            if not behind:
                break
            for k in behind:
                results[k] = self.run(names[k], contribution, generation=latest)
        self.committed_in = max(self.committed_in, results[0][1] + 1)
        return [brought for brought, _ in results]

    def run(self, name, brings, root=None, generation=0):
        """What the members of the generation in which the operation ended have brought, by rank; and it."""
        segment, own = self.segment, self.own_rank
        self.generations[name] = max(self.generations.get(name, 0), generation)
        while True:
            generation = self.generations[name]
            members = segment.members(generation)
            if root is not None and root not in members:
                raise PeerLostError(f"broadcast {name}: its root, rank {root}, has died")
            if own not in members:
                raise Violation(f"{self.process.name} goes on without itself")
            number = self.numbers[name, generation] = self.numbers.get((name, generation), 0) + 1
            key = name, generation, number
            try:
                words = self._attempt(key, members, brings, root)
                return {rank: words.get(rank) for rank in members}, generation
            except Lost:
                self.world.place("before the next generation")
                self.generations[name] = generation + 1

    def _attempt(self, key, members, brings, root):
        segment, world = self.segment, self.world
        words = segment.words.setdefault(key, {})
        wait = segment.waits.setdefault(key, Condition(world))
        world.place("before its word", takes_time=True)
        words[self.own_rank] = brings
        if len(words) == len(members) or segment.deaths:
            wait.notify_all()
        world.place("after its word")
        while True:
            missing = [rank for rank in members if rank not in words and (root is None or not self.is_dead(rank, root))]
            if not missing:
                return words
            self._check_lost()
            if self.unfinished(missing):
                raise Lost
            wait.wait()

    def is_dead(self, rank, root):
        """Of a broadcast only the root's part is missed."""
        return rank != root and rank in self.segment.deaths

    def unfinished(self, missing):
        return any(rank in self.segment.deaths for rank in missing)

    def _check_lost(self):
        if self.segment.lost:
            raise PeerLostError(f"rank {next(iter(self.segment.lost))}: {next(iter(self.segment.lost.values()))}")


# ---- what a worker trains --------------------------------------------------------------------------------------------


@dataclass
class Training:
    """The state that has to be the same at all workers."""

    walk: sharding.EpochCursor
    step: int = 0
    weights: int = 0
    stopping: bool = False

    def capture(self):
        return {**self.walk.state(), "step": self.step, "weights": self.weights, "stopping": self.stopping}

    def restore(self, received):
        received = dict(received)
        self.step, self.weights = received.pop("step"), received.pop("weights")
        self.stopping = received.pop("stopping")
        self.walk.restore(received)


class Worker:
    """A training program: what `ElasticTraining` and `ElasticDataset` do, without MindSpore."""

    def __init__(self, world, process):
        self.world, self.process, self.core = world, process, process.core
        self.setup = world.setup
        self.training = process.training = Training(sharding.EpochCursor(self.setup.samples))
        self.dealt_for = None
        self.members = ()

    def begin(self):
        """Whether this worker has a part in the training."""
        world = self.world
        world.place("in begin")
        membership.begin()
        if membership.is_deferred():
            world.sleep(world.current.random.random() * self.setup.prepare_s)
            membership.join()
        if membership.is_detached():
            return False
        if membership.is_joiner():
            self.share_state()
            return True
        return not self.follow(membership.step(self.setup.size_after(0), self.setup.wait))

    def main(self):
        world, training = self.world, self.training
        if not self.begin():
            return
        while True:
            version = self.core.cluster_version()
            if self.dealt_for != version:
                self.dealt_for, self.members = version, tuple(range(self.core.size()))
            step = training.walk.take(self.setup.global_batch, self.members)
            if step is None:
                world.record_end(self)
                training.walk.end_epoch()
                if training.stopping:
                    return
                continue
            self.train(step)
            if self.follow(membership.step(self.setup.size_after(training.step), self.setup.wait)):
                return

    def train(self, step):
        world, training, core = self.world, self.training, self.core
        world.sleep(self.setup.step_s * self.process.slow * (0.5 + world.current.random.random()) * world.calm())
        world.place("before the reduction")
        groups = core.commit(self.setup.groups, (step.share(core.rank()), world.loop.now > world.quiet_from))
        brought = groups[0]
        if any(other != brought for other in groups):
            raise Violation(f"{self.process.name}: a step's groups have different participants: {groups}")
        world.place("after the reduction")
        participants = tuple(membership.take_participants())
        if tuple(brought) != participants:
            raise Violation(f"{self.process.name}: {participants} took part, {tuple(brought)} are in the result")
        if core.rank() not in participants:
            raise Violation(f"{self.process.name} lives and took no part")
        epoch, members = training.walk.epoch, self.members
        self.members = tuple(rank for rank in members if rank in participants)
        (committed,) = training.walk.commit(participants)
        training.step += 1
        training.weights = hash((training.weights, tuple(brought.items())))
        training.stopping |= any(stop for _, stop in brought.values())
        world.committed(self, epoch, committed, members, participants)

    def follow(self, change):
        """Whether this worker has left."""
        if change.detached:
            self.world.say("left", f"{self.process.name} has left the cluster")
            return True
        if change.changed:
            self.share_state()
        return False

    def share_state(self):
        """As ms_kungfu.elastic.state does: the lowest living rank that has the state hands it over, or the next."""
        world, core, joiner = self.world, self.core, membership.is_joiner()
        lacking, _ = core.run("meet", joiner)
        if any(lacking.values()):
            while True:
                answers, _ = core.run("root", not joiner)
                roots = [rank for rank, able in answers.items() if able]
                if not roots:
                    raise StateLost("every worker that had the training state has died")
                world.place("hands over the state")
                try:
                    handed, _ = core.run(
                        "state", self.training.capture() if core.rank() == roots[0] else None, roots[0]
                    )
                except PeerLostError:
                    continue
                break
            if joiner:
                self.training.restore(handed[roots[0]])
                membership.state_received()
                core.has_state = True
                world.say("state", f"{self.process.name} has the state of step {self.training.step}")
        world.arrived(self)


class AsynchronousWorker(Worker):
    """The same without meeting once a step: shares are trained by each at its own speed."""

    def main(self):
        world, training = self.world, self.training
        if not self.begin():
            return
        while not training.stopping:
            if self.dealt_for != self.core.cluster_version():
                self.dealt_for, self.members = self.core.cluster_version(), tuple(range(self.core.size()))
            step = training.walk.take(self.setup.global_batch, self.members)
            if step is None:
                training.walk.end_epoch()
                if world.loop.now > world.quiet_from:
                    membership.sync_point_is_due(call=True)
                    self.meet(None, ended=True)
                continue
            world.sleep(self.setup.step_s * self.process.slow * (0.5 + world.current.random.random()) * world.calm())
            epoch = training.walk.epoch
            training.walk.commit()
            training.step += 1
            world.trained(self, epoch, step)
            world.place("before it looks")
            wanted = self.setup.size_after(training.step)
            if membership.sync_point_is_due(wanted):
                world.place("before it meets")
                if self.meet(wanted):
                    return

    def meet(self, wanted, ended=False):
        """What `ElasticTraining` does in a meeting. Whether this worker has left."""
        core, training = self.core, self.training
        membership.enter_sync_point()
        version = core.cluster_version()
        while True:
            told, _ = core.run("meeting", (training.step, training.walk.epoch, wanted or 0, ended))
            root = max((brought[:2], -rank) for rank, brought in told.items() if brought is not None)[1] * -1
            try:
                positions, _ = core.run("position", training.capture() if core.rank() == root else None, root)
            except PeerLostError:
                continue
            break
        training.restore(positions[root])
        self.world.met(self, version)
        told = [brought for brought in told.values() if brought is not None]
        if any(ended for *_, ended in told):
            training.stopping = True
            return False
        sizes = max(((step, size) for step, _, size, _ in told if size), default=None)
        return self.follow(membership.follow_sync_point(None if sizes is None else sizes[1]))


# ---- a course of events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Happening:
    """Something that is done to the job at a time."""

    at: float
    kind: str
    who: int = 0
    more: float = 0.0

    def __str__(self):
        return f"{self.at:.3f} s: {self.kind} {self.who}" + (f" ({self.more:g})" if self.more else "")


@dataclass(frozen=True)
class Setup:
    """A job as it starts."""

    size: int = 2
    recover: Recover = Recover.SHRINK
    standbys: int = 0
    external: bool = False  # a config server of its own, which may go away
    min_size: int = 1
    max_restarts: int = 10
    schedule: tuple[tuple[int, int], ...] = ()
    wait: bool = False
    asynchronous: bool = False
    samples: int = 24
    global_batch: int = 6
    step_s: float = 0.03
    prepare_s: float = 0.5
    groups: tuple[str, ...] = ("grad/0", "grad/1")

    def size_after(self, step):
        return dict(self.schedule).get(step)


@dataclass
class Outcome:
    """How the job ended."""

    exit_code: int
    reason: str
    steps: int
    deaths: int
    seconds: float
    told: list[str] = field(default_factory=list)


class World:
    """One job, one course of events. `run` once."""

    def __init__(self, seed, setup, happenings, told=None):
        self.seed, self.setup, self.happenings = seed, setup, happenings
        self.random = random.Random(f"{seed} world")
        self.told = told
        self.loop = Loop()
        self.loop.thread_delay = lambda: self.short(self.random)
        self.hub = getcurrent()
        self.all_threads = []
        self.current = None
        self.segments = {}
        self.processes = {}  # key -> Process, those that run
        self.everybody = []
        self.deaths = 0
        last = max((h.at + h.more for h in happenings), default=0.0)
        self.hangs = any(h.kind in ("stop", "freeze") for h in happenings)
        self.calm_from = last + (2.5 * PEER_TIMEOUT_S if self.hangs else 0.5)
        self.slow_from = self.calm_from + 1.0
        if any(h.kind == "freeze" for h in happenings):
            self.calm_from += JOIN_TIMEOUT_S + UNANSWERED_KILL_S
        self.quiet_from = self.calm_from + 4.0 + (2 * setup.prepare_s)
        self.launcher = Process(
            self, "launcher", {"KUNGFU_JOB_SECRET": "00", "KUNGFU_JOIN_TIMEOUT": str(JOIN_TIMEOUT_S)}
        )
        self.outside = Process(self, "outside", {"KUNGFU_JOB_SECRET": "00"})
        self.server = Server(self)
        self.broker = None
        self.verdict = None
        self.job_ending = False
        self.steps = {}  # number -> (version, participants, weights)
        self.arrivals = {}  # version -> the state that all have there
        self.records = {}  # process -> lines of its ledger
        self.meetings = {}  # version, number -> the position that all have after it
        self.shares = {}  # epoch, position -> processes that have trained it, of asynchronous ones
        self.trouble = []  # exceptions in workers
        self.closing = False
        self.survivors_at_verdict = 0  # members that have the training state
        self.no_descriptors_until = 0.0
        self.wished = []  # clusters that were asked for from outside
        self.refused = set()  # versions
        self.holders = {}  # version -> processes that came to it with the training state

    # -- running --

    def resume(self, thread, turn):
        process = thread.process
        if thread.turns != turn or thread.finished or not process.alive:
            return
        if process.stopped_at is not None:
            process.held.append((thread, turn))
            return
        thread.turns += 1
        self.current = thread
        thread.greenlet.switch()
        self.current = None

    def switch_out(self):
        """The running thread waits until somebody resumes it."""
        self.hub.switch()

    def sleep(self, seconds):
        thread = self.current
        self.loop.at(max(seconds, 0.0), self.resume, thread, thread.turns)
        self.switch_out()

    def place(self, name, takes_time=False):
        """Somewhere a process may be for a moment, and die. Passed at once when nothing happens any more, but for what
        `takes_time`, lest a loop stand still in time."""
        if takes_time or self.loop.now < self.calm_from + 1.0:
            self.sleep(self.short(self.current.random))

    @staticmethod
    def short(rng):
        """A moment; now and then a long one."""
        draw = rng.random()
        return 0.01 * draw if draw < 0.9 else 0.5 * (draw - 0.9) + 0.01

    def calm(self):
        """Steps take longer when nothing happens any more, or not for long."""
        return 1.0 if self.loop.now < self.slow_from else max(1.0, 0.6 / self.setup.step_s)

    def current_environ(self):
        return self.launcher.environ if self.current is None else self.current.process.environ

    def new_segment(self, segment):
        self.segments[len(self.segments) + 1] = segment
        return len(self.segments)

    def say(self, kind, text):
        if self.told is not None:
            self.told.append(f"{self.loop.now:9.3f}  {text}")

    def run(self):
        """The outcome; Violation where a promise is broken."""
        with self._alone():
            try:
                return self._run()
            finally:
                for thread in self.all_threads:
                    if not thread.finished and thread.greenlet:
                        self.current = thread
                        with contextlib.suppress(BaseException):
                            thread.greenlet.throw(GreenletExit)

    def _run(self):
        options = self._options()
        guard, output = Guard(self), Output()
        self.job = Launcher(options, guard, output, Machine(self))
        self.job._world = self
        if self.setup.external:
            self.server.store = ConfigStore()
        task = self.loop.create_task(self.job.run())
        for happening in self.happenings:
            self.loop.at(happening.at, self._happen, happening)
        try:
            if not self.loop.run(self.quiet_from + 120.0, task.done):
                where = [f"{t.process.name} {t.name}" for t in self.all_threads if not t.finished and t.process.alive]
                raise Violation(f"nothing goes on at {self.loop.now:.1f} s; there wait {', '.join(where)}")
        finally:
            self._finish(task)
        code = task.result()
        self._check_end(code)
        return Outcome(code, self.verdict.reason, len(self.steps), self.deaths, self.loop.now, self.told or [])

    def _finish(self, task):
        """Ends a job that has not ended by itself."""
        self.closing = True
        for process in self.everybody:
            process.alive = False
        with contextlib.suppress(Exception):
            if not self.job._verdict.done():
                self.job._verdict.set_result(Verdict(Action.FAIL, "", 1))
            self.loop.run(self.loop.now + 30.0, task.done)

    def _options(self):
        setup = self.setup
        return Options(
            command=("program",), size=setup.size, host=Host(max_workers=MAX_WORKERS),
            ports=PortRange(_PORTS[0], _PORTS[-1]),
            runner_port=38080, watch=True, keep=False, quiet=True, show_workers=False, logdir=None, logfile=None,
            config_server="http://server/config" if setup.external else None,
            builtin_port=None if setup.external else 0, timeout_s=None, delay_s=0.0, init_version=None,
            affinity=False, allow_nvlink=False, leave_grace_s=3.0, recover=setup.recover, min_size=setup.min_size,
            max_restarts=setup.max_restarts, standbys=setup.standbys,
            peer_timeout_s=PEER_TIMEOUT_S if self.hangs else None,
        )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self):
        log = logging.getLogger("ms_kungfu")
        level, propagate, handlers = log.level, log.propagate, list(log.handlers)
        log.handlers, log.propagate = [logging.NullHandler()], False
        if self.told is not None:
            log.handlers = [_Told(self)]
        log.setLevel(logging.INFO if self.told is not None else logging.CRITICAL)
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)

    def _thread_owner(self):
        return self.launcher if self.current is None else self.current.process

    # -- what happens to the job --

    def members(self):
        """The processes of the chosen cluster that live, by rank."""
        current = self.broker.current() if self.broker is not None else None
        if current is None:
            return []
        running = [p for p in self.job._agent.processes if p.key in self.processes]
        found = {p.peer: self.processes[p.key] for p in running if self._is_in(p, current.version)}
        return [found[peer] for peer in current.workers if peer in found and found[peer].alive]

    def _is_in(self, process, version):
        return (
            process.peer is not None
            and process.incarnation <= version
            and not self.broker.is_out(process.peer, process.incarnation)
        )

    def _happen(self, happening):
        if self.broker is None or self.verdict is not None:
            return
        members, kind, who = self.members(), happening.kind, happening.who
        if kind in ("kill newcomer", "kill member", "kill lone", "stop", "freeze", "pause", "slow", "terminate"):
            others = [p for p in self.processes.values() if p.alive and p not in members]
            crowd = others if kind == "kill newcomer" else members
            if kind in ("stop", "freeze"):
                crowd = members + others
            if kind == "freeze":  # nobody is waited for who has no place yet, but for the first workers
                crowd = [p for p in crowd if p.granted is not None or env.PARKED.name in p.environ]
            if kind == "kill lone":
                crowd = self._lonely(members)
            if not crowd:
                return
            target = crowd[who % len(crowd)]
            if kind in ("kill member", "kill lone", "terminate", "freeze") and len(members) == 1 and who != 7:
                return  # the job's end, of which there are enough
            self.say("do", f"-- {kind}: {target.name}")
            if kind.startswith("kill"):
                self.kill(target, -signal.SIGKILL)
            elif kind == "slow":
                target.slow = 20.0
                self.loop.at(happening.more, setattr, target, "slow", 1.0)
            elif kind == "terminate":
                target.terminated = True
                target.start("leave", lambda: self._leave_or_die(target))
            else:
                self.stop(target)
                target.frozen |= kind == "freeze"
                if kind == "pause" or (kind == "freeze" and happening.more):
                    self.loop.at(happening.more, self.go_on, target)
        elif kind == "kill all":
            self.say("do", "-- kill all")
            for target in members:
                self.kill(target, -signal.SIGKILL)
        elif kind == "terminate all":
            self.say("do", "-- terminate all")
            for target in members:
                target.terminated = True
                target.start("leave", lambda target=target: self._leave_or_die(target))
        elif kind == "resize":
            self.outside.start("resize", lambda: self._from_outside(lambda c: c.resized(who, _PORTS)))
        elif kind == "evict":
            self.outside.start("evict", lambda: self._from_outside(lambda c: c.without([c.workers[who % c.size]])))
        elif kind == "policy evicts":
            if members:
                caller = members[who % len(members)]
                caller.start("evict", lambda: self._evict(int(happening.more)))
        elif kind == "no descriptors":
            self.say("do", f"-- {kind}")
            self.no_descriptors_until = self.loop.now + happening.more
        elif kind in ("server away", "server loses all"):
            self.say("do", f"-- {kind}")
            self.server.go_away(kind == "server loses all")
            self.loop.at(happening.more, self.server.come_back)
        else:
            raise ValueError(kind)

    def _lonely(self, members):
        """Those of whom a cluster that somebody wished for has only one: the smallest such cluster's."""
        known = {process.granted[0]: process for process in members if process.granted is not None}
        clusters = [[known[peer] for peer in wish.workers if peer in known] for wish in self.wished]
        return min((present for present in clusters if present), key=len, default=[])[:1]

    def _leave_or_die(self, process):
        """What `membership.sigterm` does."""
        try:
            if process.granted is None:
                raise ResizeError("not in the cluster yet")
            BrokerClient(self).request_leave(process.granted[0], 10.0, terminated=True)
        except KungFuError:
            self.kill(process, -signal.SIGTERM)

    def _from_outside(self, change):
        following = None

        def next_cluster(cluster):
            nonlocal following
            try:
                following = change(cluster)
            except ValueError as error:
                return str(error)
            if following.workers == cluster.workers:
                following = None
            return following or "nothing to do"

        try:
            self.say("do", "-- from outside: " + commands._write(Store(self), next_cluster))
            if following is not None and self.setup.min_size <= following.size <= MAX_WORKERS:
                self.wished.append(following)
        except (ConfigServerError, ValueError) as error:
            self.say("do", f"-- from outside, refused: {error}")

    def _evict(self, place):
        cluster = membership.current().cluster
        if cluster is not None:
            with contextlib.suppress(ResizeError):
                membership.evict(place % cluster.size)

    def kill(self, process, code):
        if process.frozen:
            process.fatal = code
        elif process.alive:
            process.alive, process.killed = False, self.verdict is None
            self.deaths += 1
            self.say("do", f"{process.name} dies")
            self.loop.at(self.short(self.random), self.guard_tells, process, code)

    def stop(self, process):
        if process.stopped_at is None:
            process.stopped_at = self.loop.now

    def go_on(self, process):
        process.frozen = False
        if process.fatal is not None:
            self.kill(process, process.fatal)
        elif process.stopped_at is not None:
            process.stopped_at = None
            held, process.held = process.held, []
            for thread, turn in held:
                self.resume(thread, turn)

    # -- what the guard does --

    def guard_tells(self, process, code, error=""):
        if self.processes.pop(process.key, None) is not None:
            self.guard.events.append(Exited(process.key, code, error))
            self.loop.at(self.short(self.random), self.guard.tell)

    def run_worker(self, process):
        code = 0
        try:
            (AsynchronousWorker if self.setup.asynchronous else Worker)(self, process).main()
        except Violation as error:
            self.trouble.append(error)
            raise
        except Exception as error:
            code = 1
            self.say("do", f"{process.name} fails: {type(error).__name__}: {error}")
            if not self.job._verdict.done() and not self._is_excused(process, error):
                self.trouble.append((process, error))
        process.alive = False
        self.loop.at(self.short(self.current.random), self.guard_tells, process, code)

    def _is_excused(self, process, error):
        """Only what can't be helped: all who came to its version with the state have died, and somebody had."""
        holders = self.holders.get(process.core.segment.version, ()) if process.core.segment is not None else ()
        return (
            isinstance(error, StateLost)
            and bool(holders)
            and not any(holder.alive and holder.fatal is None for holder in holders)
        )

    # -- promises --

    def committed(self, worker, epoch, step, members, participants):
        training, core = worker.training, worker.core
        outcome = (core.cluster_version(), participants, training.weights)
        known = self.steps.setdefault(training.step, outcome)
        if known != outcome:
            raise Violation(f"step {training.step} has two outcomes: {known} and, at {worker.process.name}, {outcome}")
        self.place("before the record")
        claim = audit.Claim(
            core.cluster_version(), core.size(), members, participants, step.batch, self.setup.samples, 0, True
        )
        self._record(worker, epoch, step.number, step.share(core.rank()), claim)

    def trained(self, worker, epoch, step):
        """An asynchronous worker's share of a step."""
        self.steps.setdefault((worker.core.cluster_version(), worker.training.step), None)
        for first, last in step.share(worker.core.rank()):
            for position in range(first, last):
                self.shares.setdefault((epoch, position), []).append(worker.process)

    def met(self, worker, version):
        """In a meeting: all who are there go on from the same state."""
        meeting, state = (version, membership.current().sync_points), worker.training.capture()
        known = self.meetings.setdefault(meeting, state)
        if known != state:
            raise Violation(f"meeting {meeting} agrees on {known} and, at {worker.process.name}, on {state}")

    def record_end(self, worker):
        walk = worker.training.walk
        self._record(worker, walk.epoch, walk.steps, (), audit.End(walk.pool, self.setup.global_batch, False))

    def _record(self, worker, epoch, step, share, claim):
        lines = self.records.setdefault(worker.process.name, [])
        where = f"{worker.process.name}, line {len(lines) + 1}"
        lines.append(audit.Record(where, "job", self.loop.now, 0, epoch, step, worker.core.rank(), share, claim))

    def arrived(self, worker):
        """After a change: all members of a version go on from the same state."""
        version, state = worker.core.cluster_version(), worker.training.capture()
        known = self.arrivals.setdefault(version, state)
        if known != state:
            raise Violation(f"version {version} begins with two states: {known} and, at {worker.process.name}, {state}")

    def _check_end(self, code):
        members = [p for p in self.everybody if p.training is not None]
        finished_well = code == 0
        for entry in self.trouble:
            if isinstance(entry, Violation):
                raise entry
        if self.trouble:
            process, error = self.trouble[0]
            raise Violation(f"{process.name} failed: {type(error).__name__}: {error}")
        if not finished_well and "-min-np" not in self.verdict.reason:
            if self.survivors_at_verdict > 0:
                raise Violation(f"the job failed though somebody lives: {self.verdict.reason}")
            version = self.broker.current().version
            if self.holders and not self.holders.get(version):
                raise Violation(f"version {version} was chosen, and nobody ever came to it with the training state")
        if self.setup.asynchronous:
            for (epoch, position), trainers in self.shares.items():
                lived = [process.name for process in trainers if not process.killed]
                if len(lived) > 1:
                    raise Violation(f"sample {position} of epoch {epoch} was trained by {' and '.join(lived)}")
            if finished_well:
                if not self.steps:
                    raise Violation("the job finished without a step")
                self._check_size()
            return
        report = audit.audit(self.records)
        if report.problems or not all(epoch.exact or not (finished_well or epoch.finished) for epoch in report.epochs):
            raise Violation("the ledger is not exact:\n" + audit.to_text(report))
        if finished_well:
            if not members or not self.steps:
                raise Violation("the job finished without a step")
            if not all(epoch.finished and epoch.exact for epoch in report.epochs):
                raise Violation("the job finished in the middle of an epoch:\n" + audit.to_text(report))
            self._check_size()

    def _check_size(self):
        """Whatever was asked for has come true, as there was time."""
        chosen, newest = self.broker.current(), self.broker._versions.newest
        if newest.version != chosen.version:
            raise Violation(f"version {newest.version} was never chosen, {chosen.version} was the last")
        setup, kinds = self.setup, {h.kind for h in self.happenings}
        deaths = {"kill member", "kill newcomer", "kill lone", "stop", "freeze"}
        if setup.schedule or not kinds <= deaths | {"pause", "slow", "resize", "no descriptors"}:
            return
        if self.refused:
            return  # one that could not come true has hidden those before it
        expected = max(self.wished, key=lambda wish: wish.version).size if self.wished else setup.size
        if setup.recover is Recover.SHRINK:
            if self.wished:
                return  # those who died before the last wish are in its size already, or not
            expected -= sum((p.killed or p.fatal is not None) and env.SELF.name in p.environ for p in self.everybody)
        if self.deaths < setup.max_restarts and chosen.size != expected:
            raise Violation(f"{expected} workers are to be there in the end, {chosen.size} are")


class _Told(logging.Handler):
    def __init__(self, world):
        super().__init__()
        self._world = world

    def emit(self, record):
        self._world.say("log", f"[{record.name.rpartition('.')[2]}] {record.getMessage()}")


class Machine(machine.Machine):
    """What a job asks the machine for."""

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

    def find_devices(self, host, **wanted):
        return Devices()

    def is_stopped(self, pid):
        return any(
            p.pid == pid and p.alive and p.stopped_at is not None and not p.frozen
            for p in self._world.processes.values()
        )

    def make_broker(self, cores, **options):
        self._world.broker = Broker(self._world, cores, **options)
        return self._world.broker

    def serve_broker(self, broker, secret):
        return BrokerServer()

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

    def _happened(self, event):
        before = self._verdict.done()
        verdict = super()._happened(event)
        if not before and self._verdict.done():
            self._world.verdict = self._verdict.result()
            self._world.survivors_at_verdict = sum(
                process.member.received and not process.terminated for process in self._world.members()
            )
        return verdict


class Broker(broker.Broker):
    """The real one; a request is a thread of the launcher."""

    def __init__(self, world, *args, **options):
        self._world = world
        self._chosen_before = None
        super().__init__(
            *args,
            make_segment=lambda size, version, cores, recovers: Segment(world, size, version, recovers),
            condition=lambda: Condition(world),
            is_alive=lambda pid: any(p.pid == pid and p.alive for p in world.processes.values()),
            **options,
        )

    def _after_choice(self):
        """Who is let in anew is not known to be dead: its place would count as filled, and a step miss its samples."""
        before, self._chosen_before = self._chosen_before, self._versions.current
        if before is not None:
            there = {p.peer for p in self._world.job._agent.processes if not p.given_up}
            for peer in self._chosen_before.workers:
                if peer not in before.workers and peer not in there:
                    raise Violation(
                        f"version {self._chosen_before.version} is chosen with {peer}, a newcomer that died"
                    )
        super()._after_choice()

    def refuse(self, version, reason):
        # Told in the launcher's log: an external config server takes wishes that can't come true.
        self._world.refused.add(version)
        super().refuse(version, reason)


class BrokerServer:
    """The broker's socket: nobody connects."""

    address = "broker"

    def connections(self):
        return 0

    def close(self):
        pass


class Connection:
    """A connection to the broker, at the broker's end, for one request."""

    def __init__(self, world, process, request):
        self._process, self._request = process, request
        self.news = Condition(world)
        self.sent = self.fd = None
        self.ended = False

    def receive(self):
        return self._request

    def is_closed(self):
        return not self._process.alive

    def extend(self, timeout):
        pass

    def send(self, message, fds=()):
        self.sent, self.fd = message, fds[0] if fds else None
        if fds and self._process.alive and self._process.member.received:
            self._process.world.holders.setdefault(message["cluster"]["Version"], []).append(self._process)

    def close(self):
        self.ended = True
        self.news.notify_all()


class BrokerClient(broker_protocol.BrokerClient):
    """A worker's end: the real one, whose messages take a while."""

    def __init__(self, world):
        self._world = world

    def close(self):
        pass

    def request_leave(self, peer, timeout, terminated=False):
        answer = self._ask({"leave": str(peer), "terminated": terminated}, str(peer), "leaving", timeout)
        if isinstance(answer, str):
            raise ResizeError(answer)

    def _ask(self, request, who, about, timeout):
        world, process = self._world, self._world.current.process
        connection = Connection(world, process, request)
        world.place("asks", takes_time=True)

        def serve():
            try:
                world.broker.serve(connection, process.pid)
            finally:
                connection.close()

        world.launcher.start("broker", serve, world.short(world.current.random))
        deadline = None if timeout is None else world.loop.now + timeout
        while not connection.ended:
            connection.news.wait(None if deadline is None else deadline - world.loop.now)
            if deadline is not None and world.loop.now >= deadline:
                raise CollectiveTimeoutError("no answer from the launcher")
        world.place("is answered")
        answer = connection.sent
        if answer is None:
            raise PeerLostError("the launcher is gone")
        if "cluster" in answer:
            cluster = broker_protocol.Cluster.from_json(answer["cluster"])
            peer = broker_protocol.PeerID.parse(answer["peer"])
            process.granted = (peer, answer["incarnation"])
            return broker_protocol.Granted(cluster, answer["rank"], connection.fd, peer, answer["incarnation"])
        if "stay" in answer:
            return broker_protocol.Stay()
        return broker_protocol.Detached() if "error" not in answer else answer["error"]


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
        who = environ.get("KUNGFU_SELF", f"standby {environ.get('KUNGFU_STANDBY')}").rpartition(":")[2]
        process = Process(self._world, f"process {key} ({who})", environ)
        process.key, process.pid = key, next(self._pids)
        self._world.processes[key] = process
        self._world.everybody.append(process)
        self.events.append(Started(key, process.pid))
        self._world.loop.at(self._world.short(self._world.random), self.tell)
        process.start("main", lambda: self._world.run_worker(process), self._world.short(self._world.random) * 3)

    def signal(self, number, key=None):
        for process in list(self._world.processes.values()):
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
        return None

    def attach(self, name, colour, held=False):
        return os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)

    def release(self, name):
        pass

    def close(self, timeout_s, last_words=None):
        pass


# ---- the config server -----------------------------------------------------------------------------------------------


class Server:
    """The real store, in the launcher or in a process of its own that may go away."""

    def __init__(self, world):
        self._world = world
        self.store = None
        self.away = 0
        self.changed = Condition(world)
        self._on_change = None
        self.url = "http://server/config"

    def embed(self, store, on_change):
        self.store, self._on_change = store, on_change
        return self

    async def start(self):
        pass

    async def stop(self):
        self.away += 1

    @property
    def version(self):
        return self.store.version

    def put(self, document, writer=""):
        cluster = self.store.put(document, writer)
        self.changed.notify_all()
        if self._on_change is not None:
            self._on_change(cluster)
        return cluster

    def go_away(self, forgets):
        self.away += 1
        if forgets:
            self.store = ConfigStore()
        self.changed.notify_all()

    def come_back(self):
        self.away -= 1


class Store:
    """A `ClusterStore`: a request takes time on its way there and back, and the answer may be lost."""

    def __init__(self, world, writer=""):
        self._world, self._writer = world, writer
        self.url = "http://server/config"

    def _request(self, act):
        world, server = self._world, self._world.server
        world.place("asks the config server", takes_time=True)
        self._reach()
        try:
            result = act(server)
        except StaleVersionError as error:
            result = error
        except ValueError as error:
            result = ConfigServerError(str(error))
        world.place("is answered by the config server")
        self._reach()
        if isinstance(result, Exception):
            raise result
        return result

    def _reach(self):
        if self._world.server.away:
            raise StoreUnreachableError("config server http://server/config: Connection refused")

    def get(self):
        return self._request(lambda server: server.store.cluster)

    def put(self, cluster):
        return self._request(lambda server: server.put(cluster.to_json(), self._writer))

    def delete(self):
        self._request(lambda server: server.store.clear())

    def watch(self, version, timeout_s):
        world, server = self._world, self._world.server
        deadline = world.loop.now + timeout_s
        world.place("polls", takes_time=True)
        while True:
            self._reach()
            found = server.store.cluster
            if found is not None and found.version > version:
                world.place("is answered by the config server")
                self._reach()
                return found
            if world.loop.now >= deadline:
                return None
            server.changed.wait(deadline - world.loop.now)
