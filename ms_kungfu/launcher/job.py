"""One job from its first worker to its last process: joins guard, broker, config server, output and policy together.

Everything here runs on one asyncio loop in the launcher's main thread. The broker's and the follower's threads hand
their news over with call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import os
import resource
import secrets
import signal
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast
from urllib.parse import urlsplit

from ms_kungfu import env
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, StaleVersionError, StoreUnreachableError, open_store
from ms_kungfu.config_server.secret_file import SecretFile, SecretFileError, secret_from, write_secret
from ms_kungfu.devices.rank_table import RankTableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher import affinity, devices
from ms_kungfu.launcher.broker import Broker
from ms_kungfu.launcher.broker_server import BrokerServer
from ms_kungfu.launcher.follow import Follower
from ms_kungfu.launcher.guard import Exited, Guard
from ms_kungfu.launcher.hangs import HangWatch, is_stopped
from ms_kungfu.launcher.hosts import MANY_PER_CORE, HostError
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.output import Output
from ms_kungfu.launcher.policy import (
    Decision,
    Event,
    Failure,
    GuardLost,
    Interrupted,
    JobState,
    Recover,
    Standing,
    TimedOut,
    Verdict,
    WorkerExited,
    WorkerLeaves,
    WorkerWorksOn,
    decide,
    exit_code_of,
    fails_by_itself,
    how_it_ended,
    peers_to_start,
    revised,
)

if TYPE_CHECKING:
    from ms_kungfu.config_server.server import ConfigServer

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Everything has to be gone within 2 s of a death or a signal: what is left of them is for SIGKILL and for reaping.
_GRACE_S = 1.0
_OUTPUT_GRACE_S = 1.0
_CONFIG_SERVER_START_S = 10.0
_RESTART_WINDOW_S = 300.0
_STANDBY_DELAY_S = 2.0  # whoever has just joined is busy, and a new process would be in its way
_RETRY_S = 0.2
# Before another process is tried in the place of one that couldn't even be started: doubled each time.
_START_PAUSE_S = 0.1
_MAX_START_PAUSE_S = 5.0
_SPARE_DESCRIPTORS = 8  # for requests to the config server, the memory of versions, logs
_CANT_RUN = 126  # as a shell has it
_OUT_GRACE_S = 10.0  # for whoever can't go on, to end by itself
_UNANSWERED_KILL_S = 10.0  # whoever doesn't run for so long, not even to die, is gone without
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)


class StartError(Exception):
    """The job can't start; the message is a sentence for the user."""


@dataclass
class Process:
    """A worker process that has not been seen to exit yet."""

    key: int
    log_name: str
    peer: PeerID | None = None  # None: a standby that has not been needed yet
    incarnation: int = 0
    rank: int = 0  # in the last version that it was in, at first in the one that it was started for
    place: int = -1  # what its replacement inherits
    standby: int | None = None
    pid: int | None = None
    join_timer: asyncio.TimerHandle | None = None
    leave_timer: asyncio.TimerHandle | None = None
    killed_because: str = ""
    is_out: bool = False  # it has said that it can't go on
    reminded: bool = False  # it got a SIGTERM, was granted to leave, and can't: another one has been sent
    given_up: bool = False  # it did not even answer SIGKILL
    works_on: bool = False  # it has left, and its grace is over
    dismissed: bool = False  # ended by the launcher, which has said why
    device: int = 0  # its place in Devices, for life

    @property
    def is_not_waited_for(self) -> bool:
        """Whether the job's end doesn't wait for it."""
        return self.given_up or self.works_on or self.dismissed

    @property
    def who(self) -> str:
        if self.peer is None:
            return f"standby {self.standby}" + ("" if self.pid is None else f" (pid {self.pid})")
        pid = "" if self.pid is None else f", pid {self.pid}"
        return f"worker {self.rank} ({self.peer}{pid})"


