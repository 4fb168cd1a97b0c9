"""What happens to a job: kills, stops, resizes, evictions, a config server that goes away."""

from __future__ import annotations

import contextlib
import signal

from ms_kungfu import env, membership
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.errors import ConfigServerError, KungFuError, ResizeError
from ms_kungfu.launcher import commands
from tests.fault.simulator.broker import BrokerClient
from tests.fault.simulator.cluster_store import Store
from tests.fault.simulator.setting import MAX_WORKERS, PORTS

OUTAGES = ("server away", "server loses all", "server is as at first")


class Events:
    """Of a `World`."""

    def members(self):
        """The processes of the chosen cluster that live, by rank."""
        current = self.broker.versions.current if self.broker is not None else None
        if current is None:
            return []
        running = [p for p in self.job.context.manager.processes if p.key in self.processes]
        found = {p.peer: self.processes[p.key] for p in running if self._is_in(p, current.version)}
        return [found[peer] for peer in current.workers if peer in found and found[peer].alive]

    def _is_in(self, process, version):
        return (
            process.peer is not None
            and process.incarnation <= version
            and not self.broker.versions.is_out(process.peer, process.incarnation)
        )

    def _happen(self, happening):
        if happening.place:
            self.traps.append((happening.kind, happening.who, int(happening.more), happening.place))
            return
        if self.broker is None or self.verdict is not None:
            return
        members, kind, who = self.members(), happening.kind, happening.who
        if kind in (
            "kill newcomer",
            "kill member",
            "kill lone",
            "stop",
            "freeze",
            "pause",
            "slow",
            "terminate",
            "loop",
        ):
            others = [p for p in self.processes.values() if p.alive and p not in members]
            crowd = others if kind == "kill newcomer" else members
            if kind in ("stop", "freeze"):
                crowd = members + others
            if kind == "freeze":  # a worker without a slot isn't waited for, but for the first workers
                crowd = [p for p in crowd if p.granted is not None or env.PARKED.name in p.environ]
            if kind == "kill lone":
                crowd = self._lonely(members)
            if not crowd:
                return
            target = crowd[who % len(crowd)]
            if kind in ("kill member", "kill lone", "terminate", "freeze", "loop") and len(members) == 1 and who != 7:
                return  # the job's end, of which there are enough
            self.say("do", f"-- {kind}: {target.name}")
            if kind.startswith("kill"):
                self.kill(target, -signal.SIGKILL)
            elif kind == "slow":
                target.slow *= 20
                self.loop.at(happening.more, self._hurry, target)
            elif kind == "loop":
                target.loops = True
                if happening.more:
                    self.loop.at(happening.more, self._loop_no_more, target)
            elif kind == "terminate":
                target.terminated = True
                target.start("leave", lambda: self._leave_or_die(target))
            else:
                self.stop(target)
                target.frozen |= kind == "freeze"
                if kind == "pause" or (kind == "freeze" and happening.more):
                    self.loop.at(happening.more, self.go_on, target)
        elif kind == "kill all":
            self.say("do", "-- kill all")
            for target in members:
                self.kill(target, -signal.SIGKILL)
        elif kind == "terminate all":
            self.say("do", "-- terminate all")
            for target in members:
                target.terminated = True
                target.start("leave", lambda target=target: self._leave_or_die(target))
        elif kind == "resize":
            self.outside.start("resize", lambda: self._from_outside(lambda c: c.resized(who, PORTS)))
        elif kind == "evict":
            self.outside.start("evict", lambda: self._from_outside(lambda c: c.without([c.workers[who % c.size]])))
        elif kind == "policy evicts":
            if members:
                caller = members[who % len(members)]
                caller.start("evict", lambda: self._evict(int(happening.more)))
        elif kind == "no descriptors" and self.broker.versions.current is not None:  # else there is no job
            self.say("do", f"-- {kind}")
            self.no_descriptors_until = self.loop.now + happening.more
        elif kind == "delete cluster":
            self.say("do", f"-- {kind}")
            self.server.delete()
        elif kind in OUTAGES:
            self.say("do", f"-- {kind}")
            # A server that is started with a file begins with what is in there.
            begins_with = self.server.first if kind == "server is as at first" else None
            self.server.go_away(None if kind == "server away" else ConfigStore(begins_with))
            self.loop.at(happening.more, self.server.come_back)
        elif kind != "no descriptors":
            raise ValueError(kind)

    def _loop_no_more(self, process):
        process.loops = False
        held, process.held = process.held, []
        for thread, turn in held:
            self.resume(thread, turn)

    @staticmethod
    def _hurry(process):
        process.slow /= 20

    def falls_into_a_trap(self, process, place):
        """Whether the process dies here. The last worker of all doesn't."""
        for i, (kind, who, times, where) in enumerate(self.traps):
            segment = process.core.segment
            if place != where or segment is None or (who < 8 and process.core.own_rank != who % segment.size):
                continue
            if times:
                self.traps[i] = kind, who, times - 1, where
                return False
            if len(self.members()) < 2 and kind == "kill at":
                continue
            del self.traps[i]
            self.trapped.add((kind, place))
            self.say("do", f"-- {kind} {place!r}: {process.name}")
            if kind == "stop at":
                self.stop(process)
                return False
            self.kill(process, -signal.SIGKILL)
            return True
        return False

    def _lonely(self, members):
        """Those of which a requested cluster has only one: the smallest such cluster's."""
        known = {process.granted[0]: process for process in members if process.granted is not None}
        clusters = [[known[peer] for peer in wish.workers if peer in known] for wish in self.wished]
        return min((present for present in clusters if present), key=len, default=[])[:1]

    def _leave_or_die(self, process):
        """What `membership.joining` does at SIGTERM."""
        try:
            if process.granted is None:
                raise ResizeError("not in the cluster yet")
            BrokerClient(self).request_leave(process.granted[0], 10.0, terminated=True)
        except KungFuError:
            self.kill(process, -signal.SIGTERM)

    def _from_outside(self, change):
        following = None

        def next_cluster(cluster):
            nonlocal following
            try:
                following = change(cluster)
            except ValueError as error:
                return str(error)
            if following.workers == cluster.workers:
                following = None
            return following or "nothing to do"

        try:
            told = commands._write(Store(self), next_cluster)
        except (ConfigServerError, ValueError) as error:
            told = f"refused: {error}"
            if following is not None and not self._store_has(following):
                following = None  # else the answer alone was lost
        self.say("do", f"-- from outside: {told}")
        if following is not None and self.setup.min_size <= following.size <= MAX_WORKERS:
            self.wished.append(following)

    def _store_has(self, wish):
        found = self.server.store.cluster
        return found is not None and (found.version, found.workers) == (wish.version, wish.workers)

    def _evict(self, place):
        cluster = membership.current().cluster
        if cluster is not None:
            with contextlib.suppress(ResizeError):
                membership.evict(place % cluster.size)

    def kill(self, process, code):
        if process.frozen:
            process.fatal = code
        elif process.alive:
            process.alive, process.killed = False, self.verdict is None
            process.hang_up()
            self.deaths += 1
            self.say("do", f"{process.name} dies")
            self.loop.at(self.short(self.random), self.guard_tells, process, code)

    def stop(self, process):
        if process.stopped_at is None:
            process.stopped_at = self.loop.now

    def go_on(self, process):
        process.frozen = False
        if process.fatal is not None:
            self.kill(process, process.fatal)
        elif process.stopped_at is not None:
            process.stopped_at = None
            held, process.held = process.held, []
            for thread, turn in held:
                self.resume(thread, turn)
