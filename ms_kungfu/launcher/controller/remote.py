"""The controller's view of the hosts. An `AgentHandle` represents a host and its part of a version's shared memory.

Each host, including the controller's own, has an agent. The agent has connected to the controller, has proved that it
knows the job's secret, and obeys the controller. All messages to a host travel over one connection, in order. So if the
answer to a worker depends on an event, the host learns about the event before it gets the answer. If the connection
ends, the host has failed (`reachability` detects other failures). `gathering` records which hosts are missing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Collection, Mapping
from typing import Callable

from ms_kungfu import env
from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import LeadershipLease
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.controller.gathering import HostGathering
from ms_kungfu.launcher.controller.reachability import Reachability
from ms_kungfu.launcher.controller.remote_agent import PARTING_S, NodeEvents, RemoteAgent, Workers
from ms_kungfu.launcher.controller.segments import SpreadSegment
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.cpu_isa import NATIVE, other_instructions, settle
from ms_kungfu.launcher.joining import joining_host, terms_of
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.registration import objection, other_command, other_versions
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.stuck import stuck_sure_s, told_each_s
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)


class RemoteHosts:
    """All hosts of the job, including the controller's own host, whose launcher passes connections to `serve`.

    Use it in the event loop. `registration`: the registration of the controller's own host. `resumes`: whether this
    controller continues a running job, so that the hosts report their state to it.
    """

    def __init__(
        self,
        options: Options,
        machine: Machine,
        registration: m.Registration,
        start: JobStart,
        events: NodeEvents,
        resumes: bool = False,
    ) -> None:
        self.options, self.machine, self.events, self.resumes = options, machine, events, resumes
        self.name = options.hosts.self_name
        self.was_left = False  # whether a host has left this controller after the controller was paused
        self.lease: LeadershipLease | None = None  # this controller's leadership lease
        self.stuck_sure_s = stuck_sure_s(env.COLLECTIVE_TIMEOUT.get(machine.environ))
        # host -> its report, if this controller continues a running job
        self.reports: dict[str, m.ResyncReport] = {}
        self.agents: dict[str, RemoteAgent] = {}
        self.gathering = HostGathering(options, machine, self.agents, resumes)
        self.reachability = Reachability(options, self.agents, events, self.lose)
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._registration = registration
        self._holds_deadlines = False
        self._warned: set[str] = set()
        self.workers: asyncio.Future[Workers] = self._loop.create_future()
        self._attempts = start.attempts
        self._last_words: m.End | None = None  # the message that each host gets when the job ends

    async def gather(self, timeout_s: float) -> None:
        """Wait until all hosts have registered. Raise StartError if a host doesn't register within `timeout_s`."""
        self.reachability.watch()
        await self.gathering.gather(timeout_s)
        if self.options.cpu_isa != NATIVE:
            self._start.cpu_isa = settle({name: agent.cpu_isa for name, agent in self.agents.items()})
        if not self.options.hosts.is_several:
            self._start.cores = sum(len(agent.shares.cores) for agent in self.agents.values())

    async def gather_again(
        self, timeout_s: float, silent: Collection[str], time_to_ask: Callable[[], Awaitable[float]]
    ) -> None:
        """Wait until each host of a running job has registered with this controller, or is no longer expected to."""
        self.reachability.watch()
        await self.gathering.gather_again(timeout_s, silent, time_to_ask)

    def registered(self) -> list[str]:
        return [agent.name for agent in self.reachability.living()]

    def attend(self, workers: Workers) -> None:
        """Pass messages from the hosts to `workers`."""
        self.workers.set_result(workers)

    def catch_up(self) -> None:
        """Process the messages that arrived before `attend` was called."""
        for agent in list(self.agents.values()):
            early, agent.early = agent.early, []
            for said in early:
                try:
                    agent.hear(self.workers.result(), said)
                except Exception as error:
                    self.lose(agent, agent.trouble_with(error))
                    break

    async def checkpoint(self, number: int) -> None:
        """On all hosts, make each worker that uses checkpoints write one.

        Return when all of these checkpoints are written.
        """
        agents = self.reachability.living()
        for agent in agents:
            agent.send(m.Checkpoint(number))
        for agent in agents:
            await agent.checkpointed.wait()

    async def end(self, code: int, words: str | None, failed: int | None = None) -> None:
        """End the launchers of the other hosts with exit code `code`, including a launcher that registers later.

        `words`: the last message that the launchers print. `failed`: the key of the process whose failure ends the job.
        """
        self._last_words = m.End(code, words, failed=failed)
        for agent in self.agents.values():
            if not agent.lost:
                agent.send(self._last_words)
            agent.tell_end()  # a host that was declared lost a moment ago gets the reason for its loss instead
        others = [agent for agent in self.agents.values() if not agent.lost and agent.name != self.name]
        parting = [asyncio.ensure_future(agent.part()) for agent in others]
        if parting:
            _, late = await asyncio.wait(parting, timeout=PARTING_S)
            for wait in late:
                wait.cancel()

    def leave(self) -> None:
        """Close all connections without a message, because another controller controls the job."""
        for agent in self.agents.values():
            agent.drop()

    def was_made(self) -> None:
        if self.workers.done():
            self.workers.result().segment_was_made()

    def make_segment(self, cluster: Cluster, recovers: bool) -> SpreadSegment:
        """Start making the segment of a cluster version. Implements `MakeSegment`."""
        self._attempts += 1
        return SpreadSegment(self, cluster, self._attempts, recovers)

    def take_over(self, cluster: Cluster, recovers: bool) -> SpreadSegment:
        """Take over the segment of a cluster version, which the hosts made under an earlier controller."""
        return SpreadSegment(self, cluster, 0, recovers, is_made=True)

    def close_all_but(self, known: Collection[int], reports: Mapping[str, m.ResyncReport]) -> None:
        """Close the segments that an earlier controller has made for cluster versions that aren't in `known`."""
        for host, report in reports.items():
            for version in set(report.losses).difference(known):
                self.agents[host].send(m.Close(version))

    # ---- callers ----

    async def serve(self, channel: AnyChannel, said: m.FirstWords) -> bool:
        """Serve a caller whose first message is `said`. Return whether another object now owns the connection."""
        if isinstance(said, m.Agent):
            return await self._take_in(channel, said)
        if isinstance(said, m.WaitingController):
            await self.gathering.answer_a_controller(channel, said)
        elif isinstance(said, m.Ask):
            await self._answer_who_asks(channel, said)
        return False

    async def _answer_who_asks(self, channel: AnyChannel, asking: m.Ask) -> None:
        coming = joining_host(asking.host, asking.slots)
        why = other_versions(asking.host, asking.version, asking.mindspore, own=self._registration)
        why = why or self.events.objection_to(coming)
        channel.send(
            m.RegistrationRejected(why) if why else terms_of(self.options, self.events.hosts, self.events.left_s())
        )
        await channel.flushed()

    async def _take_in(self, channel: AnyChannel, said: m.Agent) -> bool:
        registration = said.registration
        if said.report is not None:
            if registration.host in self.events.hosts.lost:
                return await self._let_in(channel, registration, f"the job goes on without {registration.host}")
            if self.gathering.is_closed or registration.host not in self.gathering.missing():
                return False  # the host reads in the snapshot whether the job continues without it
            self.reports[registration.host] = said.report
            return await self._let_in(channel, registration, "")
        joining = None if said.slots is None else joining_host(registration.host, said.slots)
        if joining is not None and self.lease is not None and registration.host in self.agents:
            # This controller hasn't noticed yet that the host's previous connection has ended. The host looks up
            # again which host controls the job, and calls again.
            return False
        if joining is not None:
            why = objection(registration, self._registration, {}, same_flags=False) or self.events.objection_to(joining)
        else:
            why = self._objection_to_one_of_the_first(registration)
        per_worker = self.options.cores_per_worker
        if not why and per_worker is not None and per_worker > len(registration.cores):
            cores = counted(len(registration.cores), "core")
            why = f"-cores-per-worker {per_worker} is more than the {cores} that the job may use on {registration.host}"
        warning = ""
        if joining is not None:
            isa, own = registration.cpu_isa, self._registration.cpu_isa
            warning = other_instructions(registration.host, isa, self._start.cpu_isa, own)
        if not why and said.command is not None:  # a rejected host causes no warning
            command = list(map(os.fsdecode, said.command))
            warning = other_command(registration.host, command, self.name, self.options.command)
        return await self._let_in(channel, registration, why, joining, warning)

    async def _let_in(
        self,
        channel: AnyChannel,
        registration: m.Registration,
        why: str,
        joining: Host | None = None,
        warning: str = "",
    ) -> bool:
        """Admit a host unless there is an objection (`why`), and serve it until it is lost.

        `warning`: a message that this controller and the host log once.
        """
        per_worker = self.options.cores_per_worker
        if why:
            self.gathering.reject(registration.host, why)
            channel.send(m.RegistrationRejected(why))
            await channel.flushed()
            return False
        watch = HangWatch(self.options.peer_timeout_s or math.inf)
        look_s = told_each_s(watch.period_s, env.COLLECTIVE_TIMEOUT.get(self.machine.environ))
        # Each host already knows a secret that the user has set.
        secret = None if self.options.secret else self._start.secret
        lease = None if self.lease is None else self.lease.since
        channel.send(m.Registered(self._start.writer, look_s, secret, lease, warning))
        channel.set_silence(self.options.host_timeout_s)
        # There is no `await` between the check of the host and this line, so if two callers have the same name, only
        # the first is registered.
        agent = self.agents[registration.host] = RemoteAgent(self, channel, registration, per_worker)
        agent.accepted_at = asyncio.get_running_loop().time()
        if self._holds_deadlines:
            agent.send(m.Hold(True))
        if agent.name != self.name:
            _log.info("host registered: host=%s cores=%d", agent.name, len(registration.cores))
        if warning and warning not in self._warned:
            self._warned.add(warning)
            _log.warning('hosts differ: host=%s reason="%s"', agent.name, warning)
        if self._last_words is not None:
            agent.send(self._last_words)
        if joining is not None:
            self.events.host_joined(joining, agent)
        self.gathering.news.set()
        self.lose(agent, await agent.listen())
        return False

    def _objection_to_one_of_the_first(self, registration: m.Registration) -> str:
        why = objection(registration, self._registration, self.agents)
        before = self.agents.get(registration.host)
        if why and before is not None and before.lost:
            url = self._start.url or "URL"
            return (
                f"{registration.host} was a host of the job ({before.lost}), but the job goes on without "
                f"it; to bring it back: {PROGRAM} -join {url}"
            )
        if not why and registration.host not in self.options.hosts.names:
            return f"{registration.host} isn't one of the job's hosts, {self.options.hosts}"
        return why

    # ---- lost hosts ----

    def let_go(self, name: str) -> None:
        """Release a host that has left, after all others have been notified."""
        self.agents[name].give_up("it has left", has_left=True)

    def lose(self, agent: RemoteAgent, why: str) -> None:
        if agent.lost:
            return
        # A host's launcher exits when it is notified of the host's loss. If another controller may take over, notify
        # the host only when the snapshot contains its loss. If the host were notified earlier, a controller that has
        # stepped down, or that fails before the write, could end a host with which the next controller would continue.
        # Until the snapshot contains the loss, the host gets no message. After -host-timeout without a message, the
        # host reads the snapshot.
        agent.give_up(why, tells=self.lease is None or not self.workers.done())
        if self.workers.done():
            self.events.host_lost(agent.name, why)
        else:  # the host may register again, unless it has left because this controller was paused
            self.was_left = self.was_left or self.events.has_stood_still
            _log.warning('host lost: host=%s reason="%s"', agent.name, why)
            del self.agents[agent.name]
            self.reports.pop(agent.name, None)
            self.gathering.news.set()

    def tell_lost(self, name: str) -> None:
        """Notify a host of its own loss, now that the snapshot contains the loss."""
        if name in self.agents:
            self.agents[name].tell_end()

    def tell_lease(self) -> None:
        """Notify the hosts that this controller has acquired the lease again.

        Without this message, a host that later finds the new lease in the store would mistake this controller for a
        new one.
        """
        for agent in self.reachability.living():
            agent.send(m.NewLease(0 if self.lease is None else self.lease.since))

    def hold_deadlines(self, held: bool) -> None:
        """Stop the deadlines of all workers if `held` is set. Otherwise, let the deadlines continue."""
        self._holds_deadlines = held
        for agent in self.reachability.living():
            agent.send(m.Hold(held))