class Job:
    """Runs a job once. The guard and the output are the caller's until `run`, which closes both."""

    def __init__(self, options: Options, guard: Guard, output: Output) -> None:
        self._options = options
        self._guard = guard
        self._output = output
        self._keys = itertools.count()
        self._processes: dict[int, Process] = {}
        self._cores = affinity.allowed_cores()
        self._devices = devices.Devices()
        self._newest: Cluster | None = None
        self._last_version = -1  # the newest that anybody has written, also if this host can't run it
        self._finishing = False  # a member has finished its program
        self._resting = False  # everybody has, and the job waits for the next cluster (-k)
        self._url: str | None = None
        self._secret = ""
        self._verdict: asyncio.Future[Verdict]
        self._hurry: asyncio.Event
        self._emptied: asyncio.Event
        self._broker: Broker
        self._broker_server: BrokerServer
        self._follower: Follower | None = None
        self._server: ConfigServer | None = None
        self._first_failure: Failure | None = None  # of those that the job has survived
        self._program_failure: Failure | None = None  # the first of those in which a program failed by itself
        self._first_to_finish = ""  # the member that came to its program's end before all others
        self._leaving: set[PeerID] = set()
        self._places = itertools.count()
        self._vacant: list[int] = []  # places that a new worker is to take
        self._pausing: list[int] = []  # places that are vacant after a pause, for all of them the same
        self._pause: asyncio.TimerHandle | None = None
        self._filled: dict[int, list[float]] = {}  # place -> when it was filled anew
        self._standby_numbers = itertools.count(1)
        self._standbys_wanted = options.standbys
        self._writer = secrets.token_hex(8)  # tells this launcher's writes from others', also where an answer is lost
        self._join_timeout_s = 0.0
        self._revising: asyncio.Future[None] | None = None
        self._trouble = ""  # the last with a version's shared memory
        self._retry: asyncio.TimerHandle | None = None  # of what it has kept from being announced
        self._closers = contextlib.AsyncExitStack()

    async def run(self) -> int:
        """The job's exit code. StartError where it never started. Nothing of the job is left when it returns."""
        loop = asyncio.get_running_loop()
        self._verdict = loop.create_future()
        self._hurry = asyncio.Event()
        self._emptied = asyncio.Event()
        self._catch_signals(loop)
        loop.set_exception_handler(self._on_bug)
        verdict: Verdict | None = None
        try:
            start = asyncio.ensure_future(self._start())
            start.add_done_callback(self._on_started)
            try:
                verdict = await self._verdict
            finally:
                start.cancel()
                await asyncio.wait([start])
            return verdict.exit_code
        finally:
            await self._end(verdict)

    # ---- start ----

    def _on_started(self, start: asyncio.Future[None]) -> None:
        if not start.cancelled() and not self._verdict.done():
            error = start.exception()
            if error is not None:
                self._verdict.set_exception(error)

    async def _start(self) -> None:
        options = self._options
        self._devices = self._find_devices()
        if options.delay_s:
            _log.info("starting in %g s (-delay)", options.delay_s)
            await asyncio.sleep(options.delay_s)
        try:
            self._join_timeout_s = env.JOIN_TIMEOUT.get()
        except ValueError as error:
            raise StartError(str(error)) from None
        self._secret = secrets.token_hex(32)
        if options.builtin_port is not None:
            first = await self._embed_config_server(max(options.init_version or 0, 0))
        elif options.config_server is not None:
            first = await self._use_config_server(options.config_server)
        else:
            self._secret = self._given_secret() or self._secret
            first = self._first_cluster(max(options.init_version or 0, 0))
        loop = asyncio.get_running_loop()
        self._broker = Broker(
            len(self._cores),
            recovers=options.recover is not Recover.FAIL,
            on_unknown_version=self._on_unknown_version,
            on_chosen=lambda *chosen: self._from_thread(loop, self._on_chosen, chosen),
            on_ready=lambda who: self._from_thread(loop, self._on_ready, who),
            on_trouble=lambda trouble: self._from_thread(loop, self._on_trouble, trouble),
            min_size=options.min_size,
            on_leave=(lambda peer: self._from_thread(loop, self._on_leave, peer)) if options.watch else None,
        )
        self._closers.callback(self._broker.close)
        self._broker_server = BrokerServer(self._broker, bytes.fromhex(self._secret))
        self._closers.callback(self._broker_server.close)
        self._newest, self._last_version = first, first.version
        self._broker.admit(first)
        try:
            self._broker.choose(first.version)
        except Exception as error:  # whatever the runtime or the kernel has against it
            raise StartError(f"the shared memory of {first.size} workers can't be made: {error}") from error
        loop.add_reader(self._guard.fileno(), self._on_guard)
        if options.timeout_s is not None:
            loop.call_later(options.timeout_s, self._happened, TimedOut(options.timeout_s))
        self._start_missing(first)
        self._keep_standbys()
        self._look_for_hangs(HangWatch(options.peer_timeout_s or math.inf))
        if options.watch and options.builtin_port is None and options.config_server is not None:
            self._follower = Follower(
                open_store(options.config_server, self._secret),
                self._newest_known,
                lambda cluster: self._from_thread(loop, self._on_cluster, cluster),
            )
            self._closers.callback(self._follower.stop)

    def _find_devices(self) -> devices.Devices:
        options = self._options
        try:
            found = devices.find(
                os.environ,
                os.listdir("/dev"),
                host=options.host.name,
                single=options.size == 1 and not options.watch,
                allow_nvlink=options.allow_nvlink,
            )
        except (devices.DeviceListError, RankTableError) as error:
            raise StartError(str(error)) from None
        if options.allow_nvlink and found.kind is not devices.GPU:
            _log.warning("-allow-nvlink changes nothing: the job has no GPUs")
        return found

    def _given_secret(self) -> str | None:
        try:
            return env.JOB_SECRET.get()
        except ValueError as error:
            raise StartError(str(error)) from None

    def _first_cluster(self, version: int) -> Cluster:
        options = self._options
        return options.host.first_cluster(options.size, options.ports, options.runner_port, version)

    async def _embed_config_server(self, version: int) -> Cluster:
        # aiohttp takes 0.2 s to import, which jobs without a config server need not pay for.
        from ms_kungfu.config_server.server import ConfigServer
        from ms_kungfu.config_server.store import ConfigStore

        options = self._options
        self._secret = self._given_secret() or self._secret
        first = self._first_cluster(version)
        parts = urlsplit(options.config_server or "http://127.0.0.1/config")
        path = parts.path if parts.path not in ("", "/") else "/config"
        host = "127.0.0.1" if parts.hostname in (None, "localhost") else str(parts.hostname)
        port = options.builtin_port or 0
        server = ConfigServer(
            ConfigStore(first, self._check), self._secret, host=host, port=port, path=path, on_change=self._on_change
        )
        try:
            await server.start()
        except OSError as error:
            taken = "is taken" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror}"
            raise StartError(
                f"port {port} (-builtin-config-port) on {host} {taken}; give another port, or 0 for any free one"
            ) from None
        self._closers.push_async_callback(server.stop)
        self._url, self._server = server.url, server
        self._leave_secret(server.url)
        _log.info("config server: %s", server.url)
        return first

    def _leave_secret(self, url: str) -> None:
        try:
            file: SecretFile = write_secret(url, self._secret)
        except SecretFileError as error:
            _log.warning("%s; kungfu-run resize needs KUNGFU_JOB_SECRET then", error)
            return
        self._guard.remove_at_end(file.path, file.inode)  # where this process is killed
        self._closers.callback(file.remove)  # where the guard is

    def _on_unknown_version(self, version: int) -> None:
        """Called by a thread of the broker."""
        if self._follower is not None:
            self._follower.look_now()

    def _check(self, cluster: Cluster) -> None:
        options = self._options
        # Who lists only workers that have just died did not know it: `revised` sees to it that the state is kept.
        members = [*self._living_members(), *self._broker.ended_in(self._newest_known())]
        options.host.check(cluster, members if not self._resting else ())
        if cluster.size < options.min_size and cluster.writer != self._writer:
            raise HostError(f"a cluster of {cluster.size} is below -min-np {options.min_size}")

    def _living_members(self) -> list[PeerID]:
        """The members of the chosen cluster whose processes run, in the order of their ranks."""
        current = self._broker.current()
        members = {p.peer for p in self._processes.values() if self._standing(p) is Standing.MEMBER}
        return [peer for peer in current.workers if peer in members] if current is not None else []

    async def _use_config_server(self, url: str) -> Cluster:
        secret = self._given_secret() or secret_from({}, url)
        if secret is None:
            raise StartError(
                f"no secret for {url} was left by a config server of this user on this machine; start one first "
                "(kungfu-config-server), have the job embed it (-builtin-config-port), or set KUNGFU_JOB_SECRET to "
                "that of one elsewhere"
            )
        try:
            bytes.fromhex(secret)
        except ValueError:
            raise StartError(f"the secret of {url} is not in hexadecimal digits") from None
        self._secret, self._url = secret, url
        store = open_store(url, secret)
        deadline = asyncio.get_running_loop().time() + _CONFIG_SERVER_START_S
        told = False
        while True:
            try:
                first = await _in_thread(lambda: self._first_from(store))
                if first is not None:
                    return first
                if not told:
                    told = True
                    _log.info("waiting for %s to hold a cluster (-init-version -1)", url)
            except StoreUnreachableError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise StartError(f"{error}; is it running? -builtin-config-port runs one with the job") from None
            except StaleVersionError:
                continue
            except (ConfigServerError, HostError) as error:
                raise StartError(str(error)) from None
            await asyncio.sleep(0.2)

    def _first_from(self, store: ClusterStore) -> Cluster | None:
        """The first cluster, which the config server holds when this returns; None: it has to be waited for."""
        held = store.get()
        wanted = self._options.init_version
        if wanted == -1:
            if held is not None:
                self._options.host.check(held, ())
            return held
        # One that was forgotten by DELETE still counts; the server says so with 409.
        version = held.version + 1 if held is not None else 0
        if wanted is not None:
            if held is not None and wanted < version:
                raise HostError(
                    f"-init-version {wanted}: {store.url} is at version {held.version} already; leave the flag out"
                )
            if held is not None and wanted > version:
                store.delete()
            version = wanted
        return store.put(self._first_cluster(version))

    # ---- what happens ----

    @staticmethod
    def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(function, argument)

    def _catch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in _ENDING_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            loop.add_signal_handler(number, self._on_signal, number)
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._guard.signal, number)

    def _on_signal(self, number: int) -> None:
        if self._verdict.done():
            self._hurry.set()  # a second Ctrl-C doesn't wait for the workers
        self._happened(Interrupted(number))

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in one of the callbacks below: a job that is not looked after must not go on."""
        error = context.get("exception")
        _log.error("internal error: %s", context["message"], exc_info=error)
        if not self._verdict.done():
            self._verdict.set_result(Verdict(Decision.FAIL, f"internal error: {error or context['message']}", 1))

    def _happened(self, event: Event) -> Verdict | None:
        """The verdict, whose consequences for the job as a whole are drawn; None once the job is over."""
        if self._verdict.done():
            return None
        options = self._options
        waited_for = [p for p in self._processes.values() if not p.is_not_waited_for]
        # First: a choice meanwhile makes members leaving, and forgets that they were told to.
        told = self._broker.told_to_end() if waited_for else ()
        standings = [self._standing(p) for p in waited_for]
        state = JobState(
            members=standings.count(Standing.MEMBER),
            leaving=standings.count(Standing.LEAVING),
            terminated=sum(p.peer in told and s is Standing.MEMBER for p, s in zip(waited_for, standings)),
            keep=options.keep,
            recover=options.recover,
            min_size=options.min_size,
            max_restarts=options.max_restarts,
            first_failure=self._first_failure,
            program_failure=self._program_failure,
            finished=self._finishing,
            first_to_finish=self._first_to_finish,
        )
        verdict = decide(event, state)
        if verdict.decision in (Decision.FINISH, Decision.FAIL):
            self._verdict.set_result(verdict)
            _log.info("%s%s", verdict.reason, "; ending the job" if verdict.decision is Decision.FAIL else "")
            return verdict
        if verdict.reason:
            _log.warning("%s", verdict.reason)
        if verdict.decision is Decision.REST:
            self._resting = True
        return verdict

    def _standing(self, process: Process) -> Standing:
        if process.peer is None:
            return Standing.STANDBY
        if self._broker.is_out(process.peer, process.incarnation):
            return Standing.LEAVING
        current = self._broker.current()
        member = current is not None and process.peer in current.workers and process.incarnation <= current.version
        return Standing.MEMBER if member else Standing.JOINING

    def _on_guard(self) -> None:
        event = self._guard.next_event()
        if event is None:
            asyncio.get_running_loop().remove_reader(self._guard.fileno())
            self._processes.clear()
            self._emptied.set()
            self._happened(GuardLost())
        elif isinstance(event, Exited):
            self._on_exit(self._processes[event.key], event)
        elif event.key in self._processes:
            self._processes[event.key].pid = event.pid
            _log.info("%s started", self._processes[event.key].who)

    def _on_exit(self, process: Process, event: Exited) -> None:
        standing = self._standing(process)
        del self._processes[process.key]
        if not self._processes:
            self._emptied.set()
        for timer in (process.join_timer, process.leave_timer):
            if timer is not None:
                timer.cancel()
        if process.given_up:
            _log.info("%s is gone at last", process.who)
            if process.peer is not None:
                self._broker.mark_reaped(process.peer, process.incarnation)
            self._revise()  # its port is free
            return
        self._has_ended(process, standing, event.code, process.killed_because or event.error)

    def _has_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        listed = standing in (Standing.MEMBER, Standing.JOINING) and process.peer in self._newest_known().workers
        if process.peer is not None:
            reason = self._broker.gave_up(process.peer, process.incarnation) if code == 0 and not error else ""
            if reason and self._options.recover is not Recover.FAIL:
                # It hasn't finished, whatever it says: the others wait in what it was interrupted in.
                code, error = 1, f"could not go on ({reason}) and {how_it_ended(code)}"
            # First of all, because the survivors wait for it. One that has finished is missed rather than gone without.
            finished = standing is Standing.MEMBER and code == 0
            self._broker.mark_lost(
                process.peer,
                error or how_it_ended(code),
                process.incarnation,
                recover=not finished,
                reaped=not process.given_up,
            )
            self._finishing = self._finishing or finished
        if process.dismissed:
            code = 0  # the launcher's own doing, and told already
        elif not self._verdict.done() and code == 0 and process.peer is not None:
            _log.info("%s %s", process.who, how_it_ended(code))
        if standing is Standing.MEMBER and code == 0:
            self._first_to_finish = self._first_to_finish or process.who
        logs = self._output.log_paths(process.log_name)
        where = ", ".join(map(str, logs)) if logs is not None else ""
        who = process.who
        verdict = self._happened(
            WorkerExited(who, standing, code, error, logs=where, restarts=self._restarts_of(process.place))
        )
        if code != 0 and where and self._verdict.done():
            _log.info("what %s wrote: %s", who, where)
        if verdict is not None and not self._verdict.done():
            if code != 0 and standing in (Standing.MEMBER, Standing.JOINING):
                failure = Failure(f"{who} {error or how_it_ended(code)}", exit_code_of(code))
                self._first_failure = self._first_failure or failure
                # Who could not be started, or was killed, has an `error`: no program failed there.
                if not error and fails_by_itself(code) and self._program_failure is None:
                    named = f", see {where}" if where else ""
                    self._program_failure = Failure(f"{failure.reason}{named}", failure.exit_code)
                    _log.warning("the program of %s failed; the job will end with %d", who, failure.exit_code)
            self._go_on(process, standing, verdict, listed)

    def _go_on(self, process: Process, standing: Standing, verdict: Verdict, listed: bool) -> None:
        """The job goes on; `listed`: the newest cluster counts on the process that has ended."""
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        if process.pid is None:  # it couldn't be started, and most likely the next one can't either, at once
            pause_s = min(_START_PAUSE_S * 2 ** self._restarts_of(process.place), _MAX_START_PAUSE_S)
        if standing is Standing.STANDBY:
            if verdict.decision is Decision.REPLACE:
                self._count_restart(process.place)
            else:
                self._standbys_wanted -= 1
            loop.call_later(pause_s, self._keep_standbys)
        elif verdict.decision in (Decision.SHRINK, Decision.REPLACE):
            if verdict.decision is Decision.REPLACE and listed:
                if pause_s:
                    self._pausing.append(process.place)
                    self._pause = self._pause or loop.call_later(pause_s, self._on_pause_over)
                else:
                    self._vacant.append(process.place)
            self._revise()

    def _on_pause_over(self) -> None:
        self._end_pause()
        self._revise()

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._vacant += self._pausing
        self._pausing.clear()

    def _restarts_of(self, place: int) -> int:
        now = asyncio.get_running_loop().time()
        recent = [when for when in self._filled.get(place, ()) if now - when < _RESTART_WINDOW_S]
        self._filled[place] = recent
        return len(recent)

    def _count_restart(self, place: int) -> None:
        self._filled.setdefault(place, []).append(asyncio.get_running_loop().time())

    def _look_for_hangs(self, watch: HangWatch) -> None:
        loop = asyncio.get_running_loop()
        if self._verdict.done():
            return
        watched = {key: process for key, process in self._processes.items() if not process.killed_because}
        beats = {
            key: () if process.peer is None else self._broker.heartbeat(process.peer, process.incarnation)
            for key, process in watched.items()
        }
        stopped = [
            key
            for key, process in watched.items()
            if not beats[key] and process.pid is not None and is_stopped(process.pid)
        ]
        for key in watch.hung(loop.time(), beats, stopped):
            self._kill(
                self._processes[key],
                f"stood still for {self._options.peer_timeout_s:g} s (-peer-timeout) and was killed",
            )
        for process in watched.values():
            self._look_whether_it_is_out(process)
        loop.call_later(watch.period_s, self._look_for_hangs, watch)

    def _look_whether_it_is_out(self, process: Process) -> None:
        """A worker that has failed alone in a collective or a join (Ctrl-C, no memory) has no part in anything more,
        whatever its program does: the others wait for its end (docs/recovery.md)."""
        if process.is_out or process.peer is None or process.killed_because:
            return
        reason = self._broker.gave_up(process.peer, process.incarnation)
        if reason:
            process.is_out = True
            _log.warning("%s can't go on: %s; the others wait for its end", process.who, reason)
            asyncio.get_running_loop().call_later(_OUT_GRACE_S, self._end_one_that_is_out, process, reason)

    def _end_one_that_is_out(self, process: Process, reason: str) -> None:
        if process.key in self._processes and not process.killed_because and not self._verdict.done():
            self._kill(process, f"could not go on ({reason}), had not ended after {_OUT_GRACE_S:g} s, and was killed")

    def _kill(self, process: Process, reason: str) -> None:
        """Its end follows as an event like any other, or it is gone without."""
        process.killed_because = reason
        self._guard.signal(signal.SIGKILL, process.key)
        asyncio.get_running_loop().call_later(_UNANSWERED_KILL_S, self._give_up_on, process)

    def _give_up_on(self, process: Process) -> None:
        """SIGKILL has found no answer: the process hangs in the kernel, or its cgroup is frozen. The signal stays with
        it: should it run again it dies before its next instruction. To the others it is dead from now on: it has no way
        to publish any more (docs/recovery.md), and as one who has ended it is not let in anywhere."""
        if process.key not in self._processes or self._verdict.done():
            return
        standing = self._standing(process)
        process.given_up = True
        process.killed_because += f", but hangs in the kernel: SIGKILL has had no effect for {_UNANSWERED_KILL_S:g} s"
        self._has_ended(process, standing, -signal.SIGKILL, process.killed_because)

    # ---- the cluster changes ----

    def _newest_known(self) -> Cluster:
        assert self._newest is not None
        return self._newest

    def _on_change(self, cluster: Cluster | None) -> None:
        """The embedded config server has taken a write."""
        if cluster is not None:
            self._on_cluster(cluster)

    def _on_cluster(self, cluster: Cluster) -> None:
        """A newer cluster is wanted. Its workers start now; the members go over to it when they have agreed to."""
        if self._newest is None or cluster.version <= self._last_version or self._verdict.done():
            return
        if not self._options.watch:
            _log.warning("the config server has a new cluster, which needs -w to be followed")
            return
        self._last_version = cluster.version
        try:
            self._check(cluster)
        except HostError as error:  # a config server of its own does not know this host
            _log.error("cluster version %d is refused: %s", cluster.version, error)
            self._broker.refuse(cluster.version, str(error))
            self._revise()
            return
        _log.info("cluster version %d is wanted: %d workers", cluster.version, cluster.size)
        self._warn_of_crowd(cluster)
        before, self._newest = self._newest, cluster
        if self._resting:
            self._broker.forget_the_ended()
            self._end_pause()
            self._vacant.clear()
            self._first_failure = self._program_failure = None
            self._first_to_finish = ""
        joining = [p for p in self._processes.values() if self._standing(p) is Standing.JOINING]
        self._broker.admit(cluster)
        if self._resting:
            try:
                self._broker.choose(cluster.version)
            except Exception as error:  # whatever the runtime or the kernel has against it
                _log.error("cluster version %d can't be run, write it once more: %s", cluster.version, error)
                return
            self._resting = self._finishing = False
        for process in joining:
            if self._standing(process) is Standing.LEAVING and not process.killed_because:
                _log.info("%s is not needed any more", process.who)
                self._dismiss(process)
        ended = self._broker.ended_in(cluster)
        replacing: list[PeerID] = []
        if cluster.writer != self._writer:
            # Whoever wrote it wants this size: only those that it still lists are to be replaced.
            self._end_pause()
            del self._vacant[: max(0, len(self._vacant) - len(ended))]
        else:
            # A member that was to go, and stays because nobody else has the state, is in the place of one that died.
            living = self._living_members()
            replacing = [peer for peer in cluster.workers if peer not in before.workers and peer not in living]
            del self._vacant[: sum(peer in living and peer not in before.workers for peer in cluster.workers)]
        if ended:
            self._revise()
        self._start_missing(cluster, replacing)

    def _on_chosen(self, chosen: tuple[Cluster, int | None]) -> None:
        """The members have agreed on a version and are going over to it, after a step where they have told of any."""
        cluster, step = chosen
        after = "" if step is None else f", after step {step}"
        _log.info("cluster version %d has been chosen: %d workers%s", cluster.version, cluster.size, after)
        loop = asyncio.get_running_loop()
        for process in self._processes.values():
            standing = self._standing(process)
            if process.leave_timer is None and standing is Standing.LEAVING:
                process.leave_timer = loop.call_later(
                    self._options.leave_grace_s, self._on_grace_over, process, cluster.version
                )
            elif standing is Standing.MEMBER and process.peer in cluster.workers:
                process.rank = cluster.workers.index(process.peer)
        self._leaving &= {p.peer for p in self._processes.values() if self._standing(p) is not Standing.LEAVING}
        # Whoever could not be started, for want of a descriptor perhaps, is tried again.
        self._start_missing(self._newest_known())
        for process, cores in self._shares(cluster):
            if process.pid is not None:
                affinity.pin(process.pid, cores)
        loop.call_later(_STANDBY_DELAY_S, self._keep_standbys)

    def _on_ready(self, who: tuple[PeerID, int] | int) -> None:
        """A newcomer (peer ID and incarnation), or standby number `who`, would join at once."""
        for process in self._processes.values():
            name = process.standby if process.peer is None else (process.peer, process.incarnation)
            if who == name and self._standing(process) in (Standing.JOINING, Standing.STANDBY):
                _log.info("%s is ready", process.who)

    def _on_trouble(self, trouble: str) -> None:
        """The shared memory of a version can't be made. The cluster is as before, until it can."""
        if self._verdict.done():
            return
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s; the workers go on as before, and it is tried again", trouble)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._announce_again)

    def _announce_again(self) -> None:
        self._retry = None
        self._broker.announce()

    def _warn_of_crowd(self, cluster: Cluster) -> None:
        cores = len(self._cores)
        if cluster.size > max(MANY_PER_CORE * cores, self._newest_known().size):
            _log.warning(
                "%d workers are far more than the %d cores of the job: if that was a mistake, a resize to another size "
                "takes it back at once", cluster.size, cores,
            )  # fmt: skip

    def _on_leave(self, peer: PeerID) -> None:
        """A worker has asked that `peer` leave, and was granted it."""
        for process in list(self._processes.values()):
            if process.peer == peer and self._standing(process) in (Standing.MEMBER, Standing.JOINING):
                if peer in self._leaving:  # and was told to end beside
                    self._end_who_is_kept()
                    return
                left = [other for other in self._living_members() if other != peer and other not in self._leaving]
                verdict = self._happened(WorkerLeaves(process.who, len(left)))
                if verdict is None:
                    return
                if verdict.decision is Decision.SHRINK:
                    self._leaving.add(peer)
                    self._revise()
                else:
                    self._end_who_is_kept(peer)
                    self._broker.stays(peer)
                return

    def _end_who_is_kept(self, peer: PeerID | None = None) -> None:
        """Whoever got a SIGTERM and was granted to leave, and can't after all, because of those who have died since,
        ends by it, like one that isn't granted it. All who are left, or `peer`."""
        living = self._living_members()
        kept = {peer} if peer is not None else set(living) if self._leaving.issuperset(living) else set()
        kept &= self._broker.told_to_end()
        for process in self._processes.values():
            if process.peer in kept and not process.reminded and self._standing(process) is Standing.MEMBER:
                process.reminded = True
                _log.warning("%s was told to end, and nobody else is left to go on: it ends now", process.who)
                self._guard.signal(signal.SIGTERM, process.key)

    def _revise(self) -> None:
        """Writes what has to be written to the config server because workers have gone, in the background."""
        if self._revising is None or self._revising.done():
            self._revising = asyncio.ensure_future(self._write_revisions())
            self._revising.add_done_callback(self._on_revised)

    def _on_revised(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            task.result()  # a bug reaches the loop's exception handler

    def _revision(self) -> Cluster | None:
        newest = self._newest_known()
        last_version = self._last_version
        if self._server is not None:
            last_version = max(last_version, self._server.version)
        living = self._living_members()
        gone = {*self._broker.ended_in(newest)}
        if not self._leaving.issuperset(living):  # else whoever wanted to leave is the last by now, and stays
            gone |= self._leaving
        self._end_who_is_kept()
        # Whoever is on its way out has its port until it is gone, or has had its time.
        taken = {p.peer.port for p in self._processes.values() if p.peer is not None and not p.works_on}
        ports = [port for port in self._options.ports.ports() if port not in taken]
        try:
            return revised(newest, last_version, gone, living, len(self._vacant), ports)
        except ValueError as error:
            _log.error("no new worker is started: %s", error)
            self._vacant.clear()
            return None

    async def _write_revisions(self) -> None:
        trouble = ""
        while not self._verdict.done() and not self._finishing and not self._resting:
            revision = self._revision()
            if revision is None:
                return
            try:
                await self._write(revision)
            except HostError as error:
                _log.error("no new worker is started: %s", error)
                self._vacant.clear()
            except ConfigServerError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("%s; the workers go on, and it is told of the change later", error)
                await asyncio.sleep(_RETRY_S)

    async def _write(self, cluster: Cluster) -> None:
        if self._server is not None:
            self._server.put(cluster.to_json(), self._writer)  # calls _on_change
            return
        assert self._url is not None
        store = open_store(self._url, self._secret, writer=self._writer)
        try:
            written = await _in_thread(lambda: store.put(cluster))
        except StaleVersionError:
            found = await _in_thread(store.get)
            if found is None or found.version <= self._last_version:
                raise  # it has come back without what it knew, and the follower is about to tell it
            self._on_cluster(found)
        else:
            self._on_cluster(written)

    def _on_grace_over(self, process: Process, version: int) -> None:
        """A worker that has left has had its time: nobody waits for it any more, and its place may be taken."""
        if process.key not in self._processes or process.dismissed or process.given_up or self._verdict.done():
            return
        process.works_on = True
        self._happened(WorkerWorksOn(process.who, version, self._options.leave_grace_s, self._resting))
        self._clear_places()

    def _clear_places(self) -> None:
        """Ends those who have left and still work, where another one has got their name or device."""
        current = [
            p for p in self._processes.values()
            if p.peer is not None and not self._broker.is_out(p.peer, p.incarnation)
        ]  # fmt: skip
        for process in self._processes.values():
            if process.works_on and not process.dismissed:
                device = self._devices.name_of(process.device)
                if any(p.peer == process.peer or (device is not None and p.device == process.device) for p in current):
                    _log.warning("%s, which has left the cluster, is ended: its place is needed", process.who)
                    self._dismiss(process)

    def _dismiss(self, process: Process) -> None:
        process.dismissed = True
        self._guard.signal(signal.SIGTERM, process.key)
        self._guard.signal(signal.SIGCONT, process.key)
        asyncio.get_running_loop().call_later(_GRACE_S, self._guard.signal, signal.SIGKILL, process.key)

    def _shares(self, cluster: Cluster) -> Iterator[tuple[Process, list[int]]]:
        """The running processes of `cluster`'s workers with their cores."""
        if not self._options.affinity:
            return
        shares = dict(zip(cluster.workers, affinity.divide(self._cores, cluster.size)))
        for process in list(self._processes.values()):
            if process.peer in shares and not self._broker.is_out(process.peer, process.incarnation):
                yield process, shares[process.peer]

    def _choose_device(self, cluster: Cluster) -> int:
        """The device of a process that is about to be started for `cluster`."""
        staying: list[int] = []
        leaving: list[int] = []
        for other in self._processes.values():
            # A standby is about to be in a cluster.
            stays = other.peer is None or (
                other.peer in cluster.workers and not self._broker.is_out(other.peer, other.incarnation)
            )
            (staying if stays else leaving).append(other.device)
        chosen = self._devices.choose(staying, leaving)
        name = self._devices.name_of(chosen)
        if name is not None and chosen in staying:
            _log.warning(
                "%s is shared by %d workers: the job has %d devices for %d workers",
                name, staying.count(chosen) + 1, len(self._devices.slots), cluster.size,
            )  # fmt: skip
        return chosen

    def _start_missing(self, cluster: Cluster, replacing: Collection[PeerID] = ()) -> None:
        """Starts who is new in `cluster`; those in `replacing` take the places of workers that have died."""
        running = self._processes.values()
        present = {p.peer for p in running if p.peer is not None and not self._broker.is_out(p.peer, p.incarnation)}
        shares = affinity.divide(self._cores, cluster.size)
        current = self._broker.current()
        joins_later = current is not None and current.version < cluster.version
        for peer in peers_to_start(cluster, present, self._broker.ended_in(cluster), self._finishing):
            rank = cluster.workers.index(peer)
            if self._vacant and peer in replacing:
                place = self._vacant.pop(0)
                self._count_restart(place)
            else:
                place = next(self._places)
            process = self._ready_standby() if joins_later else None
            if process is not None:
                _log.info("standby %s becomes worker %d (%s, pid %s)", process.standby, rank, peer, process.pid)
            else:
                process = Process(next(self._keys), _log_name(peer), device=self._choose_device(cluster))
            process.peer, process.incarnation, process.rank, process.place = peer, cluster.version, rank, place
            if process.standby is not None:
                self._output.release(process.log_name)
                self._broker.assign(process.standby, peer, cluster.version)
            else:
                self._launch(process, self._environment(process, cluster, joins_later), shares[rank])
            if joins_later:
                process.join_timer = asyncio.get_running_loop().call_later(
                    self._join_timeout_s, self._give_up, process, cluster.version
                )
        self._clear_places()

    def _launch(self, process: Process, environment: dict[str, str | None], cores: list[int]) -> None:
        """The guard tells what came of it."""
        cores = cores if self._options.affinity else []
        if cores and "OMP_NUM_THREADS" not in os.environ:
            environment.setdefault("OMP_NUM_THREADS", str(len(cores)))
        self._processes[process.key] = process
        self._emptied.clear()
        try:
            if environment[env.PARKED.name] is not None:
                self._check_descriptors()
            stdout, stderr = self._output.attach(process.log_name, process.rank, held=process.peer is None)
        except OSError as error:
            # As one that could not be run: what a death leads to is for the policy to say.
            never = Exited(process.key, _CANT_RUN, f"was not started: no pipe for its output: {error.strerror}")
            asyncio.get_running_loop().call_soon(self._on_exit, process, never)
            return
        try:
            self._guard.start(process.key, environment, cores, stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)

    def _check_descriptors(self) -> None:
        """OSError where another newcomer would take the last descriptors: nobody would hear those who are starting
        already, nor whoever takes a mistaken size back."""
        unheard = max(0, len(self._processes) - self._broker_server.connections())
        if _spare_descriptors() < 4 + unheard + _SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _give_up(self, process: Process, version: int) -> None:
        """A newcomer has had its time."""
        if process.dismissed or process.killed_because:
            return
        if process.peer is not None and not self._broker.is_ready(process.peer, process.incarnation):
            limit = f"{self._join_timeout_s:g} s (KUNGFU_JOIN_TIMEOUT)"
            self._kill(process, f"was not ready to join cluster version {version} within {limit} and was killed")

    # ---- standbys ----

    def _keep_standbys(self) -> None:
        """Starts standbys in the places of those that were needed."""
        if self._verdict.done() or self._finishing or self._resting:
            return
        newest = self._newest_known()
        present = sum(p.peer is None and not p.given_up for p in self._processes.values())
        for _ in range(self._standbys_wanted - present):
            number = next(self._standby_numbers)
            process = Process(next(self._keys), f"standby.{number}", rank=newest.size, standby=number)
            process.device = self._choose_device(newest)
            environment = self._environment(process, newest, True)
            if self._options.affinity and "OMP_NUM_THREADS" not in os.environ:
                # As many as its share of the cores will be; until then it may use all of them.
                environment["OMP_NUM_THREADS"] = str(len(affinity.divide(self._cores, newest.size + 1)[-1]))
            self._launch(process, environment, list(self._cores))

    def _ready_standby(self) -> Process | None:
        """The one that has come farthest."""
        ready = self._broker.ready_standbys()
        spare = [p for p in self._processes.values() if p.peer is None and not p.killed_because]
        return min(spare, key=lambda p: (p.standby not in ready, p.key), default=None)

    def _environment(self, process: Process, cluster: Cluster, joins_later: bool) -> dict[str, str | None]:
        """Changes to the launcher's own environment; None removes what an outer job may have set."""
        options = self._options
        standby = process.peer is None
        changes: dict[str, str | None] = {
            env.SELF.name: None if standby else str(process.peer),
            env.INCARNATION.name: None if standby else str(process.incarnation),
            env.PARKED.name: "1" if joins_later else None,
            env.STANDBY.name: str(process.standby) if standby else None,
            env.BROKER.name: self._broker_server.address,
            env.JOB_SECRET.name: self._secret,
            env.CONFIG_SERVER.name: self._url,
            env.WATCH.name: "1" if options.watch else None,
            env.HOSTS.name: options.host.limit,
            env.PORT_RANGE.name: str(options.ports),
            env.RANK_ID.name: str(process.rank),
            env.RANK_SIZE.name: str(cluster.size + standby),
            **self._devices.environment(process.device),
        }
        if "PYTHONUNBUFFERED" not in os.environ:
            # Output goes to a pipe: without this it comes in blocks, late, and not at all from a worker that is killed.
            changes["PYTHONUNBUFFERED"] = "1"
        return changes

    # ---- end ----

    async def _end(self, verdict: Verdict | None) -> None:
        """Whatever the state: ends the workers, waits for their last words, closes everything."""
        failed = verdict is None or verdict.decision is Decision.FAIL
        self._guard.wake()
        if self._processes:
            self._broker.end()  # whoever asks to leave because of the signal is told to go
            number = verdict.signal_to_workers if verdict is not None else signal.SIGTERM
            self._guard.signal(number)
            self._guard.signal(signal.SIGCONT)  # a stopped process has to run to end
            waits = [asyncio.ensure_future(event.wait()) for event in (self._emptied, self._hurry)]
            await asyncio.wait(waits, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        asyncio.get_running_loop().remove_reader(self._guard.fileno())
        await self._closers.aclose()
        self._guard.close()
        last_words = None
        if verdict is not None and verdict.decision is Decision.FAIL:
            last_words = f"kungfu-run: {verdict.reason}"
        # Who couldn't be killed keeps its pipes open for as long as it hangs.
        self._output.close(_OUTPUT_GRACE_S if failed or self._processes else None, last_words)


def _spare_descriptors() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return float("inf") if limit == resource.RLIM_INFINITY else limit - len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # no /proc
        return float("inf")
    except OSError:  # there is none to look with
        return 0


async def _in_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but nobody waits for the thread when the job is interrupted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future


def _log_name(peer: PeerID) -> str:
    return f"{peer.host}.{peer.port}"
