"""One job over several hosts and one course of events: launchers, the network between them, and what is promised there.

What is promised of a job on one host is promised here, too. Besides: no host is declared lost to which nothing has
happened, a lost host ends by itself, none waits for longer than it takes to find that out, and all launchers end alike.
"""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass, replace

from ms_kungfu.cluster_store import LeadershipState
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.launcher.state.hosts import Host as HostOfJob
from ms_kungfu.launcher.state.hosts import Hosts
from tests.fault.simulator.setting import COLLECTIVE_TIMEOUT_S, PORTS, Outcome, Setup, Violation
from tests.fault.simulator.world import World

HOST_TIMEOUT_S = 2.0
_GONE_S = 2 * HOST_TIMEOUT_S + 1.5
_LOOK_S = 0.1
_MAKE_S = 20.0  # of launcher.state.segment
_FIRST_WORDS_S = 5.0  # of launcher.agent.agent; a real launcher's clock stands still with it, and the simulated doesn't
_LAST_NEWS_S = 2.0  # of launcher.controller.remote
MOST_HOSTS = 4
_TAKEN_S = 1.5  # until another host has the lease, after its lease


def _name_of(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250 + 1}"


@dataclass(frozen=True)
class HostsSetup(Setup):
    """A job over several hosts as it starts."""

    hosts: int = 3
    slots: int = 2  # of each
    moves: bool = False  # the controller's seat, which is in the store: another host takes it where the controller dies


