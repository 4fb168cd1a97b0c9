"""One job and one course of events: makes the parts, runs them on one clock, and looks whether promises are kept."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random

from greenlet import GreenletExit, getcurrent

from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.errors import PeerLostError
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hosts import Hosts
from tests.fault.simulator.clock import Clock
from tests.fault.simulator.cluster_store import Server
from tests.fault.simulator.collectives import Segment
from tests.fault.simulator.events import Events
from tests.fault.simulator.host import Host
from tests.fault.simulator.network import Network
from tests.fault.simulator.processes import Process
from tests.fault.simulator.promises import Promises
from tests.fault.simulator.setting import (
    COLLECTIVE_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    LOOP_TIMEOUT_S,
    MAX_WORKERS,
    PEER_TIMEOUT_S,
    PORTS,
    UNANSWERED_KILL_S,
    Outcome,
    Violation,
)
from tests.fault.simulator.sharded_training import ShardedProgram
from tests.fault.simulator.training import AsynchronousProgram, Program
from tests.fault.simulator.transports import HostsCore


class _Told(logging.Handler):
    def __init__(self, world):
        super().__init__()
        self._world = world

    def emit(self, record):
        self._world.say("log", f"[{record.name.rpartition('.')[2]}] {record.getMessage()}")


class World(Events, Promises):
    """One job on one host, one course of events. `run` once."""

    checks_reaped = True

    def __init__(self, seed, setup, happenings, told=None, before=None):
        """`before`: a world that is over, on whose disk there are checkpoints and ledgers."""
        Promises.__init__(self, setup, before)
        self.seed, self.setup, self.happenings = seed, setup, happenings
        self.random = random.Random(f"{seed} world")
        self.told = told
        self.loop = Clock()
        self.hub = getcurrent()
        self.network_random = random.Random(f"{seed} network")
        self.network = Network(self)
        self.hosts = []  # each that there ever was
        self.job = self.head = None  # the controller, and its host
        self.pids = itertools.count(100)
        self.received_things = {}  # what workers have got from their launchers
        self._received = itertools.count(1_000_000)
        self.all_threads = []
        self.current = None
        self.segments = {}
        self.wanted_at = {}  # version -> when the launcher heard of it
        self.processes = {}  # key -> Process, those that run
        self.everybody = []
        self.event_lines = []  # of the event log, by all controllers
        self.deaths = 0
        self.traps = []  # "kill at" and "stop at"
        self.trapped = set()
        last = max((h.at + self._lasts(h) for h in happenings), default=0.0)
        self.hangs = any(h.kind in ("stop", "freeze", "stop at") for h in happenings)
        loops = any(h.kind == "loop" for h in happenings)
        self.collective_timeout_s = LOOP_TIMEOUT_S if loops else COLLECTIVE_TIMEOUT_S
        self.calm_from = last + (2.5 * PEER_TIMEOUT_S if self.hangs else 0.5)
        self.slow_from = self.calm_from + 1.0
        if any(h.kind == "freeze" for h in happenings):
            self.calm_from += JOIN_TIMEOUT_S + UNANSWERED_KILL_S
        if loops:
            self.calm_from += 1.5 * self.collective_timeout_s
        self.quiet_from = self.calm_from + 4.0 + (2 * setup.prepare_s)
        self.outside = Process(self, "outside", {"KUNGFU_JOB_SECRET": "00"})
        self.server = Server(self)
        self.broker = None
        self.verdict = None
        self.job_ending = False
        self.closing = False
        self.survivors_at_verdict = 0  # members that have the training state
        self.no_descriptors_until = 0.0

    def _lasts(self, happening):
        """How long it may be until it has happened."""
        return (1 + happening.more) * (0.3 + 2 * self.setup.step_s) if happening.place else happening.more

    # -- running --

    def resume(self, thread, turn):
        process = thread.process
        if thread.turns != turn or thread.finished or not process.alive:
            return
        segment = process.core.segment
        is_in_a_wait = segment is not None and process.core.own_rank in segment.sleeping
        if process.stopped_at is not None or (process.loops and not is_in_a_wait):
            process.held.append((thread, turn))
            return
        thread.turns += 1
        self.current = thread
        thread.greenlet.switch()
        self.current = None

    def switch_out(self):
        """The running thread waits until another one resumes it."""
        self.hub.switch()

    def sleep(self, seconds):
        thread = self.current
        self.loop.at(max(seconds, 0.0), self.resume, thread, thread.turns)
        self.switch_out()

    def place(self, name, takes_time=False):
        """Somewhere a process may be for a moment, and die. Passed at once when nothing happens any more, but for what
        `takes_time`, lest a loop stand still in time."""
        if self.traps and self.loop.now < self.calm_from and self.falls_into_a_trap(self.current.process, name):
            self.switch_out()
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

    def new_segment(self, segment):
        self.segments[len(self.segments) + 1] = segment
        return len(self.segments)

    def make_core(self, process):
        return HostsCore(self, process)

    def is_alive(self, pid):
        return any(p.pid == pid and p.alive for p in self.processes.values())

    def agent_of(self, process):
        """What answers a worker: its host, and what passes on to the broker there."""
        host = process.host
        if host.server is None or host.is_over:
            raise PeerLostError("the launcher has ended")
        return host, host.server.broker

    def received(self, fds, process):
        """Descriptors, as `process` has them."""
        keys = []
        for fd in fds:
            thing = process.host.descriptors[fd]
            keys.append(thing.fd if isinstance(thing, Segment) else next(self._received))
            self.received_things[keys[-1]] = thing
        return tuple(keys)

    def reaches_server(self, process):
        return not self.server.away

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
        if self.setup.external:
            self.server.store = ConfigStore()
        self._start_host(0)
        self._happens_in_time()
        # An epoch of single shards goes on for long where the one worker that has them is slow.
        self._run_until(self.quiet_from + 300.0)
        outcome = self.head.outcome
        if self.verdict is None:
            raise Violation(f"the job hasn't begun: {outcome.words}")
        self._check_end(outcome.code)
        return Outcome(outcome.code, self.verdict.reason, len(self.steps), self.deaths, self.loop.now, self.told or [])

    def _happens_in_time(self):
        for happening in self.happenings:
            if not happening.term:
                self.loop.at(happening.at, self._happen, happening)

    def _run_until(self, until):
        try:
            if not self.loop.run(until, self._is_over):
                where = [f"{t.process.name} {t.name}" for t in self.all_threads if not t.finished and t.process.alive]
                there = ", ".join(host.name for host in self.present)
                raise Violation(f"nothing goes on at {self.loop.now:.1f} s on {there}; there wait {', '.join(where)}")
        finally:
            self._finish_all()

    def _is_over(self):
        return all(host.is_over for host in self.hosts)

    def _finish_all(self):
        """Whatever hasn't ended by itself, so that nothing is left of it here."""
        self.closing = True
        for process in self.everybody:
            process.alive = False
        for host in self.hosts:
            host.finish()
        with contextlib.suppress(Exception):
            self.loop.run(self.loop.now + 30.0, lambda: all(host.task.done() for host in self.hosts))
        for host in self.hosts:
            host.close_coroutines()
        for host in self.hosts:
            host.close_descriptors()

    # -- hosts --

    def _start_host(self, number, joins=False):
        host = Host(self, number, self._options_of(number, joins))
        self.hosts.append(host)
        if number == 0 and not joins:
            self.head = host
        host.start()

    def _options_of(self, number, joins):
        return self._options()

    @property
    def present(self):
        return [host for host in self.hosts if not host.is_over]

    def job_is_settled(self, verdict):
        self.verdict = verdict
        self.survivors_at_verdict = sum(
            process.member.received and not process.terminated for process in self.members()
        )

    def host_is_lost(self, name, reason):
        raise Violation(f"{name} is the only host, and is declared lost: {reason}")

    def end_is_heard(self, name):
        """By a host."""

    def _options(self):
        setup = self.setup
        return Options(
            command=("program",), size=setup.size, hosts=Hosts(most=MAX_WORKERS),
            ports=PORTS, control_port=38080, watch=True, quiet=True,
            show_workers=False, logdir=None, logfile=None,
            config_server="http://server/config" if setup.external else None,
            builtin_port=None if setup.external else 0, timeout_s=None, delay_s=0.0, init_version=None,
            affinity=False, allow_nvlink=False, leave_grace_s=3.0, grace_period_s=3.0,
            recover=setup.recover, min_size=setup.min_size, max_restarts=setup.max_restarts,
            cores_per_worker=None if setup.shards is None else 1,
            standbys=setup.standbys, peer_timeout_s=PEER_TIMEOUT_S if self.hangs else None,
        )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self):
        log = logging.getLogger("ms_kungfu")
        level, propagate, handlers = log.level, log.propagate, list(log.handlers)
        log.handlers, log.propagate = [logging.NullHandler()], False
        if self.told is not None:
            log.handlers = [_Told(self)]
        log.setLevel(logging.INFO if self.told is not None else logging.CRITICAL)
        try:
            yield
        finally:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)

    # -- what the guard does --

    def guard_tells(self, process, code, error=""):
        if self.processes.pop(process.key, None) is not None:
            process.host.guard.has_ended(process, code, error)

    def run_worker(self, process):
        code = 0
        try:
            program = AsynchronousProgram if self.setup.asynchronous else Program
            (program if self.setup.shards is None else ShardedProgram)(self, process).main()
            if process.member.detached:
                self.sleep(self.setup.leavers_stay_s)
        except Violation as error:
            self.trouble.append(error)
            raise
        except Exception as error:
            code = 1
            self.say("do", f"{process.name} fails: {type(error).__name__}: {error}")
            if not self.job.is_over and not self._is_excused(process, error):
                self.trouble.append((process, error))
        process.alive = False
        process.hang_up()
        self.loop.at(self.short(self.current.random), self.guard_tells, process, code)
