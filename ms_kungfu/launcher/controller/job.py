"""One job from its first worker to its last process: joins worker manager, coordinator and cluster store.

What happens comes in as a report of a host, a signal, or a cluster that somebody has written; the coordinator says
what it means, and here that is done. All of it runs on one asyncio loop in the launcher's main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

from ms_kungfu import env
from ms_kungfu._words import counted
from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.leadership import Leadership, NoElection
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.revisions import Revisions, StoreWatcher, raise_bugs
from ms_kungfu.launcher.controller.sites import Site
from ms_kungfu.launcher.controller.startup import MayWrite, Start, prepare
from ms_kungfu.launcher.controller.status import History, describe
from ms_kungfu.launcher.controller.tenure import END_S, RENEW_S, Tenure
from ms_kungfu.launcher.controller.workers import GRACE_S, WorkerManager
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options, what_is_done_instead
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts
from ms_kungfu.launcher.state.outline import outline
from ms_kungfu.launcher.state.policy import Action, Recover, Standing, Verdict, WorkerExited, WorkerWorksOn
from ms_kungfu.launcher.state.seat import Record, Term
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.status_socket import never_raises
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.documents import End, Past
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
# Before another process is tried in the place of one that couldn't even be started: doubled each time.
_START_PAUSE_S = 0.1
_MUST_JOIN_S = 60.0  # before a warning that the workers may be copies of one training
_TRAINS_S = 2.0  # MindSpore alone takes that long to import
_MAX_START_PAUSE_S = 5.0
# A host tells of a connection that has ended within 0.2 s; who is lost by it is told some seconds later.
_HOSTS_NEWS_S = 0.5
_HOSTS_TELL_S = 5.0
_GATHER_S = 10.0  # for the hosts of a job that runs to come to its new head, where -host-timeout doesn't say
_ATTEMPTS = 1 << 16  # of one head at versions of several hosts: those of the next have other numbers


class Job:
    """Runs a job once. Its host's launcher (`agent`), which has begun it and says `hello`, is one of all that it
    tells what to do. With a `term` in the seat it decides for as long as it has the seat, and what is to be on record
    is that before anybody hears of it. `remove_at_end`: a file to remove, however this process ends.
    """

    make_broker: Callable[..., Broker] = staticmethod(Broker)

    def __init__(
        self, options: Options, machine: Machine, hello: m.Hello, remove_at_end: Callable[[Path, int], None],
        term: Term | None = None,
    ) -> None:  # fmt: skip
        self._leadership: Leadership = NoElection()
        self._noted_end: End | None = None  # whatever else is noted behind it
        self.has_left = False  # its host leaves, and another one has the job from then on
        self.last_words: str | None = None
        self._options = options
        self._machine = machine
        self._hello = hello
        self._remove_at_end = remove_at_end
        self._manager: WorkerManager | None = None
        self._remote: RemoteHosts | None = None
        self._watcher: StoreWatcher | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._going: set[str] = set()  # hosts of whose loss an entry is on its way
        self._background: set[asyncio.Future[None]] = set()
        self._graces: dict[str, asyncio.TimerHandle] = {}  # of hosts that leave
        self._leaving_early: list[str] = []  # those that told this head of it before it knew who is there
        self._early: Cluster | None = None  # what somebody wanted before the job had begun
        self._exit_code: int | None = None  # of the first worker that has ended while a host's loss is about to be told
        self._workers_since: float | None = None  # when they were started; None where another head has done that
        self._closers = contextlib.AsyncExitStack()
        self._history = History()
        # This host's part in it, and the job.
        self._started_at = self._began_at = self._machine.time() if term is None else term.since
        self.status = never_raises(self._status)  # what it tells of itself
        self._term = term
        if term is not None:
            url, own = options.config_server or "", options.hosts.self_name
            self._leadership = Tenure(
                term, self._machine, url, own, self._on_deposed, self._on_seated_anew, self._on_store_awaited
            )
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self._hurry = asyncio.Event()
        self._hears_hosts = asyncio.Event()

    async def run(self) -> int:
        """The job's exit code. StartError where it never started. Nothing of the job is left when it returns."""
        loop = self._loop
        left_s, limit_s = self.left_s(), self._options.timeout_s
        if left_s is not None and limit_s is not None:
            loop.call_later(left_s, self._on_timeout, limit_s)
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

    # ---- what it tells of itself ----

    def _status(self) -> dict[str, Any]:
        state, why = "starts", ""
        if self._verdict.done():
            state = "ends"
            why = "it is interrupted" if self._verdict.cancelled() or self._verdict.exception() else ""
            why = why or self._verdict.result().reason
        elif self._manager is not None:
            state = "runs"
        elif self._remote is not None:
            missing = self._remote.missing_others()
            why = f"waits for kungfu-run on {', '.join(missing)}" if missing else ""
        document = outline(self._options, state, why, self._began_at)
        if self._manager is not None:
            describe(document, self._manager, self._coordinator, self._history)
        return document

    # ---- start ----

    def _on_started(self, start: asyncio.Future[None]) -> None:
        if not start.cancelled() and not self._verdict.done():
            error = start.exception()
            if error is not None:
                self._verdict.set_exception(error)

    async def _start(self) -> None:
        options, machine, leadership = self._options, self._machine, self._leadership
        if leadership.resumes is not None:
            await self._go_on(leadership.resumes)
            return
        await leadership.await_turn()
        start = self._begun = await prepare(
            options,
            machine,
            self._closers,
            check=self._check,
            on_change=self._on_written,
            on_status=self.status,
            on_secret_left=lambda file: self._remove_at_end(file.path, file.inode),
            before_first=self._sit_down,
        )
        if instead := what_is_done_instead(options.strategy, options.hosts.is_several):
            _log.warning("%s", instead)
        self._coordinator = Coordinator(options, start.first)
        self._revisions = Revisions(self, self._coordinator, start, machine)
        remote = self._remote = RemoteHosts(options, machine, self._hello, start, self)
        self._closers.push_async_callback(remote.close)
        remote.seat = leadership.seat
        remote.hold_deadlines(leadership.awaits_store)
        self._hears_hosts.set()
        await remote.gather(start.join_timeout_s)
        manager = WorkerManager(
            options, machine, start, self._coordinator, self, remote, self.make_broker,
            on_choice=self._on_choice if leadership.moves else None,
            may_announce=self._may_announce if leadership.moves else None,
        )  # fmt: skip
        self._manager = manager
        self._closers.callback(manager.close)
        self._history.begun(start.first)
        await manager.start(self._note)
        self._workers_since = self._loop.time()
        self._warner = self._loop.call_later(_MUST_JOIN_S, self._warn_of_copies)
        self._closers.callback(self._warner.cancel)
        machine.tell_of_the_beginning()
        if self._early is not None:
            self.on_cluster(self._early)
        self._watch(manager)

    def _watch(self, manager: WorkerManager) -> None:
        if self._options.watch and self._begun.store is not None:
            self._watcher = StoreWatcher(
                self._begun.store,
                lambda: replace(self._coordinator.newest, version=self._coordinator.last_version),
                lambda cluster: manager.from_thread(self.on_cluster, cluster),
                self._machine,
                puts_back=not self._leadership.moves,
            )
            self._closers.callback(self._watcher.stop)

    # ---- what is on record ----

    def _on_deposed(self, why: str) -> None:
        if not self._verdict.done():
            self._verdict.set_result(Verdict(Action.FAIL, why, 1))

    def _on_seated_anew(self) -> None:
        if self._remote is not None:
            self._remote.tell_seat()

    def _on_store_awaited(self, yes: bool) -> None:
        """Workers may wait for what waits for the store: that doesn't count against their deadlines."""
        if self._remote is not None:
            self._remote.hold_deadlines(yes)

    @property
    def is_deposed(self) -> bool:
        return self._leadership.is_deposed

    async def _sit_down(self, writer: str, store: ClusterStore, first: Callable[[], Cluster]) -> MayWrite:
        """Before anything of this job is written: of two of one name that begin together one is refused."""
        leadership, hosts = self._leadership, self._options.hosts
        await leadership.sit_down(lambda: Record(writer, hosts.self_name, first(), hosts.each))
        self._closers.callback(leadership.keep(store))
        return leadership.has_it_again

    async def _write_record(self, choice: int | None = None, lost: str | None = None, end: End | None = None) -> bool:
        """Whether it is there now."""
        leadership = self._leadership
        self._noted_end = end = end or self._noted_end

        def record() -> Record:
            start, coordinator, own = self._begun, self._coordinator, self._options.hosts.self_name
            if self._manager is None and leadership.resumes is not None:  # who is there isn't known yet
                return replace(leadership.resumes, end=end)
            versions = ClusterVersions() if self._manager is None else self._manager.broker.record(choice, lost)
            forgotten = coordinator.hosts.lost.difference(versions.lost_hosts)
            hosts = tuple(host for host in coordinator.hosts.each if host.name not in forgotten)
            return Record(
                start.writer, own, start.first, hosts, versions, coordinator.finishing, end,
                failures=coordinator.failures, told=Past(self._began_at, list(self._history.changes)),
            )  # fmt: skip

        return await leadership.write(record)

    def _resume_past(self, told: Past | None, current: Cluster) -> None:
        if told is None:
            self._history.begun(current)
        else:
            self._began_at = told.began_at
            self._history.resumed(told.changes, current)

    async def _note(self, lost: str | None = None, end: End | None = None) -> bool:
        """What is decided, on record. False where this is the head no more."""
        await self._leadership.act(lambda: self._write_record(lost=lost, end=end))
        return not self.is_deposed

    def _may_announce(self, version: int) -> bool:
        """From any thread."""
        if self._leadership.may_say(version):
            return True
        self._workers.from_thread(lambda it: self._in_background(self._announce_once_it_may(it)), version)
        return False

    async def _announce_once_it_may(self, version: int) -> None:
        if await self._leadership.until_it_may_be_said(version, lambda: self.is_over):
            self._workers.broker.announce()

    def _on_choice(self, version: int) -> None:
        """From the broker's threads."""
        act = self._leadership.act
        self._workers.from_thread(lambda it: self._in_background(act(lambda: self._choose(it))), version)

    async def _choose(self, version: int) -> None:
        if not await self._write_record(choice=version):
            return  # nobody hears of it
        if not self._workers.broker.noted():
            await self._write_record()
            self._workers.broker.not_noted()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(raise_bugs)

    async def serve(self, channel: AnyChannel, message: m.FirstWords) -> bool:
        """Who has called its host for the head of the job (`RemoteHosts.serve`). A host that wants to join waits until
        a job that goes on here does."""
        joins = isinstance(message, m.Ask) or (isinstance(message, m.Agent) and message.slots is not None)
        while self._remote is None and not self.is_over:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(RENEW_S, self._hears_hosts.wait())
        while joins and self._resumes():
            await asyncio.sleep(RENEW_S)
        if self._remote is None or self.is_deposed:
            return False  # who has called looks once more who has the job
        return await self._remote.serve(channel, message)

    def _resumes(self) -> bool:
        """The job runs, and this head doesn't know yet who of it is there."""
        return self._leadership.resumes is not None and not self._has_begun and not self.is_over

    async def _go_on(self, record: Record) -> None:
        """Where the head before has stopped. The seat is this one's already."""
        options, machine, leadership, term = self._options, self._machine, self._leadership, self._term
        assert term is not None
        store = machine.open_store(options.config_server or "", term.secret, writer=record.job)
        start = self._begun = Start(
            env.JOIN_TIMEOUT.get(machine.environ), term.secret, record.first, record.job,
            options.config_server, store=store, attempts=term.seat.since * _ATTEMPTS,
        )  # fmt: skip
        self._closers.callback(leadership.keep(store))
        current = record.versions.current
        assert current is not None
        coordinator = self._coordinator = Coordinator(options, current)
        coordinator.finishing = record.finishing
        coordinator.resume_failures(*record.failures)
        self._revisions = Revisions(self, coordinator, start, machine)
        remote = self._remote = RemoteHosts(options, machine, self._hello, start, self, resumes=True)
        remote.seat = leadership.seat
        remote.hold_deadlines(leadership.awaits_store)
        self._hears_hosts.set()
        self._closers.push_async_callback(remote.close)
        wanted, _ = await asyncio.gather(
            self._wanted(store),
            remote.gather_again(options.host_timeout_s or _GATHER_S, frozenset(record.before), leadership.time_to_ask),
        )
        missing = remote.missing()
        if missing and remote.was_left:
            await leadership.stand_up()
            return
        manager = WorkerManager(
            options, machine, start, coordinator, self, remote, self.make_broker, record.versions, self._on_choice,
            self._may_announce,
        )  # fmt: skip
        self._manager = manager
        self._closers.callback(manager.close)
        self._resume_past(record.told, current)
        is_behind = False
        if wanted is not None and wanted.version > current.version:
            coordinator.last_version = wanted.version
            # Where it has places on hosts that are lost a revision follows, as if they were lost now.
            is_behind = any(worker.host in coordinator.hosts.lost for worker in wanted.workers)
            why_not = None if is_behind or self._can_run(wanted) else "the head that was to run it is lost"
            if not self._history.knows(wanted):
                self._history.wanted(wanted, current, start.writer, refused=why_not)
            if why_not is None:
                coordinator.newest = wanted
            else:
                manager.broker.refuse(wanted.version, why_not)
        newest = coordinator.newest
        manager.resume(remote.told, newest if newest.version > current.version else None)
        manager.fix_cores(max((report.cores for report in remote.told.values()), default=0))
        coordinator.leaving |= {PeerID.parse(peer) for report in remote.told.values() for peer in report.leaving}
        remote.catch_up()
        lost = [worker for worker in current.workers if worker.host in record.lost]
        verdict = coordinator.takes_over(lost, manager.processes.headcount())
        if verdict is not None:
            self._settle(verdict)
        self._history.note(f"host {options.hosts.self_name} has the job from now on")
        for name in missing:
            self.host_lost(name, "its launcher didn't come to the new head of the job")
        if not missing and not is_behind and newest.version > current.version:
            manager.start_missing(newest)
            manager.broker.announce()  # nobody may have to start
        self._revisions.write()
        self._watch(manager)
        for name in self._leaving_early:
            self.host_leaves(name)

    async def _wanted(self, store: ClusterStore) -> Cluster | None:
        while True:
            try:
                return await self._machine.in_thread(store.get)
            except StoreUnreachableError:
                await asyncio.sleep(RENEW_S)
            except ConfigServerError as error:  # somebody has written what isn't a cluster
                _log.warning("%s; the job goes on as it is", error)
                return None

    def _can_run(self, cluster: Cluster) -> bool:
        with contextlib.suppress(HostError):
            self._coordinator.hosts.check(cluster, ())
            return True
        return False

    # ---- what happens ----

    @property
    def awaits_store(self) -> bool:
        return self._leadership.awaits_store

    @property
    def has_stood_still(self) -> bool:
        return self._leadership.has_stood_still

    @property
    def moves(self) -> bool:
        """Whether another host goes on with the job where this one goes."""
        return self._leadership.moves

    def then(self) -> str:
        """What is done after a stranger was refused, for the line that tells of it."""
        return "" if self._remote is None else self._remote.then()

    def interrupted(self, number: int, where: str = "") -> None:
        """Somebody wants the job to end."""
        if self._verdict.done():
            self._hurry.set()  # a second Ctrl-C doesn't wait for the workers
        self._settle(policy.interrupted(number, where))

    def _on_timeout(self, limit_s: float) -> None:
        verdict, remote = policy.timed_out(limit_s), self._remote
        if not self._has_begun and remote is not None and remote.missing():
            why = f"nothing was heard of {', '.join(remote.missing())}.{remote.why_missing()}".rstrip(".")
            verdict = replace(verdict, reason=policy.not_begun(limit_s, why))
        self._settle(verdict)

    def on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback of the loop: a job that is not looked after must not go on."""
        error = context.get("exception")
        _log.error("internal error: %s", context["message"], exc_info=error)
        if not self._verdict.done():
            what = context["message"] if error is None else policy.bug(error)
            self._verdict.set_result(Verdict(Action.FAIL, f"internal error: {what}", 1))

    @property
    def _has_begun(self) -> bool:
        """All hosts are there, and the first cluster is chosen."""
        return self._manager is not None and self._manager.broker.current() is not None

    @property
    def is_over(self) -> bool:
        return self._verdict.done()

    @property
    def _has_ended_well(self) -> bool:
        """Who runs yet isn't needed any more, and is ended."""
        ended = self.is_over and not self._verdict.cancelled() and self._verdict.exception() is None
        return ended and self._verdict.result().action is Action.FINISH

    def _settle(self, verdict: Verdict) -> bool:
        """Draws its consequences for the job as a whole. Whether the job goes on."""
        if self._verdict.done():
            return False
        if verdict.action in (Action.FINISH, Action.FAIL):
            if verdict.action is Action.FINISH:
                self._warn_of_copies(ended=True)
            self._verdict.set_result(verdict)
            _log.info("%s%s", verdict.reason, "; ending the job" if verdict.action is Action.FAIL else "")
        elif verdict.reason:
            _log.warning("%s", verdict.reason)
        if verdict.action in (Action.SHRINK, Action.REPLACE):
            self._history.note(verdict.reason)
        return not self._verdict.done()

    def _warn_of_copies(self, ended: bool = False) -> None:
        """Warn once of several workers of which none has joined: they are as many separate trainings, or prepare.

        Not of workers that end too soon to have trained: `kungfu-run -np 4 hostname` is no mistake.
        """
        if self.is_over or self._manager is None or self._workers_since is None or self._manager.broker.has_placed():
            return
        size, seconds = self._coordinator.newest.size, self._loop.time() - self._workers_since
        if size > 1 and seconds >= _TRAINS_S:
            self._workers_since = None
            _log.warning("%s", policy.copies(size, seconds, ended))

    def _decide(self, event: WorkerExited | WorkerWorksOn) -> Verdict:
        return self._coordinator.decide(event, self._workers.processes.headcount())

    @property
    def _workers(self) -> WorkerManager:
        assert self._manager is not None
        return self._manager

    # ---- reports of the host manager ----

    def host_lost(self, name: str, reason: str) -> None:
        is_the_heads = name == self._options.hosts.self_name and not self.moves
        if self._options.recover is Recover.FAIL or not self._has_begun or is_the_heads:
            lost = f"host {name} is lost: {reason}" if self._options.hosts.is_several else reason
            if self._manager is not None:
                self._manager.forget_processes_on(name)
            self._settle(policy.host_lost(lost, self._exit_code))
        elif not self.is_over:
            _log.warning("host %s is lost: %s", name, reason)
            self._history.note(f"host {name} is lost: {reason}")
            self._once_it_is_noted(name, lambda: self._lose_host(name, reason))

    def _lose_host(self, name: str, reason: str) -> None:
        self._forget_host(name, reason)
        if self._remote is not None:
            self._remote.tell_lost(name)
        self._revisions.write()
        self._let_hosts_go()

    def _once_it_is_noted(self, lost: str, act: Callable[[], None]) -> None:
        """That a host has gone the others don't hear before it is on record."""
        if not self._leadership.moves:
            act()
        elif lost not in self._going:
            self._going.add(lost)
            self._in_background(self._note_and(lost, act))

    async def _note_and(self, lost: str, act: Callable[[], None]) -> None:
        if self._leadership.has_stood_still:
            await self._leadership.stand_up()
        noted = await self._note(lost=lost)
        self._going.discard(lost)
        if noted and not self.is_over and lost not in self._coordinator.hosts.lost:
            act()

    def _forget_host(self, name: str, reason: str) -> None:
        grace = self._graces.pop(name, None)
        if grace is not None:
            grace.cancel()
        self._coordinator.hosts = self._coordinator.hosts.without(name)
        self._workers.lose_host(name, reason)

    def hosts_apart(self, reason: str) -> None:
        self._settle(policy.host_lost(reason, self._exit_code))

    # A host that leaves: its launcher got a SIGTERM and has told so. From then on
    #   1. nobody new is placed there (`Hosts.check`, `Hosts.slots_by_host`), and each revision is without its workers,
    #      whoever else writes what (`Coordinator.going`). They leave as any worker does: after a step that all have
    #      agreed on, so no step and no sample is theirs that isn't the others' too;
    #   2. when they have ended and a version without the host is the chosen one, it is forgotten as a lost one is, and
    #      then it ends, with 0. Links of the version before may still hold connections with it. Whatever its workers
    #      took part in, all other links have the result of, or its workers would not have got it (link.h); and some
    #      member that stays has come that far, or no version would have been chosen. Even if not: the others hear of
    #      the loss before they miss the host, and do without as with a lost one;
    #   3. after -leave-grace whoever is left there is killed, which is a death like any other, and 2 follows without
    #      the chosen version: the next one is awaited with the dead, as ever.
    # Whatever comes between is a case of its own already: if the connection ends the host is lost; if others die, or
    # more hosts want to leave, each revision looks whether enough members stay, and the job ends where not; a size that
    # is under way is revised, and one that comes is refused where it needs the host. If members come to the end of the
    # program nobody leaves any more: the host ends with the job, or after its grace. It may come back by -join, which
    # nothing of its former part stands in the way of: processes, versions and connections are told apart (`joining`).

    @property
    def hosts(self) -> Hosts:
        return self._coordinator.hosts

    def left_s(self) -> float | None:
        return self._options.left_s(self._machine.time() - self._started_at - self._options.delay_s)

    def host_leaves(self, name: str) -> None:
        if self._resumes():
            self._leaving_early.append(name)
            return
        if self.is_over or not self._options.watch or not self._has_begun:
            self.interrupted(signal.SIGTERM, f" on host {name}")
            return
        hosts, grace_s = self._coordinator.hosts, self._options.leave_grace_s
        if name in hosts.leaving or name in hosts.lost:
            return
        _log.warning("host %s is leaving (SIGTERM): its workers do after this step", name)
        self._history.note(f"host {name} is leaving")
        self._coordinator.hosts = hosts.letting_go(name)
        self._graces[name] = self._loop.call_later(grace_s, self._on_host_grace_over, name)
        if self._has_enough_who_stay():
            self._revisions.write()
            self._let_hosts_go()

    def _has_enough_who_stay(self) -> bool:
        """While hosts leave. Otherwise the job has been ended."""
        coordinator, leaving = self._coordinator, self._coordinator.hosts.leaving
        if not leaving or coordinator.finishing:
            return True
        living = self._workers.processes.living_members()
        left = [peer for peer in living if peer.host not in leaving and peer not in coordinator.leaving]
        return self._settle(policy.hosts_leave(" and ".join(sorted(leaving)), len(left), self._options.min_size))

    def _on_host_grace_over(self, name: str) -> None:
        del self._graces[name]
        if not self.is_over:
            reason = f"was on host {name}, which leaves, for more than {self._options.leave_grace_s:g} s (-leave-grace)"
            self._workers.end_processes_on(name, reason)
            self._let_hosts_go()

    def _let_hosts_go(self) -> None:
        """Those that leave and have nothing left to do here."""
        for name in self._coordinator.hosts.leaving:
            current = self._workers.broker.current()
            is_needed = current is not None and name in current.hosts
            if self.is_over or self._workers.has_processes_on(name) or (is_needed and name in self._graces):
                continue
            self._once_it_is_noted(name, functools.partial(self._let_host_go, name))

    def _let_host_go(self, name: str) -> None:
        _log.info("host %s has left the job", name)
        self._forget_host(name, "it has left the job")
        if name == self._options.hosts.self_name:
            self._in_background(self.leave())
            return
        if self._remote is not None:
            self._remote.let_go(name)
        self._revisions.write()

    async def leave(self) -> None:
        """Its host goes, with which a job that has begun doesn't end."""
        leadership = self._leadership
        if leadership.is_deposed or self.is_over or (leadership.resumes is None and not self._has_begun):
            return
        self.has_left = True
        await leadership.leave()
        self._on_deposed("another host has the job")

    def version_followed(self) -> None:
        self._let_hosts_go()

    def objection_to(self, host: Host) -> str:
        if not self._options.watch:
            return "the job was started without -w, so no host can join it"
        if not self._has_begun:
            return "the job has not begun yet; try again when its workers run"
        if self.is_over or self._coordinator.finishing:
            return "the job is about to end"
        hosts = self._coordinator.hosts
        if host.name in hosts.leaving:
            return f"{host.name} is a host of the job, and is just leaving it; try again when it has"
        slots = hosts.slots_by_host or {}
        if host.name in slots:
            return f"{host.name} is a host of the job already"
        total = sum(slots.values()) + (host.slots or 1)
        if total > hosts.max_workers:
            return (
                f"with {host} the job's hosts would have {counted(total, 'slot')}, and it can have "
                f"{counted(hosts.max_workers, 'worker')} in all; bring fewer"
            )
        return ""

    def host_joined(self, host: Host, site: Site) -> None:
        coordinator = self._coordinator
        how = "come back to" if host.name in coordinator.hosts.names else "joined"
        coordinator.hosts = coordinator.hosts.joined_by(host)
        self._workers.add_site(site)
        self._in_background(self._leadership.act(self._write_record))
        _log.info("host %s has %s the job, with %s", host.name, how, counted(host.slots or 0, "slot"))
        self._history.note(f"host {host.name} has {how} the job")
        self._revisions.write()  # the store tells of its slots: whoever resizes fills them

    def worker_is_gone(self, process: Process) -> None:
        self._revisions.write()
        self._let_hosts_go()

    def version_unknown(self, version: int) -> None:
        if self._watcher is not None:
            self._watcher.look_now()

    def worker_works_on(self, process: Process, version: int) -> None:
        self._settle(self._decide(WorkerWorksOn(process.who, version, self._options.leave_grace_s)))

    def worker_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        self._note_end(process, standing, code, error)
        self._let_hosts_go()

    def _note_end(self, process: Process, standing: Standing, code: int, error: str) -> None:
        coordinator, who = self._coordinator, process.who
        counted_on = standing in (Standing.MEMBER, Standing.JOINING) and process.peer in coordinator.newest.workers
        finished = standing is Standing.MEMBER and code == 0
        coordinator.finishing = coordinator.finishing or finished
        if standing is Standing.STANDBY and process.dismissed:
            return  # nobody needed it
        if process.dismissed:
            code = 0  # the launcher's own doing, and told already
        elif not self.is_over and code == 0 and process.peer is not None:
            _log.info("%s %s", who, policy.how_it_ended(code))
        if finished:
            coordinator.member_finished(who)
            self._workers.standbys.expect_nobody()
        logs = self._workers.logs_of(process)
        restarts = coordinator.restarts_of(process.place, self._loop.time())
        late = coordinator.count_late(process.place, process.is_late)
        verdict = self._decide(WorkerExited(who, standing, code, error, logs=logs, restarts=restarts, late=late))
        if verdict.action is Action.FAIL and self._may_be_of_the_hosts(verdict):
            return
        if not self._settle(verdict):
            if code != 0 and logs and not self._has_ended_well:
                _log.info("what %s wrote: %s", who, logs)
            return
        if code != 0 and standing in (Standing.MEMBER, Standing.JOINING):
            if coordinator.member_failed(who, code, error, logs):
                _log.warning("the program of %s failed; the job will end with %d", who, code)
        self._go_on_without(process, standing, verdict, counted_on)

    def _may_be_of_the_hosts(self, verdict: Verdict) -> bool:
        """Whether something has happened between the hosts that a worker may have died of. That is told soon, and ends
        the job; where it isn't, the worker's death does."""
        if self.is_over or self._options.recover is not Recover.FAIL or self._remote is None:
            return False
        if self._exit_code is None:
            if not self._remote.is_in_trouble():
                return False
            self._exit_code = verdict.exit_code
            until = self._loop.time() + _HOSTS_TELL_S + (self._options.host_timeout_s or 0)
            self._loop.call_later(_HOSTS_NEWS_S, self._settle_unless_told, verdict, until)
        return True

    def _settle_unless_told(self, verdict: Verdict, until: float) -> None:
        if self._remote is not None and self._remote.are_apart() and self._loop.time() < until:
            self._loop.call_later(_HOSTS_NEWS_S, self._settle_unless_told, verdict, until)
        else:
            self._settle(verdict)

    def _go_on_without(self, process: Process, standing: Standing, verdict: Verdict, counted_on: bool) -> None:
        """`counted_on`: the newest cluster has the process that has ended."""
        coordinator, now = self._coordinator, self._loop.time()
        pause_s = 0.0
        if process.pid is None:  # it couldn't be started, and most likely the next one can't either, at once
            pause_s = min(_START_PAUSE_S * 2 ** coordinator.restarts_of(process.place, now), _MAX_START_PAUSE_S)
        if standing is Standing.STANDBY:
            if verdict.action is Action.REPLACE:
                coordinator.count_restart(process.place, now)
            else:
                self._workers.standbys.keep_fewer()
            self._loop.call_later(pause_s, self._workers.standbys.keep)
        elif verdict.action in (Action.SHRINK, Action.REPLACE):
            if verdict.action is Action.REPLACE and counted_on:
                if pause_s:
                    coordinator.pausing.append(process.place)
                    self._pause = self._pause or self._loop.call_later(pause_s, self._on_pause_over)
                else:
                    coordinator.vacant.append(process.place)
            self._revisions.write()

    def _on_pause_over(self) -> None:
        self._coordinator.end_pause()
        self._pause = None
        self._revisions.write()

    def version_chosen(self, cluster: Cluster, step: int | None) -> None:
        self._history.chosen(cluster, step)

    def worker_leaves(self, peer: PeerID) -> None:
        workers, leaving = self._workers, self._coordinator.leaving
        for process in workers.processes.of_standing(Standing.MEMBER, Standing.JOINING):
            if process.peer == peer:
                if peer in leaving:  # and was told to end beside
                    self._end_who_is_kept()
                    return
                left = [other for other in workers.processes.living_members() if other != peer and other not in leaving]
                verdict = policy.leaves(process.who, len(left), self._options.min_size)
                if not self._settle(verdict):
                    return
                if verdict.action is Action.SHRINK:
                    leaving.add(peer)
                    self._revisions.write()
                else:
                    workers.tell_again_to_end({peer})
                    workers.broker.stays(peer)
                return

    def _end_who_is_kept(self) -> None:
        """Where all who are left wanted to leave, nobody goes: those of them who got a SIGTERM end by it."""
        living = self._workers.processes.living_members()
        if self._coordinator.leaving.issuperset(living):
            self._workers.tell_again_to_end(living)

    # ---- the cluster changes ----

    def next_revision(self) -> Cluster | None:
        if self.is_over or self._coordinator.finishing:
            return None
        self._end_who_is_kept()
        if not self._has_enough_who_stay():
            return None
        processes, server = self._workers.processes, self._begun.server
        try:
            return self._coordinator.revision(
                -1 if server is None else server.store.version,
                self._workers.broker.ended_in(self._coordinator.newest),
                processes.living_members(),
                processes.taken_ports(),
            )
        except ValueError as error:
            self.drop_newcomers(str(error))
            return None

    def drop_newcomers(self, reason: str) -> None:
        _log.error("no new worker is started: %s", reason)
        self._coordinator.vacant.clear()

    def _on_written(self, cluster: Cluster | None) -> None:
        """To the config server of this process. None: a client has deleted the cluster, without which nothing can be
        resized: it is put back."""
        coordinator, server = self._coordinator, self._begun.server
        if cluster is not None:
            self.on_cluster(cluster)
        elif server is not None and not self.is_over and not coordinator.finishing:
            wanted = coordinator.newest
            again = replace(wanted.following(wanted.workers), version=server.store.version + 1)
            _log.warning("config server: the deleted cluster is put back version=%d", again.version)
            with contextlib.suppress(HostError):  # all its workers have died: the revision without them follows
                server.put(again.to_json(), self._begun.writer)

    def _check(self, cluster: Cluster) -> None:
        """HostError where nothing good would come of `cluster`, or where nobody can tell: it is a stranger's wish."""
        try:
            self._look_at_wish(cluster)
        except HostError:
            raise
        except Exception as error:
            _log.exception("cluster version %d is refused: internal error", cluster.version)
            raise HostError(f"internal error: {policy.bug(error)}") from error

    def _look_at_wish(self, cluster: Cluster) -> None:
        options, coordinator = self._options, self._coordinator
        members, ended = list(coordinator.newest.workers), []
        if self._has_begun:
            # Who lists only workers that have just died did not know it: `revised` sees to it that the state is kept.
            ended = self._workers.broker.ended_in(coordinator.newest)
            members = [*self._workers.processes.living_members(), *ended]
        going = coordinator.going(members)
        coordinator.hosts.check(cluster, members, ended, going)
        if cluster.size < options.min_size and cluster.writer != self._begun.writer:
            raise HostError(f"a cluster of {cluster.size} is below -min-np {options.min_size}")

    def on_cluster(self, cluster: Cluster) -> None:
        """A newer cluster is wanted. Its workers start now; the members go over to it when they have agreed to."""
        coordinator = self._coordinator
        if cluster.version <= coordinator.last_version or self.is_over:
            return
        if not self._options.watch:
            _log.warning("the config server has a new cluster, which needs -w to be followed")
            return
        if not self._has_begun:
            self._early = cluster
            size = counted(cluster.size, "worker")
            _log.info("cluster version %d is wanted: %s, once the job has begun", cluster.version, size)
            return
        workers, broker = self._workers, self._workers.broker
        coordinator.last_version = cluster.version
        own = cluster.writer == self._begun.writer
        try:
            self._check(cluster)
        except HostError as error:  # a config server of its own does not know this host
            _log.error("cluster version %d is refused: %s", cluster.version, error)
            broker.refuse(cluster.version, str(error))
            self._history.wanted(cluster, coordinator.newest, self._begun.writer, refused=str(error))
            self._revisions.write()
            return
        _log.info("cluster version %d is wanted: %s", cluster.version, counted(cluster.size, "worker"))
        self._history.wanted(cluster, coordinator.newest, self._begun.writer)
        workers.warn_of_crowd(cluster)
        living, joining = workers.processes.living_members(), workers.processes.of_standing(Standing.JOINING)
        if cluster.writer == WRITER_WHO_EVICTS:
            broker.note_evicted(set(coordinator.newest.workers) - set(cluster.workers))
        broker.admit(cluster)
        ended = broker.ended_in(cluster)
        replacing = coordinator.accept(cluster, own, ended, living)
        if self._pause is not None and not coordinator.pausing:
            self._pause.cancel()
            self._pause = None
        workers.dismiss_who_is_left_out(joining)
        if ended or coordinator.hosts.leaving or coordinator.has_other_hosts(cluster):
            self._revisions.write()
        workers.start_missing(cluster, replacing)

    # ---- end ----

    async def _end(self, verdict: Verdict | None) -> None:
        """Whatever the state: ends the workers, waits for their last words, closes everything."""
        failed = verdict is None or verdict.action is Action.FAIL
        if verdict is None and self._leadership.resumes is not None:
            await self._leadership.leave()  # a job that runs isn't this head's to end: another one may go on with it
        manager = self._manager
        if verdict is not None and verdict.action is Action.FAIL:
            self.last_words = f"kungfu-run: {verdict.reason}"
        is_noted = await self._note_the_end(verdict)
        number = signal.SIGTERM if verdict is None else verdict.signal_to_workers
        if manager is not None and not self.is_deposed and manager.tell_to_end(number):
            waits = [asyncio.ensure_future(event.wait()) for event in (manager.emptied, self._hurry)]
            await asyncio.wait(waits, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        # A deposed head doesn't end the job. If nobody else can any more, it says that all workers have finished.
        has_finished = self._leadership.is_gone and not failed
        if self.is_deposed and not has_finished and self._remote is not None:
            self._remote.leave()
            await self._closers.aclose()
            return
        if self._remote is not None:
            if verdict is None:
                last = self._verdict.exception() if self._verdict.done() else None
                await self._remote.end(1, f"kungfu-run: the job has not started: {last or 'it was ended'}")
            else:
                await self._remote.end(verdict.exit_code, self.last_words)
        if is_noted:
            await self._leadership.give_back()
        await self._closers.aclose()

    async def _note_the_end(self, verdict: Verdict | None) -> bool:
        """Before anybody hears of it, a worker too: who dies of it would be taken for dead by the next head. False
        where the store is away, for which nobody waits: a write may be under way, and the seat is left to its lease."""
        if not self._leadership.sits or verdict is None:
            return True
        try:
            return await within(END_S, self._note(end=(verdict.exit_code, self.last_words)))
        except asyncio.TimeoutError:
            return False