class HostsWorld(World):
    """`run` once. The first host is the controller, at first."""

    checks_reaped = False  # a controller that stands still tells of it later

    def __init__(self, seed, setup, happenings, told=None):
        self.disturbed_s = {}  # name of a host -> for how long nothing could come from it
        self.outages = []  # (from, until)
        self.interrupted = self.full_before_begun = self.paused_before_begun = False
        self.commits = []  # when
        self.lost_at = {}  # Host -> when
        self.could_know_at = {}  # Host -> since when it could have known that
        self.without_store = []  # hosts that don't reach it
        self.terms = 0  # how often it has been taken
        self.traps_for_reporters = []
        super().__init__(seed, setup, happenings, told)
        if any(h.kind in HAPPENINGS for h in happenings):
            self.quiet_from = self.calm_from + 4.0 + 4 * HOST_TIMEOUT_S
        if any(h.kind in ("cut", "isolate", "switch off") for h in happenings):  # a call may wait for its answer
            self.quiet_from += 2 * _MAKE_S

    def _lasts(self, happening):
        lasts = 2.0 if happening.kind == "reset" else super()._lasts(replace(happening, place=""))
        return lasts + 3 * HOST_TIMEOUT_S * happening.term

    # ---- hosts ----

    def host_at(self, address):
        return next(host for host in reversed(self.hosts) if host.address == address)

    @property
    def keeps_store(self):
        """Whether the store is none of the hosts' affair."""
        return self.setup.external or self.setup.moves

    def takes_the_lease(self, job, name):
        self.say("do", f"-- {name} has the lease")
        self.job, self.head = job, self.host_at(name)
        self.terms += 1
        for happening in self.happenings:
            if happening.term == self.terms:
                self.loop.at(happening.at, self._happen, happening)

    def members(self):
        return super().members() if self.job is not None and self.job.context.manager is not None else []

    def _options_of(self, number, joins):
        names = [_name_of(number) for number in range(self.setup.hosts)]
        own = _name_of(number)
        if own not in names:
            names.append(own)
        each = tuple(HostOfJob(name, self.setup.slots) for name in names)
        return replace(
            self._options(), hosts=Hosts(each, own, names[0]), secret="00", joins=joins, host_timeout_s=HOST_TIMEOUT_S,
            builtin_port=None if self.keeps_store or number else 0,
            config_server="etcd://server/job" if self.setup.moves else "http://server/config",
        )  # fmt: skip

    def reaches_server(self, process):
        if self.server.away or self.keeps_store:
            return not self.server.away and process.host not in self.without_store
        head, host = self.hosts[0], process.host or self.hosts[0]
        there_and_back = self.network.passes(host, head) and self.network.passes(head, host)
        return not head.is_over and not head.stands_still and there_and_back

    # ---- what becomes of them ----

    def host_is_lost(self, name, reason):
        if self.verdict is not None or not self._has_begun():
            return  # the end of the job, or there is none: `_check_begun` has a look at that
        there = [host for host in self.hosts if host.address == name]
        while len(there) > 1 and not hasattr(there[-1].program, "_relay"):
            there.pop()  # it wants to join in the place of the one before, which is meant
        host = there[-1]
        self.lost_at.setdefault(host, self.loop.now)
        # While the store is away that can't be on record.
        has_left = host.is_leaving and not any(process.alive for process in host.workers())
        if not self._is_disturbed(host) and not has_left:
            raise Violation(f"{name} is declared lost, and nothing has happened to it: {reason}")
        host.is_lost = True
        self.could_know_at[host] = self.loop.now
        self._check_gone(host)

    def host_joins(self, name):
        """A lost host that has had no worker joins again: if the leader snapshot doesn't name it any more, it is like
        one whose joining the controller before didn't live to write down."""
        host = self.host_at(name)
        host.is_lost &= any(process.host is host for process in self.everybody)

    def _check_gone(self, host):
        """A lost host ends by itself, whether it hears of it or not: where the controller moves it hears of it from
        the store. Or it joins again."""
        if host.is_over or self.closing or not host.is_lost:
            return
        if host.stands_still or (self.setup.moves and (self.server.away or host in self.without_store)):
            self.could_know_at[host] = self.loop.now
        elif self.loop.now >= self.could_know_at[host] + _GONE_S:
            raise Violation(f"{host.name} was declared lost at {self.lost_at[host]:.1f} s, and its launcher runs")
        self.loop.at(_LOOK_S, self._check_gone, host)

    def job_is_settled(self, verdict):
        if self.verdict is None:
            super().job_is_settled(verdict)

    def end_is_heard(self, name):
        """It is on record then: a controller that dies here leaves it to the next one. No host
        waits for a store that is away."""
        away = any(happening.kind in ("server away", "lose store", "fill store") for happening in self.happenings)
        if self.setup.moves and self._has_begun() and not away and not self.server.leadership.now.snapshot["end"]:
            raise Violation(f"{name} hears of the end, and that isn't on record")

    def loss_is_heard(self, name):
        """By the lost host. The controller that says so may have stepped down, or die before it is on record."""
        snapshots = self.server.leadership.history
        if any(name in dict(snapshot["versions"]["lost"]) for snapshot in snapshots):
            return
        if self.verdict is not None:
            self.end_is_heard(name)  # the job ends beside the host
        elif self.setup.moves:
            raise Violation(f"{name} hears that the job goes on without it, and that isn't on record")

    def committed(self, program, *step):
        self.commits.append(self.loop.now)
        super().committed(program, *step)

    def _disturb(self, hosts, seconds, weight=1.0):
        """Nothing comes from these for so long, which may be a reason to declare them lost."""
        for host in hosts:
            self.disturbed_s[host.name] = self.disturbed_s.get(host.name, 0.0) + weight * seconds
        self.outages.append((self.loop.now, self.loop.now + seconds))

    @property
    def longest_outage_s(self):
        return max((until - since for since, until in self.outages), default=0.0)

    def _is_disturbed(self, host):
        """Enough to be declared lost, as a host that has lost a link to another one may be."""
        return host.had_reset_links or self._is_cut_off(host)

    def _is_cut_off(self, host):
        """From the controller: what was lost on the way is sent again after as long as it couldn't be."""
        return host.was_disturbed or self.disturbed_s.get(host.name, 0.0) > 0.3 * HOST_TIMEOUT_S

    # ---- what happens ----

    def _happen(self, happening):
        if happening.kind == "resize" and self.broker is None and self.server.store is not None:
            who = happening.who  # before all hosts are there
            self.outside.start("resize", lambda: self._from_outside(lambda cluster: cluster.resized(who, PORTS)))
        elif happening.kind not in HAPPENINGS:
            if happening.kind == "server away" and self.setup.moves:
                self._disturb([], happening.more)
            super()._happen(happening)
        elif self.verdict is None and self.hosts and (not self.head.is_over or (self.setup.moves and self.present)):
            HAPPENINGS[happening.kind](self, happening)

    def _another(self, who):
        """A host that isn't the controller."""
        others = [host for host in self.present if host is not self.head]
        return others[who % len(others)] if others else None

    def _kill_launcher(self, happening):
        host = self._another(happening.who)
        if host is not None:
            self.say("do", f"-- kill the launcher of {host.name}")
            self._disturb([], 0.0)
            host.kill()

    def _kill_head(self, happening):
        self.say("do", f"-- kill the controller, {self.head.name}")
        self.interrupted |= not self.setup.moves or not self._has_begun()
        self._disturb([], HOST_TIMEOUT_S + _TAKEN_S)
        self.head.kill()

    def _set_trap_for_reporter(self, happening):
        self.traps_for_reporters.append([happening.kind, happening.who, happening.more])

    def reports(self, host):
        """It is about to tell another controller what it has, and hears of what happens here before the answer."""
        traps, self.traps_for_reporters = self.traps_for_reporters, []
        for kind, times, later in traps:
            if times:
                self.traps_for_reporters.append([kind, times - 1, later])
            elif kind == "kill reporter":
                self._disturb([], 0.0)
                self.loop.at(later, self._strike_reporter, host, kind)
            else:
                self.loop.at(later, self._strike_reporter, host, kind)

    def _strike_reporter(self, host, kind):
        living = [process for process in host.workers() if process.alive]
        if host.is_over or self.verdict is not None or (kind == "kill reporter" and len(self.present) < 2):
            return
        self.say("do", f"-- {kind}: {host.name}")
        if kind == "kill reporter":
            host.kill()
        elif kind == "kill reporter's guard" and len(self.present) > 1:
            host.was_disturbed = True
            host.guard.tell(None)
            for process in living:  # with it, and no process is left to report it
                process.alive, process.killed = False, True
                self.deaths += 1
                self.processes.pop(process.key, None)
        elif living and len([p for p in self.everybody if p.alive]) > 1:
            self.kill(living[0], -signal.SIGKILL)

    def _pause_head(self, happening):
        self._pause_host(self.head, happening)

    def _lose_store(self, happening):
        host = self.present[happening.who % len(self.present)]
        self.say("do", f"-- {host.name} doesn't reach the store for {happening.more:g} s")
        self._disturb(self.present if host is self.head else [host], happening.more)
        self.without_store.append(host)
        self.loop.at(happening.more, self.without_store.remove, host)

    def _fill_store(self, happening):
        """It answers, but takes nothing. The leader keeps the lease, since a renewal needs no room."""
        self.say("do", f"-- the store is full for {happening.more:g} s")
        self._disturb([], happening.more)
        self.full_before_begun |= not self._has_begun()
        self.server.fill(happening.more)

    def _delete_keys(self, happening):
        self.say("do", "-- the job's keys are deleted")
        self.interrupted = True
        self._disturb(self.present, 60.0)
        self.server.leadership.now = LeadershipState()

    def _switch_off(self, happening):
        host = self._another(happening.who)
        if host is not None:
            self.say("do", f"-- {host.name} is switched off")
            self._disturb([host], happening.more)
            host.switch_off()
            for other in self.present:
                self.network.part(host, other, happening.more)
            self.loop.at(happening.more, setattr, host, "is_on", True)

    def _pause(self, happening):
        self._pause_host(self.present[happening.who % len(self.present)], happening)

    def _pause_host(self, host, happening):
        if host.stands_still or host.is_over:
            return
        self.say("do", f"-- {host.name} stands still for {happening.more:g} s")
        # The others leave a controller that stands still; where its lease doesn't move they find that it goes on
        # without them.
        moves = self.setup.moves and bool(self.steps)  # before, they end
        others = self.present if host is self.head and not moves else [host]
        self._disturb(others, happening.more, 0.45)
        host.stand_still()
        self.loop.at(happening.more, host.go_on)

    def _pause_all(self, happening):
        """No host is declared lost for it: one whose clock has stood still gives others time to be heard. (One that
        stood still already goes on in its own time, and may miss the others.)"""
        self.say("do", f"-- all stand still for {happening.more:g} s")
        self._disturb(self.present if any(host.stands_still for host in self.present) else [], happening.more)
        self.paused_before_begun |= not self._has_begun() and happening.more > _FIRST_WORDS_S
        for host in self.present:
            if not host.stands_still:
                host.stand_still()
                self.loop.at(happening.more + 0.1 * self.random.random(), host.go_on)

    def _cut(self, happening):
        pairs = list(itertools.permutations(self.present, 2))
        if pairs:
            here, there = pairs[happening.who % len(pairs)]
            both = happening.place != "one way"
            self.say("do", f"-- {here.name} -> {there.name} is cut, {happening.place}, for {happening.more:g} s")
            self._disturb([here, there], happening.more)
            self.network.part(here, there, happening.more, both)

    def _isolate(self, happening):
        host = self.present[happening.who % len(self.present)]
        self.say("do", f"-- {host.name} is cut off for {happening.more:g} s")
        self._disturb(self.present, happening.more)
        for other in self.present:
            if other is not host:
                self.network.part(host, other, happening.more)

    def _reset(self, happening):
        pairs = list(itertools.combinations(self.present, 2))
        if pairs:
            pair = pairs[happening.who % len(pairs)]
            is_link = happening.place == "link"
            for (
                host
            ) in pair:  # between two that aren't the controller there are links alone, and the calls that make them
                if is_link or self.hosts[0] not in pair:
                    host.had_reset_links = True
                else:
                    host.was_disturbed = True
            self._disturb([], 2.0)
            self.network.traps.append([set(pair), int(happening.more), is_link])

    def _leave(self, happening):
        host = self._another(happening.who)
        if host is not None:
            self._send_away(host)

    def _head_leaves(self, happening):
        """Where the controller moves its host leaves like any other, and another one has the job then."""
        self._disturb([], _TAKEN_S)
        self._send_away(self.head)

    def _send_away(self, host):
        self.say("do", f"-- SIGTERM to {host.name}")
        if not self._has_begun():
            self.interrupted = True
        # At the second it ends, and so it does where it isn't in the job yet.
        host.was_disturbed |= host.is_leaving or host.is_told or self._is_alone(host)
        host.is_leaving = True
        host.signal(signal.SIGTERM)

    def _join(self, happening):
        taken = {host.number for host in self.present}
        free = [number for number in range(1, MOST_HOSTS) if number not in taken]
        if free and self._has_begun():
            number = free[happening.who % len(free)]
            if any(host.number == number and not host.is_on for host in self.hosts):
                return
            self._add_host(number)

    def _join_anew(self, happening):
        """A host that the job has never had, where there is room."""
        if len(self.present) < MOST_HOSTS and self._has_begun():
            self._add_host(max(host.number for host in self.hosts) + 1)

    def _add_host(self, number):
        self.say("do", f"-- {_name_of(number)} joins")
        self._start_host(number, joins=True)

    def _interrupt(self, happening):
        host = self.present[happening.who % len(self.present)]
        self.say("do", f"-- SIGINT to {host.name}")
        self.interrupted = True
        host.was_disturbed |= host.is_told or self._is_alone(host)
        host.is_told = True
        host.signal(signal.SIGINT)

    def _is_alone(self, host):
        """In no job, or in one without a host that could hear of it."""
        if self.setup.moves and host.program.succession.since is not None:
            return False
        return (self.setup.moves or host is not self.head) and host.program._channel is None

    def _has_begun(self):
        return self.job is not None and (self.job.context.has_begun or bool(self.steps))

    def _run(self):
        if self.keeps_store:
            self.server.store = ConfigStore()
        for number in range(self.setup.hosts):
            self.loop.at(self.short(self.random) * 5 if number else 0.0, self._start_host, number)
        self._happens_in_time()
        self.loop.at(self.quiet_from - 0.2, self._check_quiet)
        self._run_until(self.quiet_from + 120.0)
        self._check_hosts()
        self._check_history()
        outcome = self.head.outcome
        if not self.interrupted and outcome is not None:  # else the last head was killed as the job ended
            self._check_begun(outcome)
        reason = self.verdict.reason if self.verdict else ""
        code = outcome.code if outcome else -signal.SIGKILL
        return Outcome(code, reason, len(self.steps), self.deaths, self.loop.now, self.told or [])

    def _is_over(self):
        return len(self.hosts) >= self.setup.hosts and super()._is_over()

    def _check_begun(self, outcome):
        lost = [host for host in self.hosts if host.is_lost or host in self.lost_at]
        self.trouble = [each for each in self.trouble if isinstance(each, Violation) or each[0].host not in lost]
        if self.verdict is None or self.broker is None or self.broker.versions.current is None:
            if not any(map(self._is_cut_off, self.hosts)) and not self._could_not_begin(outcome):
                has = "has no end" if self.steps else "hasn't begun"
                raise Violation(f"the job {has}: {outcome.words}")
            return
        if outcome.code and "leav" in self.verdict.reason:
            return
        self._check_end(outcome.code)
        self._check_gaps()

    def _could_not_begin(self, outcome):
        """No lease can be taken from a full store, and a call whose time ran out in a pause isn't made again."""
        is_full = self.full_before_begun and "its database is full" in outcome.words
        is_missed = self.paused_before_begun and "no message came from" in outcome.words
        return not self.steps and (is_full or is_missed)

    def _check_quiet(self):
        """When nothing has happened for long: hosts have what the controller has, and each lost host has ended."""
        if self.verdict is not None or self.head.is_over or not self._has_begun():
            return
        known = set(self.broker.versions.clusters)
        boards = {v: [s._local._board] for v, s in self.broker._segments.open.items() if getattr(s, "_local", None)}
        for host in self.present[0 if self.setup.moves else 1 :]:
            if host.program._host is None:
                continue  # it has come too late to be let in, and calls yet
            held = host.program._host.segments.open
            if not known.issuperset(held):
                raise Violation(f"{host.name} has parts of versions {sorted(held)}, of which {sorted(known)} are known")
            for version, segment in held.items():
                boards.setdefault(version, []).append(segment._board)
        for version, each in boards.items():
            deaths = [board.deaths for board in each if board is not None]
            if any(told != deaths[0] for told in deaths):
                raise Violation(f"the hosts have other deaths in version {version}: {deaths}")

    def _check_gaps(self):
        """No host stands still for longer than it takes to find out why, and to go on without it."""
        for before, after in itertools.pairwise(self.commits):
            out_s = sum(min(after, until) - max(before, since) for since, until in self.outages
                        if min(after, until) > max(before, since))  # fmt: skip
            if after - before > 3 * HOST_TIMEOUT_S + 2 * _LAST_NEWS_S + 2.0 + out_s and after < self.quiet_from:
                raise Violation(f"no step from {before:.1f} to {after:.1f} s")

    def _check_hosts(self):
        """All launchers end alike; a lost host, by itself and in time."""
        head = self.head.outcome
        for host in (host for host in self.hosts if host is not self.head):
            outcome = host.outcome
            disturbed = self._is_disturbed(host)
            if outcome is None or head is None:
                if outcome is not None and outcome.code == 0 and not host.is_leaving:
                    raise Violation(f"{host.name} ends well, and its controller was killed")
                continue
            if outcome.code and not hasattr(host.program, "_relay"):
                continue  # the controller had ended before it was let in
            if host.is_lost and outcome.code == 0 and not host.is_leaving:  # whose workers had left by then
                raise Violation(f"{host.name} was declared lost, and ends well")
            waited = "nobody else has it" in outcome.words or "not released this host" in outcome.words
            if host.is_leaving and waited and (head.code or self.longest_outage_s > COLLECTIVE_TIMEOUT_S):
                continue  # all go, and no host is left to take the lease; or the store is away
            if not host.is_lost and not disturbed and outcome.code and outcome.code != head.code:
                raise Violation(
                    f"{host.name} ends with {outcome.code} ({outcome.words}), the controller with {head.code}"
                )
            both_fail = head.code and outcome.code and self._has_begun()  # before, a reset may be all that is heard
            if not host.is_lost and not disturbed and both_fail and head.words not in outcome.words:
                raise Violation(f"{host.name} ends with {outcome.words!r}, the controller with {head.words!r}")

    def _check_history(self):
        """Of the lease: one job, whose versions grow, and nothing after its end. A commit that no host heard of may
        be taken back, for the version before it."""
        before, committed = None, [-1]
        for snapshot in self.server.leadership.history:
            version = snapshot["versions"]["chosen"] or 0
            if version < committed[-1]:
                committed.pop()
                if version != committed[-1]:
                    raise Violation(f"version {before['versions']['chosen']} was chosen, and then {version}")
            elif version > committed[-1]:
                committed.append(version)
            if before is not None and before["end"] and snapshot["end"] != before["end"]:
                raise Violation(f"the job had ended with {before['end']}, and went on with {snapshot}")
            before = snapshot


HAPPENINGS = {
    "kill launcher": HostsWorld._kill_launcher,
    "kill head": HostsWorld._kill_head,
    "pause head": HostsWorld._pause_head,
    "lose store": HostsWorld._lose_store,
    "fill store": HostsWorld._fill_store,
    "delete keys": HostsWorld._delete_keys,
    "switch off": HostsWorld._switch_off,
    "pause host": HostsWorld._pause,
    "pause all": HostsWorld._pause_all,
    "cut": HostsWorld._cut,
    "isolate": HostsWorld._isolate,
    "reset": HostsWorld._reset,
    "host leaves": HostsWorld._leave,
    "head leaves": HostsWorld._head_leaves,
    "host joins": HostsWorld._join,
    "new host joins": HostsWorld._join_anew,
    "interrupt": HostsWorld._interrupt,
    "kill reporter": HostsWorld._set_trap_for_reporter,
    "kill reporter's worker": HostsWorld._set_trap_for_reporter,
    "kill reporter's guard": HostsWorld._set_trap_for_reporter,
}
