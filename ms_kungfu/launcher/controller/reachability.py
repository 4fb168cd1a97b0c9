"""Detection of failed hosts.

A host counts as failed if no message arrives from it for -host-timeout. If two hosts can't reach each other, the
controller decides which of them counts as failed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Callable, Protocol

from ms_kungfu.launcher.controller.remote_agent import RemoteAgent
from ms_kungfu.launcher.controller.segments import SpreadSegment
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hosts import Hosts
from ms_kungfu.launcher.state.lost_hosts import Leases, to_evict
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.wire import messages as m

_LOOK_S = 0.2  # interval of checks for broken connections between hosts
# When a host's launcher exits, all its connections close. Its connections to other hosts may close a moment before the
# controller notices that the launcher has exited.
_HOST_FIRST_S = 1.0
# time for several hosts to report, one after another, which hosts can't reach each other
_LAST_NEWS_S = 2.0
_MISSED_S = 1.0  # additional time for a host's next heartbeats to arrive


class NodeEvents(Protocol):
    @property
    def hosts(self) -> Hosts:
        """Return the hosts of the job."""
        ...

    def hosts_apart(self, reason: str) -> None:
        """End the job on all hosts, since it can't continue and no single host is at fault."""


class Reachability:
    """Find hosts that have failed. `lose(agent, why)` declares a host failed."""

    def __init__(
        self,
        options: Options,
        agents: Mapping[str, RemoteAgent],
        events: NodeEvents,
        lose: Callable[[RemoteAgent, str], None],
    ) -> None:
        self.options, self.agents, self.events, self._lose = options, agents, events, lose
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._transport_failed = False

    def watch(self) -> None:
        """Declare a host failed if it is silent for -host-timeout."""
        if self.options.host_timeout_s is not None:
            self._look_for_silence(Leases(self.options.host_timeout_s))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def living(self) -> list[RemoteAgent]:
        return [agent for agent in self.agents.values() if not agent.lost]

    def _look_for_silence(self, leases: Leases) -> None:
        """Declare silent hosts failed, and send a heartbeat to each of the others."""
        others = {agent.name: agent.heard for agent in self.living() if agent.name != self.options.hosts.self_name}
        for name in leases.run_out(self._loop.time(), others):
            self._lose(
                self.agents[name], f"no message came from it for {self.options.host_timeout_s:g} s (-host-timeout)"
            )
        for agent in self.living():
            agent.send(m.Beat())
        self._later("silence", leases.period_s, self._look_for_silence, leases)

    def _later(self, what: str, seconds: float, function: Callable[..., None], *arguments: object) -> None:
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = self._loop.call_later(seconds, function, *arguments)

    def note_apart(self) -> None:
        """Record that a host has reported another host as unreachable.

        More such reports may follow. If one of the two hosts has failed, the controller must have time to find out
        which one is silent before it evicts a host.
        """
        missed_s = 0.0 if self.options.host_timeout_s is None else self.options.host_timeout_s / 4 + _MISSED_S
        self._later("apart", max(_LAST_NEWS_S, missed_s), self._evict_who_is_apart)

    def _apart(self) -> dict[tuple[str, str], str]:
        """Return the pairs of live hosts that can't reach each other, and the reason for each pair."""
        found = {}
        for agent in self.living():
            found.update(
                {
                    (agent.name, host): why
                    for (version, host), why in agent.apart.items()
                    if version in agent.segments and self._is_in(agent.segments[version], host)
                }
            )
        living = {agent.name for agent in self.living()}
        return {pair: why for pair, why in found.items() if living.issuperset(pair)}

    def _is_in(self, segment: SpreadSegment, host: str) -> bool:
        """Return whether the segment contains the current host of that name, not an earlier, failed one."""
        agent = self.agents.get(host)
        return agent is not None and segment.has(agent)

    def _evict_who_is_apart(self) -> None:
        apart, now = self._apart(), self._loop.time()
        involved = [agent for agent in self.living() if any(agent.name in pair for pair in apart)]
        limit_s = self.options.host_timeout_s
        if limit_s is not None and any(now - agent.heard > limit_s / 4 for agent in involved):
            # One of these hosts may soon be declared lost because of its silence. Silence is more reliable evidence of
            # a failure than the reports of other hosts.
            self._later("apart", _LOOK_S, self._evict_who_is_apart)
            return
        workers = Counter(
            worker.host
            for agent in involved
            for segment in agent.segments.values()
            for worker in segment.cluster.workers
        )
        for name in to_evict(apart, workers, self.events.hosts.names, self.options.hosts.self_name):
            other, why = next((set(pair) - {name}, why) for pair, why in apart.items() if name in pair)
            self._lose(self.agents[name], f"it and {''.join(other)} can't reach each other: {why}")

    # ---- connections between hosts ----

    def transport_failed(self, segment: SpreadSegment, why: str) -> None:
        """Record that a host can no longer exchange data with the other hosts of the segment.

        The job ends a moment later with this reason, unless it turns out that one of the hosts has failed.
        """
        if not self._transport_failed:
            self._transport_failed = True
            self._loop.call_later(_HOST_FIRST_S, self._tell_of_failure, segment, why)

    def are_apart(self) -> bool:
        """Return whether some hosts can't reach each other. If so, the controller soon declares one of them lost."""
        return bool(self._apart())

    def is_in_trouble(self) -> bool:
        """Return whether some hosts can't reach each other, or an exchange between hosts has failed recently."""
        return self._transport_failed or self.are_apart()

    def _tell_of_failure(self, segment: SpreadSegment, reason: str) -> None:
        self._transport_failed = False
        if self.are_apart() and self.options.recover is Recover.FAIL:
            return  # the loss of a host ends the job
        if any(segment in agent.segments.values() for agent in self.agents.values()):
            self.events.hosts_apart(reason)
