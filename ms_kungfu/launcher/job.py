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
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Callable, TypeVar, cast
from urllib.parse import urlsplit

from ms_kungfu import env
from ms_kungfu.config_server.client import ConfigClient, ConfigServerUnreachableError, StaleConfigError
from ms_kungfu.config_server.secret_file import SecretFile, SecretFileError, secret_from, write_secret
from ms_kungfu.devices.rank_table import RankTableError
from ms_kungfu.elastic.cluster import Cluster, PeerID
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher import affinity, devices
from ms_kungfu.launcher.broker import Broker
from ms_kungfu.launcher.follow import Follower
from ms_kungfu.launcher.guard import Exited, Guard
from ms_kungfu.launcher.hosts import HostError
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.output import Output
from ms_kungfu.launcher.policy import (
    Decision,
    Event,
    GuardLost,
    Interrupted,
    JobState,
    Standing,
    TimedOut,
    Verdict,
    WorkerExited,
    decide,
    how_it_ended,
    peers_to_start,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Everything has to be gone within 2 s of a death or a signal: what is left of them is for SIGKILL and for reaping.
_GRACE_S = 1.0
_OUTPUT_GRACE_S = 1.0
_CONFIG_SERVER_START_S = 10.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)


class StartError(Exception):
    """The job can't start; the message is a sentence for the user."""


