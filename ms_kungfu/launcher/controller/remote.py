"""The head's view of the hosts: each is a `Site`, and has its part of a version's shared memory.

Each of them, the head's own too, has a launcher (`outpost`), which has called, has proved that it knows the job's
secret, and does for its host what it is told. All that is said to a host goes over one connection, in order: what is
true when a worker is answered has been told to its host before. If that connection ends the host is lost, and so it is
where nothing comes over it for -host-timeout, or where it and another host don't reach each other for that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Protocol

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import Seat
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.control import AnyChannel, call_once, reason_of, remedy_for
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.sites import Site
from ms_kungfu.launcher.controller.startup import Start
from ms_kungfu.launcher.hello import devices_of, objection, other_command, other_versions
from ms_kungfu.launcher.joining import joining_host, terms_of
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.events import Exited, Started
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.log_files import log_paths
from ms_kungfu.launcher.state.lost_hosts import Leases, to_evict
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.segment import MAKE_S, Asker, NotMadeYet, Progress, Segment
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.state.stuck import stuck_sure_s, told_each_s, waits_between_hosts
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_FIRST_WORDS_S = 10.0
_MAX_ASKING = 4096  # requests of a host's workers that wait for an answer
_LOOK_S = 0.2  # for connections between hosts that have ended
# A host that ends takes its connections with it, some a moment before it is missed itself.
_HOST_FIRST_S = 1.0
# Who doesn't reach whom is told by several hosts, one after the other.
_LAST_NEWS_S = 2.0
_MISSED_S = 1.0  # two beats of a host, at most
# Whoever hasn't called by then is asked what it does, and then again and again.
_PATIENCE_S = 3.0
_ASK_S = 10.0
_TELL_SILENCE_S = 5.0  # hosts are started one after the other: before, it is no news that nobody answers there
_CALLS_IN_VAIN_S = 4.0
_ONCE_MORE_S = 0.3  # a head that has lost its seat and lives finds out who has it, and its host comes
_PARTING_S = 0.5  # a host that has been told to end takes some hundredths


class Workers(Protocol):
    """Who has workers on these hosts. All calls come in the event loop."""

    broker: Broker

    def on_event(self, host: str, event: Started | Exited) -> None: ...
    def look_at(
        self, host: str, watch: HangWatch, now: float, stopped: Collection[int], is_starved: Callable[[int], bool]
    ) -> None: ...
    def segment_was_made(self) -> None: ...


class Reports(Protocol):
    """Who is told what becomes of the hosts."""

    @property
    def hosts(self) -> Hosts:
        """Those of the job by now."""
        ...

    @property
    def has_stood_still(self) -> bool:
        """The head has, a moment ago."""
        ...

    def left_s(self) -> float | None:
        """Of the job's -timeout."""
        ...

    def host_lost(self, name: str, reason: str) -> None:
        """It has no part in the job any more, and its workers neither. Once a host."""

    def hosts_apart(self, reason: str) -> None:
        """What several of them do together can't go on, and it's not for one of them to go."""

    def interrupted(self, number: int, where: str) -> None:
        """Somebody has sent a host's launcher this signal."""

    def host_leaves(self, name: str) -> None:
        """Its launcher got a SIGTERM. `RemoteHosts.let_go` is the answer, in its time."""

    def objection_to(self, host: Host) -> str:
        """Why it can't join the job; "" where it can."""
        ...

    def host_joined(self, host: Host, site: Site) -> None:
        """It has: it can be asked to start workers."""

    def status(self) -> dict[str, Any]:
        """What the job tells of itself to who asks; never raises."""
        ...


