"""One job from its first worker to its last process: an event loop joins host agent, coordinator and cluster store.

What happens comes in as a report of the agent, a signal, or a cluster that somebody has written; the coordinator says
what it means, and here that is done. All of it runs on one asyncio loop in the launcher's main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import replace
from typing import Any

from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster, PeerID
from ms_kungfu.launcher import policy
from ms_kungfu.launcher.agent import GRACE_S, HostAgent
from ms_kungfu.launcher.coordinator import Coordinator
from ms_kungfu.launcher.hosts import HostError
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.output import Output
from ms_kungfu.launcher.policy import Action, Recover, Standing, Verdict, WorkerExited, WorkerWorksOn
from ms_kungfu.launcher.processes import Process
from ms_kungfu.launcher.remote import RemoteHosts
from ms_kungfu.launcher.revisions import Revisions, StoreWatcher
from ms_kungfu.launcher.segments import NotMadeYet
from ms_kungfu.launcher.startup import prepare
from ms_kungfu.launcher.supervisor import Supervisor

_log = logging.getLogger(__name__)
_OUTPUT_GRACE_S = 1.0
# Before another process is tried in the place of one that couldn't even be started: doubled each time.
_START_PAUSE_S = 0.1
_MAX_START_PAUSE_S = 5.0
# A host tells of a connection that has ended within 0.2 s; who is lost by it is told some seconds later.
_HOSTS_NEWS_S = 0.5
_HOSTS_TELL_S = 5.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)


class Job:
    """Runs a job once. The supervisor and the output are the caller's until `run`, which closes both."""

    def __init__(
        self, options: Options, supervisor: Supervisor, output: Output, machine: Machine | None = None
    ) -> None:
        self._options = options
        self._supervisor = supervisor
        self._output = output
        self._machine = Machine() if machine is None else machine
        self._agent: HostAgent | None = None
        self._remote: RemoteHosts | None = None
        self._watcher: StoreWatcher | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._exit_code: int | None = None  # of the first worker that has ended while a host's loss is about to be told
        self._beginning: asyncio.Future[None] | None = None
        self._closers = contextlib.AsyncExitStack()

    async def run(self) -> int:
        """The job's exit code. StartError where it never started. Nothing of the job is left when it returns."""
        loop = self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = loop.create_future()
        self._hurry = asyncio.Event()
        self._catch_signals()
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
        options, machine = self._options, self._machine
        start = self._begun = await prepare(
            options,
            machine,
            self._closers,
            check=self._check,
            on_change=lambda cluster: None if cluster is None else self.on_cluster(cluster),
            on_secret_left=lambda file: self._supervisor.remove_at_end(file.path, file.inode),
        )
        self._coordinator = Coordinator(options, start.first, start.writer)
        self._revisions = Revisions(self, self._coordinator, start, machine)
        if options.hosts.is_several:
            remote = self._remote = RemoteHosts(options, machine, start, self)
            self._closers.push_async_callback(remote.close)
            await remote.gather(start.join_timeout_s)
        agent = HostAgent(
            options, machine, self._supervisor, self._output, start, self._coordinator, self, self._remote
        )
        self._agent = agent
        self._closers.callback(agent.close)
        if options.timeout_s is not None:
            self._loop.call_later(options.timeout_s, self._settle, policy.timed_out(options.timeout_s))
        await agent.start()
        if options.watch and start.store is not None:
            self._watcher = StoreWatcher(
                start.store,
                lambda: replace(self._coordinator.newest, version=self._coordinator.last_version),
                lambda cluster: agent.from_thread(self.on_cluster, cluster),
                machine,
            )
            self._closers.callback(self._watcher.stop)

    # ---- what happens ----

    def _catch_signals(self) -> None:
        for number in _ENDING_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            self._loop.add_signal_handler(number, self._on_signal, number)
        for number in _PASSED_ON:
            self._loop.add_signal_handler(number, self._supervisor.signal, number)

    def _on_signal(self, number: int) -> None:
        self.interrupted(number)

    def interrupted(self, number: int, where: str = "") -> None:
        if self._verdict.done():
            self._hurry.set()  # a second Ctrl-C doesn't wait for the workers
        self._settle(policy.interrupted(number, where))

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in one of the callbacks below: a job that is not looked after must not go on."""
        error = context.get("exception")
        _log.error("internal error: %s", context["message"], exc_info=error)
        if not self._verdict.done():
            self._verdict.set_result(Verdict(Action.FAIL, f"internal error: {error or context['message']}", 1))

    @property
    def is_over(self) -> bool:
        return self._verdict.done()

    def _settle(self, verdict: Verdict) -> bool:
        """Draws its consequences for the job as a whole. Whether the job goes on."""
        if self._verdict.done():
            return False
        if verdict.action in (Action.FINISH, Action.FAIL):
            self._verdict.set_result(verdict)
            _log.info("%s%s", verdict.reason, "; ending the job" if verdict.action is Action.FAIL else "")
        elif verdict.reason:
            _log.warning("%s", verdict.reason)
        if verdict.action is Action.REST:
            self._host.send_everybody_away()
            self._revisions.write()
        return not self._verdict.done()

    def _decide(self, event: WorkerExited | WorkerWorksOn) -> Verdict:
        return self._coordinator.decide(event, self._host.processes.headcount())

    @property
    def _host(self) -> HostAgent:
        assert self._agent is not None
        return self._agent

    # ---- reports of the host agent ----

    def supervisor_lost(self) -> None:
        self._settle(policy.supervisor_lost())

    def host_lost(self, name: str, reason: str) -> None:
        started = self._agent is not None and self._agent.broker.current() is not None
        if self._options.recover is Recover.FAIL or not started:
            self._settle(policy.host_lost(f"host {name} is lost: {reason}", self._exit_code))
        elif not self.is_over:
            _log.warning("host %s is lost: %s", name, reason)
            self._coordinator.hosts = self._coordinator.hosts.without(name)
            self._host.lose_host(name, reason)
            self._revisions.write()

    def hosts_apart(self, reason: str) -> None:
        self._settle(policy.host_lost(reason, self._exit_code))

    def worker_is_gone(self, process: Process) -> None:
        self._revisions.write()

    def version_unknown(self, version: int) -> None:
        if self._watcher is not None:
            self._watcher.look_now()

    def worker_works_on(self, process: Process, version: int) -> None:
        self._settle(self._decide(WorkerWorksOn(process.who, version, self._options.leave_grace_s)))

    def worker_ended(self, process: Process, standing: Standing, code: int, error: str) -> None:
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
            self._host.standbys.expect_nobody()
        logs = self._host.logs_of(process)
        restarts = coordinator.restarts_of(process.place, self._loop.time())
        verdict = self._decide(WorkerExited(who, standing, code, error, logs=logs, restarts=restarts))
        if verdict.action is Action.FAIL and self._may_be_of_the_hosts(verdict):
            return
        if not self._settle(verdict):
            if code != 0 and logs:
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
                self._host.standbys.keep_fewer()
            self._loop.call_later(pause_s, self._host.standbys.keep)
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

    def worker_leaves(self, peer: PeerID) -> None:
        host, leaving = self._host, self._coordinator.leaving
        for process in host.processes.of_standing(Standing.MEMBER, Standing.JOINING):
            if process.peer == peer:
                if peer in leaving:  # and was told to end beside
                    self._end_who_is_kept()
                    return
                left = [other for other in host.processes.living_members() if other != peer and other not in leaving]
                verdict = policy.leaves(process.who, len(left), self._options.min_size)
                if not self._settle(verdict):
                    return
                if verdict.action is Action.SHRINK:
                    leaving.add(peer)
                    self._revisions.write()
                else:
                    host.tell_again_to_end({peer})
                    host.broker.stays(peer)
                return

    def _end_who_is_kept(self) -> None:
        """Where all who are left wanted to leave, nobody goes: those of them who got a SIGTERM end by it."""
        living = self._host.processes.living_members()
        if self._coordinator.leaving.issuperset(living):
            self._host.tell_again_to_end(living)

    # ---- the cluster changes ----

    def next_revision(self) -> Cluster | None:
        if self.is_over:
            return None
        if self._coordinator.starts_nobody:
            current = self._host.broker.current()
            return self._coordinator.at_rest(current) if self._coordinator.resting and current else None
        self._end_who_is_kept()
        processes, server = self._host.processes, self._begun.server
        try:
            return self._coordinator.revision(
                -1 if server is None else server.store.version,
                self._host.broker.ended_in(self._coordinator.newest),
                processes.living_members(),
                processes.taken_ports(),
            )
        except ValueError as error:
            self.drop_newcomers(str(error))
            return None

    def drop_newcomers(self, reason: str) -> None:
        _log.error("no new worker is started: %s", reason)
        self._coordinator.vacant.clear()

    def _check(self, cluster: Cluster) -> None:
        """HostError where nothing good would come of `cluster`."""
        options, host, coordinator = self._options, self._host, self._coordinator
        # Who lists only workers that have just died did not know it: `revised` sees to it that the state is kept.
        ended = host.broker.ended_in(coordinator.newest)
        members = [*host.processes.living_members(), *ended]
        coordinator.hosts.check(cluster, members if not coordinator.resting else (), ended)
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
        host, broker = self._host, self._host.broker
        coordinator.last_version = cluster.version
        own = cluster.writer == self._begun.writer
        if coordinator.resting and not coordinator.begins(cluster):
            coordinator.newest = cluster
            self._revisions.write()
            return
        try:
            self._check(cluster)
        except HostError as error:  # a config server of its own does not know this host
            _log.error("cluster version %d is refused: %s", cluster.version, error)
            broker.refuse(cluster.version, str(error))
            if coordinator.resting:
                coordinator.newest = replace(coordinator.newest, writer="")  # the store has to say so once more
            self._revisions.write()
            return
        _log.info("cluster version %d is wanted: %d workers", cluster.version, cluster.size)
        host.warn_of_crowd(cluster)
        living, joining = host.processes.living_members(), host.processes.of_standing(Standing.JOINING)
        if coordinator.resting:
            broker.forget_the_ended()
            coordinator.begin_anew()
        if cluster.writer == WRITER_WHO_EVICTS:
            broker.note_evicted(set(coordinator.newest.workers) - set(cluster.workers))
        broker.admit(cluster)
        ended = broker.ended_in(cluster)
        replacing = coordinator.accept(cluster, own, ended, living)
        if self._pause is not None and not coordinator.pausing:
            self._pause.cancel()
            self._pause = None
        if coordinator.resting:
            try:
                broker.choose(cluster.version)
            except NotMadeYet:
                self._beginning = asyncio.ensure_future(self._begin_when_made(cluster, joining, ended, replacing))
                return
            except Exception as error:  # whatever the runtime or the kernel has against it
                self._cant_begin(cluster, error)
                return
            self._end_rest()
        self._go_on_with(cluster, joining, ended, replacing)

    def _go_on_with(
        self, cluster: Cluster, joining: list[Process], ended: list[PeerID], replacing: list[PeerID]
    ) -> None:
        self._host.dismiss_who_is_left_out(joining)
        if ended:
            self._revisions.write()
        self._host.start_missing(cluster, replacing)

    def _end_rest(self) -> None:
        coordinator = self._coordinator
        coordinator.resting = coordinator.finishing = False
        coordinator.requested = None
        self._loop.call_later(self._machine.standby_delay_s, self._host.standbys.keep)

    def _cant_begin(self, cluster: Cluster, error: Exception) -> None:
        _log.error("cluster version %d can't be run, write it once more: %s", cluster.version, error)

    async def _begin_when_made(
        self, cluster: Cluster, joining: list[Process], ended: list[PeerID], replacing: list[PeerID]
    ) -> None:
        """After a rest, where several hosts have to get ready first."""
        try:
            await self._host.choose(cluster)
        except Exception as error:  # whatever one of them has against it
            if self._coordinator.newest is cluster:  # else somebody has written another one meanwhile
                self._cant_begin(cluster, error)
            return
        if not self.is_over:
            self._end_rest()
            self._go_on_with(cluster, joining, ended, replacing)

    # ---- end ----

    async def _end(self, verdict: Verdict | None) -> None:
        """Whatever the state: ends the workers, waits for their last words, closes everything."""
        failed = verdict is None or verdict.action is Action.FAIL
        self._supervisor.wake()
        agent = self._agent
        if agent is not None and agent.tell_to_end(signal.SIGTERM if verdict is None else verdict.signal_to_workers):
            waits = [asyncio.ensure_future(event.wait()) for event in (agent.emptied, self._hurry)]
            await asyncio.wait(waits, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        last_words = None
        if verdict is not None and verdict.action is Action.FAIL:
            last_words = f"kungfu-run: {verdict.reason}"
        if self._remote is not None:
            if verdict is None:
                last = self._verdict.exception() if self._verdict.done() else None
                await self._remote.end(1, f"kungfu-run: the job has not started: {last or 'it was ended'}")
            else:
                await self._remote.end(verdict.exit_code, last_words)
        await self._closers.aclose()
        self._supervisor.close()
        # Who couldn't be killed keeps its pipes open for as long as it hangs.
        left = agent is not None and len(agent.processes) > 0
        self._output.close(_OUTPUT_GRACE_S if failed or left else None, last_words)