@dataclass
class Process:
    """A worker process that has not been seen to exit yet."""

    key: int
    peer: PeerID
    incarnation: int
    rank: int  # in the version that it was started for
    pid: int | None = None
    leave_timer: asyncio.TimerHandle | None = None
    overdue: bool = False
    device: int = 0  # its place in Devices, for life

    @property
    def who(self) -> str:
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
        self._ending = False  # a member has finished its program
        self._resting = False  # everybody has, and the job waits for the next cluster (-k)
        self._url: str | None = None
        self._secret = ""
        self._verdict: asyncio.Future[Verdict]
        self._hurry: asyncio.Event
        self._emptied: asyncio.Event
        self._broker: Broker
        self._follower: Follower | None = None
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
            bytes.fromhex(self._secret),
            len(self._cores),
            on_unknown_version=self._on_unknown_version,
            on_chosen=lambda cluster: self._from_thread(loop, self._on_chosen, cluster),
        )
        self._closers.callback(self._broker.close)
        self._newest = first
        self._broker.admit(first)
        self._broker.choose(first.version)
        loop.add_reader(self._guard.fileno(), self._on_guard)
        if options.timeout_s is not None:
            loop.call_later(options.timeout_s, self._happened, TimedOut(options.timeout_s))
        self._start_missing(first)
        if options.watch and options.builtin_port is None and options.config_server is not None:
            self._follower = Follower(
                ConfigClient(options.config_server, self._secret),
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
        self._url = server.url
        self._leave_secret(server.url)
        _log.info("config server: %s", server.url)
        return first

    def _leave_secret(self, url: str) -> None:
        try:
            file: SecretFile = write_secret(url, self._secret)
        except SecretFileError as error:
            _log.warning("%s; kungfu-run resize needs KUNGFU_JOB_SECRET then", error)
            return
        self._guard.remove_at_end(file.path, file.inode)

    def _on_unknown_version(self, version: int) -> None:
        """Called by a thread of the broker."""
        if self._follower is not None:
            self._follower.look_now()

    def _check(self, cluster: Cluster) -> None:
        self._options.host.check(cluster, self._broker.current() if not self._resting else None)

    async def _use_config_server(self, url: str) -> Cluster:
        secret = self._given_secret() or secret_from({}, url)
        if secret is None:
            raise StartError(
                f"no secret for {url} was left by a config server of this user on this machine; set KUNGFU_JOB_SECRET "
                "to the config server's"
            )
        try:
            bytes.fromhex(secret)
        except ValueError:
            raise StartError(f"the secret of {url} is not in hexadecimal digits") from None
        self._secret, self._url = secret, url
        client = ConfigClient(url, secret)
        deadline = asyncio.get_running_loop().time() + _CONFIG_SERVER_START_S
        told = False
        while True:
            try:
                first = await _in_thread(lambda: self._first_from(client))
                if first is not None:
                    return first
                if not told:
                    told = True
                    _log.info("waiting for %s to hold a cluster (-init-version -1)", url)
            except ConfigServerUnreachableError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise StartError(f"{error}; is it running? -builtin-config-port runs one with the job") from None
            except StaleConfigError:
                continue
            except (ConfigServerError, HostError) as error:
                raise StartError(str(error)) from None
            await asyncio.sleep(0.2)

    def _first_from(self, client: ConfigClient) -> Cluster | None:
        """The first cluster, which the config server holds when this returns; None: it has to be waited for."""
        held = client.get()
        wanted = self._options.init_version
        if wanted == -1:
            if held is not None:
                self._options.host.check(held, None)
            return held
        # One that was forgotten by DELETE still counts; the server says so with 409.
        version = held.version + 1 if held is not None else 0
        if wanted is not None:
            if held is not None and wanted < version:
                raise HostError(
                    f"-init-version {wanted}: {client.url} is at version {held.version} already; leave the flag out"
                )
            if held is not None and wanted > version:
                client.delete()
            version = wanted
        return client.put(self._first_cluster(version))

    # ---- what happens ----

    @staticmethod
    def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[Cluster], None], cluster: Cluster) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(function, cluster)

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

    def _happened(self, event: Event) -> None:
        if self._verdict.done():
            return
        standings = [self._standing(p) for p in self._processes.values()]
        state = JobState(
            members=standings.count(Standing.MEMBER), leaving=standings.count(Standing.LEAVING), keep=self._options.keep
        )
        verdict = decide(event, state)
        if verdict.decision in (Decision.FINISH, Decision.FAIL):
            self._verdict.set_result(verdict)
            _log.info("%s%s", verdict.reason, "; ending the job" if verdict.decision is Decision.FAIL else "")
            return
        if verdict.reason:
            _log.warning("%s", verdict.reason)
        if verdict.decision is Decision.REST:
            self._resting = True

    def _standing(self, process: Process) -> Standing:
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
        if process.leave_timer is not None:
            process.leave_timer.cancel()
        self._broker.mark_lost(process.peer, event.error or how_it_ended(event.code), process.incarnation)
        if standing is Standing.MEMBER and event.code == 0:
            self._ending = True
        if process.overdue:
            event = replace(event, code=0)  # the launcher's own doing, and told already
        if not self._verdict.done() and event.code == 0:
            _log.info("%s %s", process.who, how_it_ended(event.code))
        logs = self._output.log_paths(_log_name(process.peer))
        who = process.who
        self._happened(WorkerExited(who, standing, event.code, event.error))
        if event.code != 0 and logs is not None and self._verdict.done():
            _log.info("what %s wrote: %s, %s", who, *logs)

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
        if self._newest is None or cluster.version <= self._newest.version or self._verdict.done():
            return
        if not self._options.watch:
            _log.warning("the config server has a new cluster, which needs -w to be followed")
            return
        try:
            self._check(cluster)
        except HostError as error:  # a config server of its own does not know this host
            _log.error("cluster version %d is refused: %s", cluster.version, error)
            self._broker.refuse(cluster.version, str(error))
            return
        _log.info("cluster version %d is wanted: %d workers", cluster.version, cluster.size)
        self._newest = cluster
        self._broker.admit(cluster)
        if self._resting:
            self._resting = self._ending = False
            self._broker.choose(cluster.version)
        self._start_missing(cluster)

    def _on_chosen(self, cluster: Cluster) -> None:
        """The members have agreed on a version and are going over to it."""
        _log.info("cluster version %d has been chosen: %d workers", cluster.version, cluster.size)
        loop = asyncio.get_running_loop()
        for process in self._processes.values():
            if process.leave_timer is None and self._broker.is_out(process.peer, process.incarnation):
                process.leave_timer = loop.call_later(
                    self._options.leave_grace_s, self._remind, process, cluster.version
                )
        # A peer that this version has expelled may be in the newest one again, as another process.
        self._start_missing(self._newest_known())
        for process, cores in self._shares(cluster):
            if process.pid is not None:
                affinity.pin(process.pid, cores)

    def _remind(self, process: Process, version: int) -> None:
        """A detached worker has had its time."""
        if process.key not in self._processes:
            return
        _log.warning(
            "%s is not in cluster version %d any more and has not left within %g s; it is ended (-leave-grace)",
            process.who,
            version,
            self._options.leave_grace_s,
        )
        process.overdue = True
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
            stays = other.peer in cluster.workers and not self._broker.is_out(other.peer, other.incarnation)
            (staying if stays else leaving).append(other.device)
        chosen = self._devices.choose(staying, leaving)
        name = self._devices.name_of(chosen)
        if name is not None and chosen in staying:
            _log.warning(
                "%s is shared by %d workers: the job has %d devices for %d workers",
                name, staying.count(chosen) + 1, len(self._devices.slots), cluster.size,
            )  # fmt: skip
        return chosen

    def _start_missing(self, cluster: Cluster) -> None:
        running = self._processes.values()
        present = {p.peer for p in running if not self._broker.is_out(p.peer, p.incarnation)}
        shares = affinity.divide(self._cores, cluster.size)
        for peer in peers_to_start(cluster, present, self._ending):
            rank = cluster.workers.index(peer)
            cores = shares[rank] if self._options.affinity else []
            process = Process(next(self._keys), peer, cluster.version, rank)
            process.device = self._choose_device(cluster)
            try:
                stdout, stderr = self._output.attach(_log_name(peer), rank)
            except OSError as error:
                if not self._verdict.done():
                    reason = f"no log files for {process.who}: {error}"
                    self._verdict.set_result(Verdict(Decision.FAIL, reason, 1))
                return
            self._processes[process.key] = process
            self._emptied.clear()
            try:
                self._guard.start(process.key, self._environment(process, cluster, cores), cores, stdout, stderr)
            finally:
                os.close(stdout)
                os.close(stderr)

    def _environment(self, process: Process, cluster: Cluster, cores: list[int]) -> dict[str, str | None]:
        """Changes to the launcher's own environment; None removes what an outer job may have set."""
        options = self._options
        changes: dict[str, str | None] = {
            env.SELF.name: str(process.peer),
            env.INCARNATION.name: str(process.incarnation),
            env.BROKER.name: self._broker.address,
            env.JOB_SECRET.name: self._secret,
            env.CONFIG_SERVER.name: self._url,
            env.WATCH.name: "1" if options.watch else None,
            env.HOSTS.name: options.host.limit,
            env.PORT_RANGE.name: str(options.ports),
            env.RANK_ID.name: str(process.rank),
            env.RANK_SIZE.name: str(cluster.size),
            **self._devices.environment(process.device),
        }
        if "PYTHONUNBUFFERED" not in os.environ:
            # Output goes to a pipe: without this it comes in blocks, late, and not at all from a worker that is killed.
            changes["PYTHONUNBUFFERED"] = "1"
        if cores and "OMP_NUM_THREADS" not in os.environ:
            changes["OMP_NUM_THREADS"] = str(len(cores))
        return changes

    # ---- end ----

    async def _end(self, verdict: Verdict | None) -> None:
        """Whatever the state: ends the workers, waits for their last words, closes everything."""
        failed = verdict is None or verdict.decision is Decision.FAIL
        if self._processes:
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
        self._output.close(_OUTPUT_GRACE_S if failed else None, last_words)


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