class RemoteSite:
    """One of the hosts."""

    def __init__(self, owner: RemoteHosts, channel: AnyChannel, hello: m.Hello, cores_per_worker: int | None) -> None:
        self.name = hello.host
        self.devices = devices_of(hello)
        self.shares = Shares(hello.cores, cores_per_worker)
        self.segments: dict[int, SpreadSegment] = {}  # those that it has, or is making
        self.lost = ""  # why
        self._farewell = ""  # why it ends by itself
        self._last_words: m.End | None = None  # of one that is given up, until it has been told
        self.apart: dict[tuple[int, str], str] = {}  # version, host that it can't reach any more -> why
        self.early: list[m.FromHost] = []  # what it has said before anybody listened
        self._owner = owner
        self._channel = channel
        self._logdir = Path(os.fsdecode(hello.logdir)) if hello.logdir else None
        self._asking: dict[int, _RemoteAsker] = {}
        self._watch = HangWatch(owner.options.peer_timeout_s or math.inf)

    # ---- what it is asked for ----

    def send(self, message: m.FromHead) -> None:
        """From any thread."""
        self._channel.send(message)

    def start(self, launch: m.Launch) -> None:
        self.send(launch)

    def signal(self, number: int, key: int | None = None) -> None:
        self.send(m.Signal(number, key))

    def pin(self, key: int, cores: Sequence[int]) -> None:
        self.send(m.Pin(key, tuple(cores)))

    def ask_for_stack(self, key: int) -> None:
        self.send(m.Stack(key))

    def release(self, log_name: str) -> None:
        self.send(m.Release(log_name))

    def log_paths(self, log_name: str) -> list[Path]:
        return log_paths(self._logdir, log_name)

    @property
    def heard(self) -> float:
        """When something came from it."""
        return self._channel.heard

    def give_up(self, why: str, has_left: bool = False, tells: bool = True) -> None:
        """It is lost, or has left: whatever it says from now on nobody hears. If it can, it hears why: now, or where
        this isn't on record yet (`tells`), by `tell_end`."""
        if self.lost:
            return
        self.lost = why
        for asker in list(self._asking.values()):
            asker.hung_up = True
        for segment in list(self.segments.values()):
            segment.was_made(self.name, why, is_lost=True)
        goes_on = self._owner.workers.done() and self._owner.options.recover is not Recover.FAIL
        text = "the job goes on without this host" if goes_on else f"host {self.name} is lost"
        words = None if has_left else f"{PROGRAM}: {text}: {why}"
        self._last_words = m.End(0 if has_left else 1, words, has_left)
        if tells:
            self.tell_end()

    def tell_end(self) -> None:
        """Once."""
        words, self._last_words = self._last_words, None
        if words is not None:
            self.send(words)
            asyncio.get_running_loop().call_later(_PARTING_S, self._channel.end)

    def drop(self) -> None:
        """Neither end hears any more of the other one."""
        self.lost = self.lost or "another head has the job"
        self._channel.end()

    async def part(self) -> None:
        """The host has ended."""
        while not self.lost:
            await asyncio.sleep(0.01)

    # ---- what it says ----

    async def listen(self) -> str:
        """Until the connection ends. Why it has."""
        try:
            while True:
                said = await self._channel.receive(m.FROM_HOST)
                if self.lost:
                    continue
                if type(said) in _AT_ANY_TIME:
                    _AT_ANY_TIME[type(said)](self, said)
                elif self._owner.workers.done():
                    self.hear(self._owner.workers.result(), said)
                elif self._owner.resumes:  # else it has nothing to tell of yet
                    self.early.append(said)
        except ProtocolError as error:
            return f"{PROGRAM} on host {self.name} says what isn't understood: {error}"
        except OSError as error:
            if self._farewell:
                return f"{self._farewell}, and it has ended its workers"
            return f"{PROGRAM} on host {self.name} is gone ({error.strerror or error}), and its workers with it"
        except asyncio.CancelledError:
            self.give_up("the job is over")
            raise
        except Exception as error:  # this host is lost by it, never the job
            _log.error(
                "internal error: message from host %s: %r; the launcher closes the connection",
                self.name, error, exc_info=error,
            )  # fmt: skip
            return f"internal error: message from {PROGRAM} on host {self.name}: {error!r}"

    def hear(self, workers: Workers, said: m.FromHost) -> None:
        """ProtocolError where it can't say that now."""
        if type(said) in _OF_A_VERSION:
            segment = self.segments.get(said.version)  # type: ignore[union-attr]
            if segment is not None:
                _OF_A_VERSION[type(said)](self, segment, said)
        else:
            _OF_WORKERS[type(said)](self, workers, said)

    def _hear_end(self, said: m.Ends) -> None:
        self._farewell = said.why

    def _hear_exited(self, workers: Workers, said: m.Exited) -> None:
        self._note_words(said.gave_up)
        workers.on_event(self.name, Exited(said.key, said.code, said.error))

    def _hear_looked(self, workers: Workers, said: m.Looked) -> None:
        self._note_words(said.gave_up)
        self.shares.cores = said.cores
        for version, segment in self.segments.items():
            segment.beats.update(said.beats.get(version, {}))
            for rank, progress in said.progress.get(version, {}).items():
                segment.note_progress(rank, progress)
            if version in said.awaited:
                segment.note_waits(self.name, said.awaited[version])
        workers.look_at(self.name, self._watch, said.now, set(said.stopped), set(said.starved).__contains__)

    def _note_words(self, gave_up: m.Words) -> None:
        for version, words in gave_up.items():
            if version in self.segments:
                self.segments[version].words.update(words)

    def _hear_hung_up(self, workers: Workers, said: m.HungUp) -> None:
        if said.number in self._asking:
            self._asking[said.number].hung_up = True

    def _hear_guardless(self, workers: Workers, said: m.Guardless) -> None:
        self._owner.lose(self, f"the guard process on host {self.name} was killed, and the workers there with it")

    def _hear_made(self, segment: SpreadSegment, said: m.Made) -> None:
        if segment.attempt == said.attempt:
            segment.was_made(self.name, said.error)

    def _hear_unreachable(self, segment: SpreadSegment, said: m.Unreachable) -> None:
        self.apart[said.version, said.host] = said.why
        self._owner.note_apart()

    def _serve(self, workers: Workers, said: m.Asks) -> None:
        broker, number, message = workers.broker, said.number, said.message
        if number in self._asking:
            raise ProtocolError(f"request {number} is there already")
        named = message.peer if isinstance(message, m.PlaceRequest) else ""  # a host speaks for its own workers
        if named and PeerID.parse(named).host != self.name:
            self.send(m.Answer(number, m.Error(f"{named} is not on host {self.name}")))
            return
        if len(self._asking) >= _MAX_ASKING:
            self.send(m.Answer(number, m.Error("too many workers ask at once")))
            return
        asker = self._asking[number] = _RemoteAsker(self, number)

        def serve() -> None:
            try:
                with contextlib.suppress(OSError, ProtocolError):
                    broker.serve(asker, message)
            except Exception as error:  # the worker gets no answer; the host and the job go on
                _log.error("internal error: a worker of host %s isn't answered", self.name, exc_info=error)
            finally:
                asker.finish()
                self._asking.pop(number, None)

        try:
            self._owner.machine.start_thread("kungfu-broker", serve)
        except RuntimeError as error:
            _log.warning("a worker of host %s isn't answered: %s (a limit on memory or threads?)", self.name, error)
            asker.finish()
            self._asking.pop(number, None)


