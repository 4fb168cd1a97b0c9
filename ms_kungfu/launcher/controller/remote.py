"""The head's view of the hosts: each is a `Site`, and has its part of a version's shared memory.

Each of them, the head's own too, has a launcher (`agent`), which has called, has proved that it knows the job's
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
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping
from typing import Callable

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import counted
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import Seat
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.control import call_once, reason_of, remedy_for
from ms_kungfu.launcher.controller.remote_site import PARTING_S, RemoteSite, Reports, Workers
from ms_kungfu.launcher.controller.spread_segment import SpreadSegment
from ms_kungfu.launcher.controller.startup import Start
from ms_kungfu.launcher.hello import objection, other_command, other_versions
from ms_kungfu.launcher.joining import joining_host, terms_of
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.lost_hosts import Leases, to_evict
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.segment import Segment
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.state.stuck import stuck_sure_s, told_each_s
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_FIRST_WORDS_S = 10.0
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
            _, late = await asyncio.wait(parting, timeout=PARTING_S)
            for wait in late:
                wait.cancel()

    def leave(self) -> None:
        """Without a word: another head has the job."""
        for site in self.sites.values():
            site.drop()

    def in_loop(self, function: Callable[[], object]) -> None:
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
