"""The workers of a job: it starts, watches and ends them, each by way of its host, and says what becomes of them.

What only a host can know it tells (`remote`): processes, heartbeats. Places are the broker's, which has each version's
shared memory made by its hosts. What is to be done about a report, and which cluster is wanted, is the coordinator's.

Everything here runs in the launcher's event loop; the news of the broker's threads is handed over to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import signal
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Callable, Protocol, TypeVar

from ms_kungfu import env
from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.environment import environment_of
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.controller.remote import RemoteHosts
from ms_kungfu.launcher.controller.sites import AbsentSite, Site
from ms_kungfu.launcher.controller.standbys import StandbyKeeper
from ms_kungfu.launcher.controller.startup import Start
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.events import CANT_RUN, Exited, Started
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.hosts import MANY_PER_CORE
from ms_kungfu.launcher.state.policy import Recover, Standing, how_it_ended, peers_to_start
from ms_kungfu.launcher.state.seat import all_losses
from ms_kungfu.launcher.state.segment import NotMadeYet
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.state.stuck import StuckWatch, stuck_reason, stuck_sure_s
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Everything has to be gone within 2 s of a death or a signal: what is left of them is for SIGKILL and for reaping.
GRACE_S = 1.0
_RETRY_S = 0.2
_FIX_CORES_S = 8.0  # for moving all threads of all workers; a worker waits longer
_STACK_S = 1.0  # for a worker to write its stack
_OUT_GRACE_S = 10.0  # for whoever can't go on, to end by itself
_UNFOLLOWED_S = 30.0  # for members to look for a change; their first step may take that long
_UNANSWERED_KILL_S = 10.0  # whoever doesn't run for so long, not even to die, is gone without


class Reports(Protocol):
    """Who is told. All calls come in the event loop."""

    @property
    def is_over(self) -> bool:
        """Whether the job is ending: nobody wants to hear anything more, nor has anybody started."""
        ...

    @property
    def awaits_store(self) -> bool:
        """A decision waits for the store."""
        ...

    def worker_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        """It has, or is as good as dead. `error`: why it never ran, or was killed."""

    def worker_is_gone(self, process: Process) -> None:
        """One that had been given up: its port is free."""

    def worker_works_on(self, process: Process, version: int) -> None:
        """It left the cluster with `version`, and its grace is over."""

    def version_chosen(self, cluster: Cluster, step: int | None) -> None:
        """The members go over to it, after this step where they have told of any."""

    def worker_leaves(self, peer: PeerID) -> None:
        """Somebody has asked that `peer` leave, and was granted it."""

    def version_unknown(self, version: int) -> None:
        """A member asks for one that has not been admitted."""

    def version_followed(self) -> None:
        """All that a chosen version brings here has been done, and it isn't the first."""


