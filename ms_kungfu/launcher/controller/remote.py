"""The controller's view of the hosts: each is a `Site`, and has its part of a version's shared memory.

Each of them, the controller's own too, has an agent, which has called, has proved that it knows the job's secret, and
does for its host what it is told. All that is said to a host goes over one connection, in order: what is true when a
worker is answered has been told to its host before. If that connection ends the host has failed (`reachability` has the
other reasons). `gathering` knows which hosts are missing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Collection, Mapping
from typing import Callable

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import Seat
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.controller.gathering import HostGathering
from ms_kungfu.launcher.controller.reachability import Reachability
from ms_kungfu.launcher.controller.remote_site import PARTING_S, RemoteSite, Reports, Workers
from ms_kungfu.launcher.controller.spread_segment import SpreadSegment
from ms_kungfu.launcher.controller.startup import Start
from ms_kungfu.launcher.hello import objection, other_command, other_versions
from ms_kungfu.launcher.joining import joining_host, terms_of
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.segment import Segment
from ms_kungfu.launcher.state.stuck import stuck_sure_s, told_each_s
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)


class RemoteHosts:
    """All hosts of the job, the controller's own among them: its launcher passes on who calls. Belongs to the event
    loop. `hello`: of the controller's own host. `resumes`: hosts report to a new controller.
    """

    def __init__(
        self, options: Options, machine: Machine, hello: m.Hello, start: Start, reports: Reports, resumes: bool = False
    ) -> None:
        self.options, self.machine, self.reports, self.resumes = options, machine, reports, resumes
        self.name = options.hosts.self_name
        self.was_left = False  # by a host, because this controller stood still before it went on
        self.seat: Seat | None = None  # the lease by which this controller decides
        self.stuck_sure_s = stuck_sure_s(env.COLLECTIVE_TIMEOUT.get(machine.environ))
        self.told: dict[str, m.Report] = {}  # by hosts that came to a controller which resumes
        self.sites: dict[str, RemoteSite] = {}
        self.gathering = HostGathering(options, machine, self.sites, resumes)
        self.reachability = Reachability(options, self.sites, reports, self.lose)
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._hello = hello
        self._holds_deadlines = False
        self._warned: set[str] = set()
        self.workers: asyncio.Future[Workers] = self._loop.create_future()
        self._attempts = start.attempts
        self._last_words: m.End | None = None  # once the job ends

    async def gather(self, timeout_s: float) -> None:
        """All hosts are there when this returns. StartError if one doesn't come."""
        self.reachability.watch()
        await self.gathering.gather(timeout_s)

    async def gather_again(
        self, timeout_s: float, before: Collection[str], time_to_ask: Callable[[], Awaitable[float]]
    ) -> None:
        """The hosts of a running job have come to this controller when this returns, or won't."""
        self.reachability.watch()
        await self.gathering.gather_again(timeout_s, before, time_to_ask)

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
            _, late = await asyncio.wait(parting, timeout=PARTING_S)
            for wait in late:
                wait.cancel()

    def leave(self) -> None:
        """Without a word: another head has the job."""
        for site in self.sites.values():
            site.drop()

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
            await self.gathering.answer_a_head(channel, said)
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
            if self.gathering.is_closed or hello.host not in self.gathering.missing():
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
            self.gathering.reject(hello.host, why)
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
        self.gathering.news.set()
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
            self.gathering.news.set()

    def tell_lost(self, name: str) -> None:
        """That the job goes on without it is on record."""
        if name in self.sites:
            self.sites[name].tell_end()

    def tell_seat(self) -> None:
        """This head has sat down again. Should it die, who hasn't heard that would take it for another one."""
        for site in self.reachability.living():
            site.send(m.Seat(0 if self.seat is None else self.seat.since))

    def hold_deadlines(self, held: bool) -> None:
        """While it is `held` no deadline of a worker runs, on any host."""
        self._holds_deadlines = held
        for site in self.reachability.living():
            site.send(m.Hold(held))