class _RemoteAsker:
    """A worker of another host that has asked something: stands for its connection, for one answer."""

    def __init__(self, site: RemoteSite, number: int) -> None:
        self._site = site
        self._number = number
        self._answered = False
        self.hung_up = False

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self._answered = True
        self._site.send(m.Answer(self._number, message))

    def finish(self) -> None:
        if not self._answered:
            self._site.send(m.Answer(self._number, None))

    def is_closed(self) -> bool:
        return self.hung_up

    def extend(self, timeout: float | None) -> None:
        """Sending never waits."""


class SpreadSegment:
    """The shared memory of a version: what is done to it is done on all of its hosts, in one order (the broker's, under
    whose lock it is called), and before anything else that they hear later.

    It is made in the background. Its hosts meet only in what `links` says; each has to say that it has its part.
    """

    def __init__(
        self, owner: RemoteHosts, cluster: Cluster, attempt: int, recovers: bool, is_made: bool = False
    ) -> None:
        """`is_made`: by another head, on all of its hosts that are there."""
        self.cluster, self.attempt = cluster, attempt
        self.words: dict[int, str] = {}  # why ranks can't go on
        self.beats: dict[int, int] = {}
        self._waits: dict[str, tuple[list[tuple[int, int, bool]], float]] = {}  # of hosts' ranks, and when it was told
        self._progress: dict[int, tuple[Progress, float]] = {}  # of ranks, and when it was told
        self._owner = owner
        self._recovers = recovers
        # Hosts as they are now: one that is lost and comes back is another one, of which this knows nothing.
        self._sites = [owner.sites[host] for host in cluster.hosts if host in owner.sites]
        self._missing: dict[str, asyncio.Future[None]] = {}  # hosts that haven't said yet that they have their part
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._is_made = is_made
        self._trouble: Exception | None = None
        self._is_closed = False
        self._sync_points = 0  # those that have been passed on
        self._task: asyncio.Task[None] | None = None
        if is_made:
            for site in self._sites:
                site.segments[cluster.version] = self
        else:
            owner.in_loop(self._begin)

    # ---- in the event loop ----

    def _begin(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._task = asyncio.ensure_future(self._make())

    async def _make(self) -> None:
        trouble: Exception | None = None
        loop = asyncio.get_running_loop()
        for site in self._sites:
            site.segments[self.cluster.version] = self
            self._missing[site.name] = loop.create_future()
            site.send(m.Make(self.attempt, m.ClusterPart.of(self.cluster), self._recovers))
            if site.lost:
                self.was_made(site.name, site.lost, is_lost=True)
        try:
            if not self._missing:
                raise OSError("none of its hosts is there")
            missing = self._missing.values()
            done, late = await asyncio.wait(missing, timeout=2 * MAKE_S, return_when=asyncio.FIRST_EXCEPTION)
            for wait in done:
                wait.result()
            if late:
                raise OSError(f"it takes longer than {2 * MAKE_S:g} s")
        except asyncio.CancelledError:
            trouble = OSError("given up")
        except Exception as error:
            trouble = error
        with self._lock:
            self._task = None
            self._trouble, self._is_made = trouble, trouble is None
            if not self._is_made or self._is_closed:
                self._undo()
        self._owner.was_made()

    def was_made(self, host: str, error: str, is_lost: bool = False) -> None:
        """A host has its part, or says why it can't. Where it `is_lost`, and that has to be on record first, members
        that ask for this version wait for it: another version without the host, which that leads to."""
        missing = self._missing.get(host)
        if missing is not None and not missing.done():
            if error and is_lost and self._owner.seat is not None:
                missing.set_exception(NotMadeYet(f"host {host}: {error}"))
                missing.exception()
            elif error:
                missing.set_exception(OSError(f"host {host}: {error}"))
                missing.exception()  # looked at, also where another host was first
            else:
                missing.set_result(None)

    def _undo(self) -> None:
        self._forget()
        self._tell(m.Close(self.cluster.version))

    def pass_on_sync_points(self, number: int) -> None:
        """What the workers of one host have asked for, those of all others hear of."""
        with self._lock:
            if self._is_closed or number <= self._sync_points:
                return
            self._sync_points = number
        self._tell(m.Sync(self.cluster.version, number))

    def has(self, site: RemoteSite) -> bool:
        return site in self._sites

    # ---- as a segment, from any thread ----

    def check_made(self) -> None:
        with self._lock:
            if self._trouble is not None:
                raise self._trouble
            if not self._is_made:
                raise NotMadeYet

    def hand_over(self, asker: Asker, message: m.Place, rank: int) -> None:
        asker.send(message)  # its host adds what belongs to it

    def announce(self, version: int) -> None:
        self._tell(m.Announce(self.cluster.version, version))

    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None:
        self._tell(m.Lost(self.cluster.version, rank, reason, recover, reaped))

    def lose_host(self, host: str) -> None:
        for site in self._sites:
            if site.name != host:
                site.send(m.LoseHost(self.cluster.version, host))

    def _tell(self, message: m.FromHead) -> None:
        for site in self._sites:
            site.send(message)

    def heartbeat(self, rank: int) -> int:
        return self.beats.get(rank, 0)

    def gave_up(self, rank: int) -> str:
        return self.words.get(rank, "")

    def note_waits(self, host: str, waits: list[tuple[int, int, bool]]) -> None:
        self._waits[host] = (waits, self._owner.machine.monotonic())

    def awaited(self) -> list[tuple[int | str, int | str, bool]]:
        """Without the hosts whose report is old, or hasn't come: of a rank there nobody knows whether it still waits,
        and one report must not confirm a stuck rank by being read again (`stuck`, 2)."""
        since = self._owner.machine.monotonic() - self._owner.stuck_sure_s
        fresh = {host: waits for host, (waits, told) in self._waits.items() if told > since}
        told = {site.name: fresh[site.name] for site in self._sites if not site.lost and site.name in fresh}
        ranks: dict[str, list[int]] = {host: [] for host in told}
        for rank, peer in enumerate(self.cluster.workers):
            if peer.host in ranks:
                ranks[peer.host].append(rank)
        return waits_between_hosts(told, ranks)

    def set_ending(self, rank: int, ending: bool) -> None:
        self._tell(m.Ending(self.cluster.version, rank, ending))

    def note_progress(self, rank: int, progress: Progress) -> None:
        self._progress[rank] = (progress, self._owner.machine.monotonic())

    def progress(self, rank: int) -> Progress | None:
        if rank not in self._progress:
            return None
        (step, each_s, ago_s), told = self._progress[rank]
        return step, each_s, ago_s + self._owner.machine.monotonic() - told

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._is_made:
                self._owner.in_loop(self._forget)
                self._tell(m.Close(self.cluster.version))
            elif self._task is not None:
                self._owner.in_loop(self._task.cancel)

    def _forget(self) -> None:
        for site in self._sites:
            if site.segments.get(self.cluster.version) is self:
                del site.segments[self.cluster.version]
                site.apart = {(v, host): why for (v, host), why in site.apart.items() if v != self.cluster.version}


class RemoteHosts:
    """All hosts of the job, the head's own among them: its launcher passes on who calls. Belongs to the event loop, but
    for `make_segment`. `hello`: of the head's own host. `resumes`: hosts report to a head that goes on.
    """

    def __init__(
        self, options: Options, machine: Machine, hello: m.Hello, start: Start, reports: Reports, resumes: bool = False
    ) -> None:
        self.options, self.machine, self.reports = options, machine, reports
        self.name = options.hosts.self_name
        self.resumes = resumes
        self.resumes_no_more = not resumes  # who hasn't come by now is lost
        self.was_left = False  # by a host, because this head stood still before it went on
        self.seat: Seat | None = None  # in which this head is
        self._holds_deadlines = False
        self.stuck_sure_s = stuck_sure_s(env.COLLECTIVE_TIMEOUT.get(machine.environ))
        self.told: dict[str, m.Report] = {}  # by hosts that came to a head which resumes
        self.sites: dict[str, RemoteSite] = {}
        secret = bytes.fromhex(options.secret or "")
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._hello = hello
        self._secret = secret
        self._deadline: float | None = None  # of the hosts that are missing
        self._refused: dict[str, str] = {}  # of these, by their names: why they can't take part
        self._silent: dict[str, str] = {}  # why they don't answer
        self._warned: set[str] = set()
        self._other_head = ""  # what is to be said of it
        self.workers: asyncio.Future[Workers] = self._loop.create_future()
        self._news = asyncio.Event()
        self._attempts = start.attempts
        self._last_words: m.End | None = None  # once the job ends
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unlinked = False

    async def gather(self, timeout_s: float) -> None:
        """All hosts are there when this returns. StartError where one doesn't come."""
        if self.options.host_timeout_s is not None:
            self._look_for_silence(Leases(self.options.host_timeout_s))
        deadline = self._deadline = self._loop.time() + timeout_s
        asking = asyncio.ensure_future(self._ask_who_is_missing())
        told: tuple[str, ...] = ()
        try:
            while missing := self.missing():
                others = self.missing_others()
                if others and others != told:
                    told = others
                    _log.info(
                        "waiting for %s on %s, for %.0f s (KUNGFU_JOIN_TIMEOUT)",
                        PROGRAM, ", ".join(others), max(0.0, deadline - self._loop.time()),
                    )  # fmt: skip
                self._news.clear()
                if self._other_head:
                    raise StartError(self._other_head)
                try:
                    await within(max(0.0, deadline - self._loop.time()), self._news.wait())
                except asyncio.TimeoutError:
                    raise StartError(
                        f"nothing was heard of {', '.join(missing)} within {timeout_s:g} s (KUNGFU_JOIN_TIMEOUT); is "
                        f"{PROGRAM} with the same flags running there?{self.why_missing()}"
                    ) from None
        finally:
            self._deadline = None
            asking.cancel()

    async def gather_again(
        self, timeout_s: float, before: Collection[str], time_to_ask: Callable[[], Awaitable[float]]
    ) -> None:
        """Of a job that runs: its hosts have come to this head when this returns, or won't. The hosts of the heads
        `before` have said nothing for long enough already: they are awaited for a moment only, all others until
        `time_to_ask` says that they could have asked for `timeout_s` who the head is."""
        begun = self._loop.time()
        if self.options.host_timeout_s is not None:
            self._look_for_silence(Leases(self.options.host_timeout_s))
        while missing := self.missing():
            if set(missing) <= set(before):
                left_s = begun - self._loop.time() + _ONCE_MORE_S
            else:
                left_s = timeout_s / 8 if await time_to_ask() < timeout_s else 0.0
            if left_s < 0.001:  # a clock has its own least step
                break
            self._news.clear()
            if missing != self.missing():
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left_s, self._news.wait())
        self.resumes_no_more = True

    def missing(self) -> tuple[str, ...]:
        """Hosts of the job that aren't there yet."""
        hosts = self.options.hosts
        return tuple(n for n in hosts.names if n not in self.sites and n not in hosts.lost)

    def missing_others(self) -> tuple[str, ...]:
        """The head's own comes at once."""
        return tuple(name for name in self.missing() if name != self.name)

    def why_missing(self) -> str:
        """What is known of them, behind a sentence that names them."""
        port = self.options.control_port
        # What a host has said is more than that it says nothing now, having ended.
        silent = {name: f"no answer from {name}:{port}: {why}" for name, why in self._silent.items()}
        last = {**silent, **self._refused}
        return "".join(f" The last of {name}: {last[name]}" for name in self.missing() if name in last)

    def then(self) -> str:
        """What this host does after it has refused another one."""
        if self._deadline is None:
            return ""
        left_s = max(0.0, self._deadline - self._loop.time())
        return f"; {', '.join(self.missing())} may still come, for {left_s:.0f} s more (KUNGFU_JOIN_TIMEOUT)"

    # Each host takes itself for the head where -H is in another order on each: then nobody calls. And one that calls
    # may be stopped by a firewall here that lets this host's own connections pass. So a head asks, and says who it is.

    async def _ask_who_is_missing(self) -> None:
        told: set[tuple[str, str]] = set()
        may_tell = self._loop.time() + _TELL_SILENCE_S
        await asyncio.sleep(_PATIENCE_S)
        while True:
            await asyncio.gather(*(self._ask(self.options.hosts.named(name)) for name in self.missing()))
            await asyncio.sleep(max(0.0, may_tell - self._loop.time()))
            self._tell_of_silence(told)
            await asyncio.sleep(_ASK_S)

    def _tell_of_silence(self, told: set[tuple[str, str]]) -> None:
        """Once a host and reason, in a line for all hosts that have it in common: they may be many."""
        port, by_reason = self.options.control_port, dict[str, list[str]]()
        for name in self.missing():
            why = self._silent.get(name)
            if why is not None and name not in self._refused and (name, why) not in told:
                told.add((name, why))
                by_reason.setdefault(why, []).append(f"{name}:{port}")
        for why, places in by_reason.items():
            _log.warning("no answer from %s so far: %s; %s", ", ".join(places), why, remedy_for(why, port))

    async def _ask(self, host: Host) -> None:
        options, why = self.options, ""
        try:
            channel = await call_once(
                self.machine, options.hosts.own.address, host.address, options.control_port, self._secret
            )
            try:
                channel.send(m.Head(self.name, str(options.hosts)))
                answer = await within(_FIRST_WORDS_S, channel.receive(m.CALLS))
            finally:
                channel.close()
            self._silent.pop(host.name, None)
            if answer.waits:
                self._meet_another_head(host.name, answer.hosts)
            elif answer.in_a_job:
                why = (
                    f"{host.name} takes part in another job, of {answer.calls}; two on one host need another -port each"
                )
            elif answer.calls != self.name:
                why = (
                    f"{PROGRAM} was told -H {answer.hosts} on {host.name} and calls {answer.calls}; here it is "
                    f"{options.hosts}. Give the same -H, in the same order, on all hosts"
                )
            elif answer.for_s > _CALLS_IN_VAIN_S:
                why = (
                    f"{host.name} calls {self.name}:{options.control_port} and doesn't get through; is that port open "
                    "here?"
                )
        except ProtocolError as error:
            self._silent.pop(host.name, None)
            why = f"{host.name}:{options.control_port} answers, but not to this job: {error}"
        except (OSError, asyncio.TimeoutError) as error:
            self._silent[host.name] = reason_of(error)
            return
        except Exception as error:  # such as one of TLS
            why = f"{host.name}:{options.control_port} answers, but wrongly: {error!r}"
        if why and self._refused.get(host.name) != why:
            self._refused[host.name] = why
            _log.warning("%s", why)

    def _meet_another_head(self, name: str, hosts: str) -> None:
        own = self.options.hosts
        if name in own.names:
            self._other_head = (
                f"{name} waits as the head, too: give the same -H, in the same order, on all hosts, and the same "
                f"-config-server ({self.name} has -H {own}, {name} has -H {hosts})"
            )
            self._news.set()

    async def _answer_a_head(self, channel: AnyChannel, asking: m.Head) -> None:
        waits = self._deadline is not None and asking.host in self.options.hosts.names
        channel.send(m.Calls(str(self.options.hosts), self.name, waits=waits, in_a_job=not waits))
        await channel.flushed()
        if waits:
            self._meet_another_head(asking.host, asking.hosts)

    def attend(self, workers: Workers) -> None:
        """From now on these hear what the hosts say."""
        self.workers.set_result(workers)

    def catch_up(self) -> None:
        """On what hosts have said before they were heard."""
        for site in list(self.sites.values()):
            early, site.early = site.early, []
            for said in early:
                try:
                    site.hear(self.workers.result(), said)
                except ProtocolError as error:
                    self.lose(site, f"{PROGRAM} on host {site.name} says what isn't understood: {error}")
                    break

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    async def end(self, code: int, words: str | None) -> None:
        """The other launchers end with this exit code, also one that comes meanwhile."""
        self._last_words = m.End(code, words)
        for site in self.sites.values():
            if not site.lost:
                site.send(self._last_words)
            site.tell_end()  # something else, to one that was given up a moment ago
        others = [site for site in self.sites.values() if not site.lost and site.name != self.name]
        parting = [asyncio.ensure_future(site.part()) for site in others]
        if parting:
            _, late = await asyncio.wait(parting, timeout=_PARTING_S)
            for wait in late:
                wait.cancel()

    def leave(self) -> None:
        """Without a word: another head has the job."""
        for site in self.sites.values():
            site.drop()

    def in_loop(self, function: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(function)

    def was_made(self) -> None:
        if self.workers.done():
            self.workers.result().segment_was_made()

    def make_segment(self, cluster: Cluster, recovers: bool) -> Segment:
        """`MakeSegment`."""
        self._attempts += 1
        return SpreadSegment(self, cluster, self._attempts, recovers)

    def take_over(self, cluster: Cluster, recovers: bool) -> Segment:
        """What the hosts have of this version, which another head has had made there."""
        return SpreadSegment(self, cluster, 0, recovers, is_made=True)

    def close_all_but(self, known: Collection[int], reports: Mapping[str, m.Report]) -> None:
        """What the hosts have of other versions, which the head before had them make."""
        for host, report in reports.items():
            for version in set(report.losses).difference(known):
                self.sites[host].send(m.Close(version))

    # ---- who comes ----

    async def serve(self, channel: AnyChannel, said: m.FirstWords) -> bool:
        """Somebody has called, and has said this. Whether the connection is another one's now."""
        if isinstance(said, m.Agent):
            return await self._take_in(channel, said)
        if isinstance(said, m.Head):
            await self._answer_a_head(channel, said)
        elif isinstance(said, m.Ask):
            await self._answer_who_asks(channel, said)
        return False

    async def _answer_who_asks(self, channel: AnyChannel, asking: m.Ask) -> None:
        coming = joining_host(asking.host, asking.slots)
        why = other_versions(asking.host, asking.version, asking.mindspore, own=self._hello)
        why = why or self.reports.objection_to(coming)
        channel.send(m.Refused(why) if why else terms_of(self.options, self.reports.hosts, self.reports.left_s()))
        await channel.flushed()

    async def _take_in(self, channel: AnyChannel, said: m.Agent) -> bool:
        hello = said.hello
        if said.report is not None:
            if hello.host in self.reports.hosts.lost:
                return await self._let_in(channel, hello, f"the job goes on without {hello.host}")
            if self.resumes_no_more or hello.host not in self.missing():
                return False  # the next look at the record tells what has become of it
            self.told[hello.host] = said.report
            return await self._let_in(channel, hello, "")
        joining = None if said.slots is None else joining_host(hello.host, said.slots)
        if joining is not None and self.seat is not None and hello.host in self.sites:
            return False  # over a connection whose end hasn't been seen yet: it looks once more who has the job
        if joining is not None:
            why = objection(hello, self._hello, {}, same_flags=False) or self.reports.objection_to(joining)
        else:
            why = self._objection_to_one_of_the_first(hello)
        per_worker = self.options.cores_per_worker
        if not why and per_worker is not None and per_worker > len(hello.cores):
            cores = counted(len(hello.cores), "core")
            why = f"-cores-per-worker {per_worker} is more than the {cores} of {hello.host} for the job"
        warning = ""
        if not why and said.command is not None:  # what its user should know of a host that may take part
            command = list(map(os.fsdecode, said.command))
            warning = other_command(hello.host, command, self.name, self.options.command)
        return await self._let_in(channel, hello, why, joining, warning)

    async def _let_in(
        self, channel: AnyChannel, hello: m.Hello, why: str, joining: Host | None = None, warning: str = ""
    ) -> bool:
        """Where there is no objection (`why`). Until it is lost. `warning`: what is said here and there, once."""
        per_worker = self.options.cores_per_worker
        if why:
            self._refused[hello.host] = why
            _log.warning("%s%s", why, self.then())
            channel.send(m.Refused(why))
            await channel.flushed()
            return False
        watch = HangWatch(self.options.peer_timeout_s or math.inf)
        look_s = told_each_s(watch.period_s, env.COLLECTIVE_TIMEOUT.get(self.machine.environ))
        secret = None if self.options.secret else self._start.secret  # which it has
        seat = None if self.seat is None else self.seat.since
        channel.send(m.Welcome(self._start.writer, look_s, secret, seat, warning))
        channel.set_silence(self.options.host_timeout_s)
        # Without a wait since the look at who is there: of two that come at once under one name the first is let in.
        site = self.sites[hello.host] = RemoteSite(self, channel, hello, per_worker)
        if self._holds_deadlines:
            site.send(m.Hold(True))
        if site.name != self.name:
            _log.info("host %s is there: %s", site.name, counted(len(hello.cores), "core"))
        if warning and warning not in self._warned:
            self._warned.add(warning)
            _log.warning("%s", warning)
        if self._last_words is not None:
            site.send(self._last_words)
        if joining is not None:
            self.reports.host_joined(joining, site)
        self._news.set()
        self.lose(site, await site.listen())
        return False

    def _objection_to_one_of_the_first(self, hello: m.Hello) -> str:
        why = objection(hello, self._hello, self.sites)
        before = self.sites.get(hello.host)
        if why and before is not None and before.lost:
            url = self._start.url or "URL"
            return (
                f"{hello.host} had been a host of the job ({before.lost}), which goes on without it; {PROGRAM} -join "
                f"{url} brings it back"
            )
        if not why and hello.host not in self.options.hosts.names:
            return f"{hello.host} is none of the job's hosts, {self.options.hosts}"
        return why

    # ---- who is lost ----

    def let_go(self, name: str) -> None:
        """It has left, and all others have been told."""
        self.sites[name].give_up("it has left", has_left=True)

    def lose(self, site: RemoteSite, why: str) -> None:
        if site.lost:
            return
        # A host that hears of its loss ends. Where the head moves that comes after the entry in the record: a head that
        # is deposed by now, or dies before, has ended no host with which the next one would go on. Until then the host
        # hears nothing, and looks at the record by itself after -host-timeout.
        site.give_up(why, tells=self.seat is None or not self.workers.done())
        if self.workers.done():
            self.reports.host_lost(site.name, why)
        else:  # it may come again, but not to a head that it has left because that stood still
            self.was_left = self.was_left or self.reports.has_stood_still
            _log.warning("%s", why)
            del self.sites[site.name]
            self.told.pop(site.name, None)
            self._news.set()

    def tell_lost(self, name: str) -> None:
        """That the job goes on without it is on record."""
        if name in self.sites:
            self.sites[name].tell_end()

    def _living(self) -> list[RemoteSite]:
        return [site for site in self.sites.values() if not site.lost]

    def tell_seat(self) -> None:
        """This head has sat down again. Should it die, who hasn't heard that would take it for another one."""
        for site in self._living():
            site.send(m.Seat(0 if self.seat is None else self.seat.since))

    def hold_deadlines(self, held: bool) -> None:
        """While it is `held` no deadline of a worker runs, on any host."""
        self._holds_deadlines = held
        for site in self._living():
            site.send(m.Hold(held))

    def _look_for_silence(self, leases: Leases) -> None:
        """And says that this host is there."""
        others = {site.name: site.heard for site in self._living() if site.name != self.name}
        for name in leases.run_out(self._loop.time(), others):
            self.lose(self.sites[name], f"nothing came from it for {self.options.host_timeout_s:g} s (-host-timeout)")
        for site in self._living():
            site.send(m.Beat())
        self._later("silence", leases.period_s, self._look_for_silence, leases)

    def _later(self, what: str, seconds: float, function: Callable[..., None], *arguments: object) -> None:
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = self._loop.call_later(seconds, function, *arguments)

    def note_apart(self) -> None:
        """Somebody has told of another one that doesn't reach it. Others may be about to tell more, and one that has
        ended, of which this head doesn't know yet, has to be missed before one of the two is chosen
        (`_part_who_are_apart`)."""
        missed_s = 0.0 if self.options.host_timeout_s is None else self.options.host_timeout_s / 4 + _MISSED_S
        self._later("apart", max(_LAST_NEWS_S, missed_s), self._part_who_are_apart)

    def _apart(self) -> dict[tuple[str, str], str]:
        """Pairs of hosts that live and can't do together what they have to, and why."""
        found = {}
        for site in self._living():
            found.update(
                {
                    (site.name, host): why
                    for (version, host), why in site.apart.items()
                    if version in site.segments and self._is_in(site.segments[version], host)
                }
            )
        living = {site.name for site in self._living()}
        return {pair: why for pair, why in found.items() if living.issuperset(pair)}

    def _is_in(self, segment: SpreadSegment, host: str) -> bool:
        """The host that goes by that name now: nobody reaches one that was lost, also where it has come back."""
        site = self.sites.get(host)
        return site is not None and segment.has(site)

    def _part_who_are_apart(self) -> None:
        apart, now = self._apart(), self._loop.time()
        involved = [site for site in self._living() if any(site.name in pair for pair in apart)]
        limit_s = self.options.host_timeout_s
        if limit_s is not None and any(now - site.heard > limit_s / 4 for site in involved):
            # It may be about to be lost for its silence, which tells better who has to go.
            self._later("apart", _LOOK_S, self._part_who_are_apart)
            return
        workers = Counter(
            worker.host for site in involved for segment in site.segments.values() for worker in segment.cluster.workers
        )
        for name in to_evict(apart, workers, self.reports.hosts.names, self.name):
            other, why = next((set(pair) - {name}, why) for pair, why in apart.items() if name in pair)
            self.lose(self.sites[name], f"it and {''.join(other)} don't reach each other: {why}")

    # ---- connections between hosts ----

    def unlinked(self, segment: SpreadSegment, why: str) -> None:
        """A host can't exchange anything with the others any more. Where one of them has ended, that is said
        instead."""
        if not self._unlinked:
            self._unlinked = True
            self._loop.call_later(_HOST_FIRST_S, self._tell_of_the_unlinked, segment, why)

    def are_apart(self) -> bool:
        """Some hosts don't reach each other; who is lost by that is told soon."""
        return bool(self._apart())

    def is_in_trouble(self) -> bool:
        """That, or it may be what has ended an exchange between hosts."""
        return self._unlinked or self.are_apart()

    def _tell_of_the_unlinked(self, segment: SpreadSegment, reason: str) -> None:
        self._unlinked = False
        if self.are_apart() and self.options.recover is Recover.FAIL:
            return  # who has to go ends the job
        if any(segment in site.segments.values() for site in self.sites.values()):
            self.reports.hosts_apart(reason)


# What a host says, and what hears it.
_AT_ANY_TIME: dict[type, Callable[[RemoteSite, Any], None]] = {
    m.Interrupted: lambda site, said: site._owner.reports.interrupted(said.number, f" on host {site.name}"),
    m.Leave: lambda site, said: site._owner.reports.host_leaves(site.name),
    m.Ends: RemoteSite._hear_end,
    m.StatusQuestion: lambda site, said: site.send(m.JobStatus(said.number, site._owner.reports.status())),
    m.Beat: lambda site, said: None,
}
_OF_WORKERS: dict[type, Callable[[RemoteSite, Workers, Any], None]] = {
    m.Started: lambda site, workers, said: workers.on_event(site.name, Started(said.key, said.pid)),
    m.Exited: RemoteSite._hear_exited,
    m.Looked: RemoteSite._hear_looked,
    m.Asks: RemoteSite._serve,
    m.HungUp: RemoteSite._hear_hung_up,
    m.Guardless: RemoteSite._hear_guardless,
}
_OF_A_VERSION: dict[type, Callable[[RemoteSite, SpreadSegment, Any], None]] = {
    m.Made: RemoteSite._hear_made,
    m.Unlinked: lambda site, segment, said: site._owner.unlinked(segment, said.why),
    m.Syncs: lambda site, segment, said: segment.pass_on_sync_points(said.number),
    m.Unreachable: RemoteSite._hear_unreachable,
}