@dataclass(eq=False)
class WorkerManager:
    """Of all of them, from `start` or `resume` to `close`. `versions`: what a head before this one had chosen;
    `on_choice` and `may_announce`: of the broker."""

    options: Options
    machine: Machine
    begun: Start
    coordinator: Coordinator
    reports: Reports
    remote: RemoteHosts
    make_broker: Callable[..., Broker] = Broker
    versions: ClusterVersions | None = None
    on_choice: Callable[[int], None] | None = None
    may_announce: Callable[[int], bool] | None = None
    sites: dict[str, Site] = field(init=False)
    standbys: StandbyKeeper = field(init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count()
        self._places = itertools.count()
        self._trouble = ""  # the last with a version's shared memory
        self._stopped: dict[str, set[int]] = {}  # host -> those that were stopped when it was looked at
        self._follows = False  # the members have gone over to a version
        self._unfollowed: asyncio.TimerHandle | None = None  # once a job, where they don't
        self._retry: asyncio.TimerHandle | None = None  # of what it has kept from being announced
        self.emptied = asyncio.Event()  # no process is left
        sure_s = stuck_sure_s(env.COLLECTIVE_TIMEOUT.get(self.machine.environ))
        self._stuck_watch: StuckWatch[tuple[PeerID, int]] = StuckWatch(sure_s)
        self._stuck_look_s = sure_s / 2
        self._made = asyncio.Event()  # a segment over several hosts, or it can't be
        reports, from_thread = self.reports, self.from_thread
        self.broker = self.make_broker(
            make_segment=self.remote.make_segment,
            recovers=self.options.recover is not Recover.FAIL,
            min_size=self.options.min_size,
            on_unknown_version=lambda version: from_thread(reports.version_unknown, version),
            on_chosen=lambda cluster, step: from_thread(self._on_chosen, (cluster, step)),
            on_ready=lambda who: from_thread(self._on_ready, who),
            on_trouble=lambda trouble: from_thread(self._on_trouble, trouble),
            on_announced=lambda version: from_thread(self._on_announced, version),
            on_cores=self._on_cores,
            on_expected=lambda expected: from_thread(self.standbys.expect, expected),
            on_leave=(lambda peer: from_thread(reports.worker_leaves, peer)) if self.options.watch else None,
            on_choice=self.on_choice,
            may_announce=self.may_announce,
            begun=self.versions,
        )
        self._here = self.options.host.name
        self.sites = dict(self.remote.sites)
        self.processes = ProcessTable(self.broker, self.sites)
        self.standbys = StandbyKeeper(
            self.options, self.machine, self.broker, self.processes, self.sites, self.coordinator,
            is_over=lambda: reports.is_over,
            new_process=lambda log_name: Process(next(self._keys), log_name, self._here),
            start=self._start_standby,
            dismiss=self._dismiss,
        )  # fmt: skip

    async def start(self, note: Callable[[], Awaitable[bool]]) -> None:
        """Chooses the first cluster and starts its workers, once that is on record (`note`, false where somebody else
        has the job). StartError where it can't have shared memory."""
        self.remote.attend(self)
        first = self.coordinator.newest
        self.broker.admit(first)
        await self._choose_first(first)
        if not await note():
            return
        self.start_missing(first)
        self.standbys.keep()
        self._keep_looking_for_the_stuck()

    def resume(self, reports: Mapping[str, m.Report], wanted: Cluster | None) -> None:
        """Goes on where another head has stopped, with what the hosts report and the cluster that is `wanted`."""
        assert self.versions is not None
        versions, known = self.versions, sorted(self.versions.clusters)
        living = [worker for report in reports.values() for worker in report.workers if worker.code is None]
        chosen = versions.chosen or 0
        newcomers = {PeerID.parse(w.peer): w.incarnation for w in living if w.incarnation > chosen}
        losses = {version: all_losses(list(reports.values()), version) for version in known}
        self.broker.resume(
            {v: self.remote.take_over(versions.clusters[v], self.options.recover is not Recover.FAIL) for v in known},
            losses, [(PeerID.parse(peer), since) for report in reports.values() for peer, since in report.placed],
            newcomers, wanted,
        )  # fmt: skip
        self._keys = itertools.count(self.begun.attempts)  # which no head before has used
        self.remote.close_all_but(known, reports)
        self.sites.update({name: AbsentSite(name) for name in self.coordinator.hosts.names if name not in self.sites})
        current = self.broker.current()
        assert current is not None
        told = [current.workers[rank] for rank, *_ in losses[current.version]]
        ended: list[tuple[int, Process, Exited]] = []
        for report in reports.values():
            for worker in report.workers:
                peer = PeerID.parse(worker.peer)
                if worker.code is not None and not versions.concerns(peer, worker.incarnation):
                    continue
                process = self._known(worker.key, worker.log_name, peer, worker.incarnation, worker.rank)
                process.pid, process.device = worker.pid, worker.device
                if worker.code is not None:
                    place = told.index(peer) if peer in told else len(told)
                    ended.append((place, process, Exited(worker.key, worker.code, worker.error)))
        for version in known:
            cluster = versions.clusters[version]
            gone = versions.ended_in(cluster)
            for rank, peer in enumerate(cluster.workers):
                incarnation = versions.meant_by(peer, version)
                is_lost = peer.host not in reports
                if version <= versions.lost_hosts.get(peer.host, -1):
                    continue  # that its host has gone the head before had on record
                if peer in gone or not (is_lost or version == current.version) or self._has(peer, version):
                    continue
                process = self._known(next(self._keys), "", peer, incarnation, rank)
                if not is_lost:  # the head before hadn't come to starting it
                    ended.append((len(told), process, Exited(process.key, CANT_RUN, "was not started")))
        self.remote.attend(self)
        for _, process, exited in sorted(ended, key=lambda each: each[0]):
            self._on_exit(process, exited)
        for process in self.processes.of_standing(Standing.MEMBER):
            if process.peer is not None and process.peer in told and process.host in reports:
                process.given_up = True  # it couldn't be killed
                self.broker.mark_lost(process.peer, "it was given up", process.incarnation, True, False)
        for process in self.processes.of_standing(Standing.JOINING):
            process.join_timer = self._loop.call_later(
                self.begun.join_timeout_s, self._end_one_that_is_late, process, process.incarnation
            )
        for process in self.processes.of_standing(Standing.LEAVING):
            process.leave_timer = self._loop.call_later(
                self.options.leave_grace_s, self._on_grace_over, process, current.version
            )
        self._keep_looking_for_the_stuck()

    def _has(self, peer: PeerID, version: int) -> bool:
        """Whether the process is known that `version` means by this peer."""
        return any(p.peer == peer and self.broker.belongs(peer, p.incarnation, version) for p in self.processes)

    def _known(self, key: int, log_name: str, peer: PeerID, incarnation: int, rank: int) -> Process:
        """A process that a head before this one has started."""
        process = self.processes.by_key[key] = Process(key, log_name, peer.host, peer, incarnation, rank)
        process.place = next(self._places)
        return process

    async def _choose_first(self, cluster: Cluster) -> None:
        """Over several hosts it is tried again, as later ones are: what has failed may be a connection between two."""
        until = self._loop.time() + self.begun.join_timeout_s
        told: set[str] = set()
        while True:
            try:
                await self.choose(cluster)
                return
            except Exception as error:  # whatever the runtime or the kernel has against it
                trouble = f"the shared memory of {counted(cluster.size, 'worker')} can't be made: {error}"
                if len(cluster.hosts) == 1 or self._loop.time() >= until:
                    raise StartError(trouble) from error
            if trouble not in told:
                told.add(trouble)
                _log.warning("%s; it is tried again", trouble)
            await asyncio.sleep(_RETRY_S)

    async def choose(self, cluster: Cluster) -> None:
        """The launcher's own choice, once the shared memory is there. Raises what its hosts have against that."""
        while True:
            self._made.clear()
            try:
                self.broker.choose(cluster.version)
                return
            except NotMadeYet:
                await self._made.wait()

    def segment_was_made(self) -> None:
        """Or can't be: on the hosts of some version."""
        self._made.set()
        self.broker.announce()

    def close(self) -> None:
        self.broker.close()

    def tell_to_end(self, number: int) -> bool:
        """Sends all workers a signal. Whether there are any; `emptied` tells when they are gone."""
        if not len(self.processes):
            return False
        self.broker.end()  # whoever asks to leave because of the signal is told to go
        for site in self.sites.values():
            site.signal(number)
            site.signal(signal.SIGCONT)  # a stopped process has to run to end
        return True

    def logs_of(self, process: Process) -> str:
        """Names its log files; "" without -logdir."""
        paths = ", ".join(map(str, self.sites[process.host].log_paths(process.log_name)))
        return f"{paths} on {process.host}" if paths and process.host != self._here else paths

    def warn_of_crowd(self, cluster: Cluster) -> None:
        """Before `cluster` is wanted."""
        cores = sum(len(site.shares.cores) for site in self.sites.values())
        if cluster.size > max(MANY_PER_CORE * cores, self.coordinator.newest.size):
            _log.warning(
                "%d workers are far more than the %s of the job: if that was a mistake, a resize to another size "
                "takes it back at once", cluster.size, counted(cores, "core"),
            )  # fmt: skip

    # ---- what happens ----

    def from_thread(self, function: Callable[[T], None], argument: T) -> None:
        """Has it called in the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(function, argument)

    def on_event(self, host: str, event: Started | Exited) -> None:
        """A host tells of a process of its own."""
        process = self.processes.by_key.get(event.key)
        if process is None or process.host != host:
            _log.warning("%s tells of a process %d that it doesn't have", host, event.key)
        elif isinstance(event, Exited):
            self._on_exit(process, event)
        else:
            process.pid = event.pid
            _log.info("%s started", process.who)

    def _on_exit(self, process: Process, event: Exited) -> None:
        standing = self.processes.standing(process)
        del self.processes.by_key[process.key]
        if not len(self.processes):
            self.emptied.set()
        for timer in (process.join_timer, process.leave_timer):
            if timer is not None:
                timer.cancel()
        if process.given_up:
            _log.info("%s is gone at last", process.who)
            if process.peer is not None:
                self.broker.mark_reaped(process.peer, process.incarnation)
            self.reports.worker_is_gone(process)
            return
        self._has_ended(process, standing, event.code, process.killed_because or event.error)

    def _has_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
        if process.peer is not None:
            reason = self.broker.gave_up(process.peer, process.incarnation) if code == 0 and not error else ""
            if reason and self.options.recover is not Recover.FAIL:
                # It hasn't finished, whatever it says: the others wait in what it was interrupted in.
                code, error = 1, f"could not go on ({reason}) and {how_it_ended(code)}"
            # First of all, because the survivors wait for it. One that has finished is missed rather than gone without.
            self.broker.mark_lost(
                process.peer,
                error or how_it_ended(code),
                process.incarnation,
                recover=standing is not Standing.MEMBER or code != 0,
                reaped=not process.given_up,
            )
        self.reports.worker_ended(process, standing, code, error)

    def lose_host(self, name: str, why: str) -> None:
        """A host is lost, and with it all of its workers: to the others they have died, at once."""
        gone = [(process, self.processes.standing(process)) for process in self.processes if process.host == name]
        reason = f"was on host {name}, which was lost: {why}"
        for process, _ in gone:
            del self.processes.by_key[process.key]
            for timer in (process.join_timer, process.leave_timer):
                if timer is not None:
                    timer.cancel()
        if not len(self.processes):
            self.emptied.set()
        ended = [(p.peer, p.incarnation) for p, _ in gone if p.peer is not None]
        self.broker.lose_host(name, ended, reason)
        for process, standing in sorted(gone, key=lambda each: each[0].rank):
            if not process.given_up:  # of which that was told
                self.reports.worker_ended(process, standing, 1, process.killed_because or reason)

    def forget_processes_on(self, host: str) -> None:
        """It is lost, and the job ends by that: nobody waits for them."""
        for process in self.processes:
            if process.host == host:
                del self.processes.by_key[process.key]
        if not len(self.processes):
            self.emptied.set()

    def has_processes_on(self, host: str) -> bool:
        """That may end yet."""
        return any(process.host == host and not process.given_up for process in self.processes)

    def end_processes_on(self, host: str, reason: str) -> None:
        """Who is still in the cluster dies by it, as by anything else; who has left it is told to end."""
        for process in self.processes:
            if process.host != host or process.given_up or process.killed_because or process.dismissed:
                continue
            if self.processes.standing(process) is Standing.LEAVING:
                _log.warning("%s, which has left the cluster, is ended: %s", process.who, reason)
                self._dismiss(process)
            else:
                self._kill(process, f"{reason} and was killed")

    def add_site(self, site: Site) -> None:
        """A host that has joined the job, or come back to it."""
        site.shares.each = next(iter(self.sites.values())).shares.each  # all the same, whoever has fixed it
        self.sites[site.name] = site
        self.broker.host_is_back(site.name)

    def _on_chosen(self, chosen: tuple[Cluster, int | None]) -> None:
        """The members have agreed on a version and are going over to it, after a step where they have told of any."""
        cluster, step = chosen
        self._follows = True
        after = "" if step is None else f", after step {step}"
        size = counted(cluster.size, "worker")
        _log.info("cluster version %d has been chosen: %s%s", cluster.version, size, after)
        self.reports.version_chosen(cluster, step)
        for process in self.processes:
            standing = self.processes.standing(process)
            if process.leave_timer is None and standing is Standing.LEAVING:
                process.leave_timer = self._loop.call_later(
                    self.options.leave_grace_s, self._on_grace_over, process, cluster.version
                )
            elif standing is Standing.MEMBER and process.peer in cluster.workers:
                process.rank = cluster.workers.index(process.peer)
        staying = self.processes.of_standing(Standing.MEMBER, Standing.JOINING, Standing.STANDBY)
        self.coordinator.leaving &= {p.peer for p in staying if p.peer is not None}
        # Whoever could not be started, for want of a descriptor perhaps, is tried again.
        self.start_missing(self.coordinator.newest)
        if self.options.affinity:
            self._move_to_cores(cluster)
        self._loop.call_later(self.machine.standby_delay_s, self.standbys.keep)
        self.reports.version_followed()

    def _move_to_cores(self, cluster: Cluster) -> None:
        """The members of `cluster` to their shares of the cores; where each has a fixed number, everybody else who
        hasn't got as many."""
        shares = {process.key: cores for process, cores in self.processes.shares(cluster)}
        for process in self.processes:
            cores, site = shares.get(process.key), self.sites[process.host]
            if cores is None and site.shares.each is not None and not process.has_its_cores:
                cores = site.shares.of(process.rank + 1)[-1]
            if cores is not None and process.pid is not None:
                site.pin(process.key, cores)
                process.has_its_cores = site.shares.each is not None

    def _on_cores(self, each: int) -> int:
        """In a thread of the broker's: a worker needs as many cores as all others have, and `each` is enough. It
        begins to train when it has the answer: how many each has, now and at every size; 0: nobody is pinned."""
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.from_thread(lambda each: self._fix_cores(each, answer), each)
        return answer.result(_FIX_CORES_S)

    def fix_cores(self, each: int) -> None:
        """As a head before this one has, where there is a number."""
        for site in self.sites.values():
            site.shares.each = site.shares.each or each or None

    def _fix_cores(self, each: int, answer: concurrent.futures.Future[int]) -> None:
        shares = [site.shares for site in self.sites.values()]  # all with the same `each`
        if self.options.affinity:
            for share in shares:
                share.each = share.each or each
            if any(process.pid is None for process in self.processes):  # the one that asks, perhaps
                self._loop.call_later(_RETRY_S, self._fix_cores, each, answer)
                return
            if not all(process.has_its_cores for process in self.processes):
                self._move_to_cores(self.broker.current() or self.coordinator.newest)
        answer.set_result(shares[0].each or 0)

    def _on_ready(self, who: tuple[PeerID, int] | int) -> None:
        """A newcomer (peer ID and incarnation), or standby number `who`, would join at once."""
        for process in self.processes.of_standing(Standing.JOINING, Standing.STANDBY):
            if who == (process.standby if process.peer is None else (process.peer, process.incarnation)):
                _log.info("%s is ready", process.who)
                if process.peer is None:
                    self.standbys.keep()  # the next one has waited for it

    def _on_announced(self, version: int) -> None:
        """All that is new in a version is ready, and the members are told."""
        if self._unfollowed is None and not self._follows:
            self._unfollowed = self._loop.call_later(_UNFOLLOWED_S, self._tell_unfollowed, version)

    def _tell_unfollowed(self, version: int, told: frozenset[str] = frozenset()) -> None:
        """`told`: of whom it has been said that they haven't joined."""
        if self._follows or self.reports.is_over:
            return
        if self.reports.awaits_store:  # nobody can follow it before the store answers, which is told already
            self._unfollowed = self._loop.call_later(_UNFOLLOWED_S, self._tell_unfollowed, version, told)
            return
        absent = frozenset(process.who for process in self._members_yet_to_join())
        if absent - told:
            _log.warning(
                "cluster version %d waits: members of the present one haven't joined that yet: %s. A worker joins at "
                "its first collective, or when it begins to train", version, ", ".join(sorted(absent)),
            )  # fmt: skip
        if absent:  # nobody can look for a change before all are there
            self._unfollowed = self._loop.call_later(_UNFOLLOWED_S, self._tell_unfollowed, version, told | absent)
        elif steps := self._steps_of_members():
            _log.warning(
                "cluster version %d waits: for %g s the workers, which are at step %d, have not followed it. They "
                "follow a change at the end of a step. With ElasticTraining.epochs() and no dataset= they do at the "
                "end of each epoch but the last one, in a loop under --msrun at the end of a pass: "
                "docs/elastic-training.md",
                version, _UNFOLLOWED_S, max(steps),
            )  # fmt: skip
        else:
            _log.warning(
                "cluster version %d waits: for %g s no worker has looked for it. A program follows changes that has "
                "KungFuElasticCallback or ElasticTraining count its steps; in one that only reduces (ms_kungfu.comm) "
                "new workers wait until the job ends, or `kungfu-run resize` wants the present size again: see "
                "docs/change-a-program.md", version, _UNFOLLOWED_S,
            )  # fmt: skip

    def _steps_of_members(self) -> list[int]:
        """The last steps of those members that count any."""
        members = [p for p in self.processes.of_standing(Standing.MEMBER) if p.peer is not None]
        told = [self.broker.progress(p.peer, p.incarnation) for p in members if p.peer is not None]
        return [progress[0] for progress in told if progress is not None]

    def _members_yet_to_join(self) -> list[Process]:
        members = self.processes.of_standing(Standing.MEMBER)
        return [p for p in members if p.peer is not None and not self.broker.is_ready(p.peer, p.incarnation)]

    def _on_trouble(self, trouble: str) -> None:
        """The shared memory of a version can't be made. The cluster is as before, until it can."""
        if self.reports.is_over:
            return
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s; the workers go on as before, and it is tried again", trouble)
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._announce_again)

    def _announce_again(self) -> None:
        self._retry = None
        self.broker.announce()

    def _on_grace_over(self, process: Process, version: int) -> None:
        """A worker that has left has had its time: nobody waits for it any more, and its place may be taken."""
        if self._is_gone(process) or process.dismissed or process.given_up or self.reports.is_over:
            return
        process.works_on = True
        self.reports.worker_works_on(process, version)
        self._clear_places()

    def _is_gone(self, process: Process) -> bool:
        return process.key not in self.processes.by_key

    # ---- who hangs ----

    def _heartbeat(self, process: Process) -> tuple[int, ...]:
        return () if process.peer is None else self.broker.heartbeat(process.peer, process.incarnation)

    def look_at(
        self, host: str, watch: HangWatch, now: float, stopped: Collection[int], is_starved: Callable[[int], bool]
    ) -> None:
        """The heartbeats of a host's workers are as they were there at `now`, by its own clock: while nothing comes
        from a host nobody counts as standing still there."""
        if self.reports.is_over:
            return
        self._stopped[host] = set(stopped)
        watched = {p.key: p for p in self.processes if p.host == host and not p.killed_because}
        beats = {key: self._heartbeat(process) for key, process in watched.items()}
        stopped_early = [key for key in stopped if key in watched and not beats[key]]
        for key in watch.hung(now, beats, stopped_early, is_starved):
            self._kill(
                watched[key], f"stood still for {self.options.peer_timeout_s:g} s (-peer-timeout) and was killed"
            )
        for process in watched.values():
            self._look_whether_it_is_out(process)

    def is_stopped(self, process: Process) -> bool:
        """Whether it was stopped by a signal when its host told of it last."""
        return process.key in self._stopped.get(process.host, ())

    def _look_whether_it_is_out(self, process: Process) -> None:
        """A worker that has failed alone in a collective or a join (Ctrl-C, no memory) has no part in anything more,
        whatever its program does: the others wait for its end (docs/recovery.md)."""
        if process.is_out or process.peer is None or process.killed_because:
            return
        reason = self.broker.gave_up(process.peer, process.incarnation)
        if reason:
            process.is_out = True
            _log.warning("%s can't go on: %s; the others wait for its end", process.who, reason)
            self._loop.call_later(_OUT_GRACE_S, self._end_one_that_is_out, process, reason)

    def _end_one_that_is_out(self, process: Process, reason: str) -> None:
        if not self._is_gone(process) and not process.killed_because and not self.reports.is_over:
            self._kill(process, f"could not go on ({reason}), had not ended after {_OUT_GRACE_S:g} s, and was killed")

    # ---- stuck workers ----

    def _keep_looking_for_the_stuck(self) -> None:
        """At all hosts together, by what each has told last: a look for each host would be quadratic."""
        if not self.reports.is_over:
            self._look_for_the_stuck()
            self._loop.call_later(self._stuck_look_s, self._keep_looking_for_the_stuck)

    def _look_for_the_stuck(self) -> None:
        """Of workers that live and never come to the collective in which the others wait, their Python stacks are
        logged. Where the others can go on without such a worker (-recover) it is ended before they give up; else they
        raise CollectiveTimeoutError, and their end is the job's."""
        found = self._stuck()
        if self.options.recover is Recover.FAIL:  # else `_end_one_that_is_stuck` sees to it
            for process in self.processes:
                if process.is_stuck and (process.peer, process.incarnation) not in found:
                    self._note_unstuck(process)
        for peer, incarnation in self._stuck_watch.look(self._loop.time(), found):
            for process in self.processes:
                is_it = (process.peer, process.incarnation) == (peer, incarnation)
                if not is_it or process.is_stuck or process.killed_because or process.pid is None:
                    continue
                process.is_stuck = True
                ends = self.options.recover is not Recover.FAIL
                variable, limit_s = self._limit_of_waits_for(process)
                self.sites[process.host].ask_for_stack(process.key)
                _log.warning(
                    "stuck worker: %s awaited_by=%s %s=%s stack=requested action=%s", process.who,
                    ",".join(f"rank {rank}" for rank in found[peer, incarnation]), variable, f"{limit_s:g}",
                    "end it" if ends else "none",
                )  # fmt: skip
                if ends:
                    self.broker.set_ending(peer, incarnation, True)
                    self._loop.call_later(_STACK_S, self._end_one_that_is_stuck, process)

    def _stuck(self) -> dict[tuple[PeerID, int], list[int]]:
        alive = [(p.peer, p.incarnation) for p in self.processes if p.peer is not None and not p.given_up]
        return self.broker.stuck(alive)

    def _end_one_that_is_stuck(self, process: Process) -> None:
        """Its stack has been written. One that has come meanwhile goes on."""
        if self._is_gone(process) or process.killed_because or process.peer is None or self.reports.is_over:
            return
        waiting = self._stuck().get((process.peer, process.incarnation))
        if waiting:
            self._kill(process, stuck_reason(waiting, *self._limit_of_waits_for(process)))
        else:
            self.broker.set_ending(process.peer, process.incarnation, False)
            self._note_unstuck(process)

    def _limit_of_waits_for(self, process: Process) -> tuple[str, float]:
        """Return the variable that limits the others' wait for this worker, and its seconds."""
        if process.peer is not None and not self.broker.is_ready(process.peer, process.incarnation):
            return env.JOIN_TIMEOUT.name, self.begun.join_timeout_s
        return env.COLLECTIVE_TIMEOUT.name, env.COLLECTIVE_TIMEOUT.get(self.machine.environ)

    def _note_unstuck(self, process: Process) -> None:
        """It has come to the collective, or the others have given up."""
        process.is_stuck = False
        _log.info("stuck worker: no rank waits for %s any more", process.who)

    # ---- ending processes ----

    def _signal(self, number: int, process: Process) -> None:
        self.sites[process.host].signal(number, process.key)

    def _kill(self, process: Process, reason: str) -> None:
        """Its end follows as an event like any other, or it is gone without."""
        process.killed_because = reason
        self._signal(signal.SIGKILL, process)
        self._loop.call_later(_UNANSWERED_KILL_S, self._give_up_on, process)

    def _give_up_on(self, process: Process) -> None:
        """SIGKILL has found no answer: the process hangs in the kernel, its cgroup is frozen, or it gets no core. The
        signal stays with it: should it run again it dies before its next instruction. To the others it is dead from now
        on: it has no way to publish any more (docs/recovery.md), and as one who has ended it is not let in anywhere."""
        if self._is_gone(process) or self.reports.is_over:
            return
        standing = self.processes.standing(process)
        process.given_up = True
        why = "hangs in the kernel, or gets no core"
        if process.host == self._here and process.pid is not None:
            why = "gets no core to end on" if self.machine.waits_for_a_core(process.pid) else "hangs in the kernel"
        process.killed_because += f", but {why}: SIGKILL has had no effect for {_UNANSWERED_KILL_S:g} s"
        self._has_ended(process, standing, -signal.SIGKILL, process.killed_because)

    def tell_again_to_end(self, peers: Collection[PeerID]) -> None:
        """Whoever got a SIGTERM and was granted to leave, and can't after all, because of those who have died since,
        ends by it, like one that isn't granted it."""
        told = self.broker.told_to_end()
        for process in self.processes.of_standing(Standing.MEMBER):
            if process.peer in peers and process.peer in told and not process.told_again:
                process.told_again = True
                _log.warning("%s was told to end, and nobody else is left to go on: it ends now", process.who)
                self._signal(signal.SIGTERM, process)

    def dismiss_who_is_left_out(self, joining: Collection[Process]) -> None:
        """Of those who were `joining`: a newer version does without them."""
        for process in joining:
            if self.processes.standing(process) is Standing.LEAVING and not process.killed_because:
                _log.info("%s is not needed any more", process.who)
                self._dismiss(process)

    def _clear_places(self) -> None:
        for process in self.processes.in_the_way():
            _log.warning("%s, which has left the cluster, is ended: its place is needed", process.who)
            self._dismiss(process)

    def _dismiss(self, process: Process) -> None:
        process.dismissed = True
        self._signal(signal.SIGTERM, process)
        self._signal(signal.SIGCONT, process)
        self._loop.call_later(GRACE_S, self._signal, signal.SIGKILL, process)

    # ---- starting processes ----

    def start_missing(self, cluster: Cluster, replacing: Collection[PeerID] = ()) -> None:
        """Starts who is new in `cluster`; those in `replacing` take the places of workers that have died."""
        coordinator = self.coordinator
        present = {p.peer for p in self.processes if p.peer is not None and self.processes.is_current(p)}
        shares = self.processes.shares_in(cluster)
        current = self.broker.current()
        joins_later = current is not None and current.version < cluster.version
        for peer in peers_to_start(cluster, present, self.broker.ended_in(cluster), coordinator.finishing):
            rank = cluster.workers.index(peer)
            if coordinator.vacant and peer in replacing:
                place = coordinator.vacant.pop(0)
                coordinator.count_restart(place, self._loop.time())
            else:
                place = next(self._places)
            process = self.processes.standby_for(rank, peer.host) if joins_later else None
            if process is not None:
                _log.info("standby %s becomes worker %d (%s, pid %s)", process.standby, rank, peer, process.pid)
            else:
                device = self.processes.choose_device(cluster, peer.host)
                process = Process(next(self._keys), f"{peer.host}.{peer.port}", peer.host, device=device)
            process.peer, process.incarnation, process.place = peer, cluster.version, place
            process.rank, process.size = rank, cluster.size
            if process.standby is not None:
                self.sites[process.host].release(process.log_name)
                self.broker.assign(process.standby, peer, cluster.version)
            else:
                self._launch(process, cluster, joins_later, shares[peer], len(shares[peer]))
            if joins_later:
                process.join_timer = self._loop.call_later(
                    self.begun.join_timeout_s, self._end_one_that_is_late, process, cluster.version
                )
        self._clear_places()

    def _start_standby(self, process: Process, cluster: Cluster, share: list[int]) -> None:
        # As many threads as its share of the cores will be; until then it may use all of them, unless it is to begin
        # with exactly its number.
        shares = self.sites[process.host].shares
        self._launch(process, cluster, True, share if shares.each else list(shares.cores), len(share))

    def _launch(self, process: Process, cluster: Cluster, joins_later: bool, cores: list[int], threads: int) -> None:
        """The supervisor tells what came of it."""
        site, pins = self.sites[process.host], self.options.affinity
        process.has_its_cores = site.shares.each is not None
        launch = m.Launch(
            process.key,
            process.log_name,
            process.rank,
            process.peer is None,
            environment_of(process, cluster, joins_later, self.options, self.coordinator.hosts, self.begun, site),
            tuple(cores) if pins else (),
            threads if pins else None,
            joins_later,
            process.device,
        )
        self.processes.by_key[process.key] = process
        self.emptied.clear()
        try:
            site.start(launch)
        except OSError as error:
            # As one that could not be run: what a death leads to is for the policy to say.
            self._loop.call_soon(self._on_exit, process, Exited(process.key, CANT_RUN, str(error.strerror)))

    def _end_one_that_is_late(self, process: Process, version: int) -> None:
        """A newcomer has had its time."""
        if process.dismissed or process.killed_because:
            return
        if process.peer is not None and not self.broker.is_ready(process.peer, process.incarnation):
            process.is_late = True
            limit = f"{self.begun.join_timeout_s:g} s (KUNGFU_JOIN_TIMEOUT)"
            self._kill(process, f"was not ready to join cluster version {version} within {limit} and was killed")
