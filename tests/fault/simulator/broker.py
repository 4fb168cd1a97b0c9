"""The broker: the real one, without its socket. Messages take a while."""

from __future__ import annotations

import json

import msgspec

from ms_kungfu import broker_protocol
from ms_kungfu.errors import CollectiveTimeoutError, PeerLostError, ResizeError
from ms_kungfu.launcher.controller import broker
from ms_kungfu.launcher.state.states import WorkerState
from ms_kungfu.launcher.wire import messages as m
from tests.fault.simulator.clock import Condition
from tests.fault.simulator.setting import Violation


class Broker(broker.Broker):
    """The real one, watched."""

    def __init__(self, world, *args, **options):
        self._world = world
        self._committed_before = None
        super().__init__(*args, **options)

    def _after_commit(self):
        """Who is let in anew is not known to be dead: its place would count as filled, and a step miss its samples."""
        before, self._committed_before = self._committed_before, self.versions.current
        if self._world.first_version is None:
            self._world.first_version = self.versions.committed
        if before is not None and self.on_commit is not None:
            history = self._world.server.leadership.history
            if all(snapshot["versions"]["chosen"] != self.versions.committed for snapshot in history):
                raise Violation(f"version {self.versions.committed} is chosen, and isn't on record")
        is_heads = self._world.job.context.manager.broker is self  # of a controller before it that wakes nobody hears
        if before is not None and is_heads:
            processes = self._world.job.context.manager.processes
            there = {p.peer for p in processes if p.state is not WorkerState.UNKILLABLE}
            for peer in self._committed_before.workers:
                if peer not in before.workers and peer not in there:
                    raise Violation(
                        f"version {self._committed_before.version} is chosen with {peer}, a newcomer that died"
                    )
        super()._after_commit()

    def answer_of(self, request):
        """A worker that commits a version by its request may fail before its answer."""
        cluster = self.versions.clusters.get(request.version)
        if cluster is not None and request.peer in cluster.workers:
            self._world.requesters.setdefault(request.version, set()).update(self._holders_of(request))
        return super().answer_of(request)

    def grant(self, asker, request, grant):
        """A worker that comes to the version with the state may fail on the way, and takes it along."""
        holders = [process for process in self._holders_of(request) if process.alive]
        if holders:
            self._world.holders.setdefault(grant.cluster.version, []).extend(holders)
        super().grant(asker, request, grant)

    def _holders_of(self, request):
        """The worker that has sent the request, if it has the training state."""
        who = request.peer, request.incarnation
        return [each for each in self._world.everybody if each.member.received and each.granted == who]

    def refuse(self, version, reason):
        # Told in the launcher's log: an external config server takes wishes that can't come true.
        self._world.refused.add(version)
        super().refuse(version, reason)


class Request:
    """A worker's, at its host's agent."""

    def __init__(self, world, process, host, relay, asked):
        self._process, self._host, self._relay, self._asked = process, host, relay, asked
        self.pid = process.pid
        self.news = Condition(world)
        self.answer, self.fds = None, ()
        self.counts_from = world.loop.now
        self.ended = False
        process.requests.append(self)

    def arrive(self):
        if self in self._process.requests:
            self._relay.serve(self, self._asked)

    def send(self, message, fds=()):
        self.answer, self.fds = message, self._process.world.received(fds, self._process)
        self.end()

    def end(self):
        self.ended = True
        self.news.notify_all()

    def note_waiting(self):
        self.counts_from = self._process.world.loop.now

    def withdraw(self):
        """The agent sees the end of the connection."""
        self._process.requests.remove(self)
        self._host.loop.call_later(self._process.world.short(self._process.world.random), self._relay.withdraw, self)


class EndWatch:
    """A worker's wait for the end of its job. It takes no random numbers: a seed's history is the same without it."""

    def __init__(self, world, process):
        host, relay = world.agent_of(process)
        self._host, self._checkpoints = host, relay.last_checkpoints
        self._news, self._number, self._ended = Condition(world), 0, False
        process.end_watches.append(self)
        host.loop.call_later(0.001, self._checkpoints.add, self)

    def note_end(self, number):
        self._number = number
        self._news.notify_all()

    def receive(self):
        while not self._number and not self._ended:
            self._news.wait(None)
        return self._number

    def hang_up(self):
        """As at the end of its process, too."""
        if not self._ended:
            self._ended = True
            self._host.loop.call_later(0.001, self._checkpoints.remove, self)
            self._news.notify_all()

    def close(self):
        self.hang_up()


class BrokerClient(broker_protocol.BrokerClient):
    """A worker's end: the real one, whose messages take a while."""

    def __init__(self, world):
        self._world = world

    def close(self):
        pass

    def report(self, report):
        """As a message that overtakes none."""
        process = self._world.current.process
        said = m.TO_BROKER(json.dumps(report).encode())
        if process.host.server is not None and not process.host.is_over:
            process.host.loop.call_soon(process.host.server.broker.report, said)

    def request_leave(self, peer, timeout, terminated=False):
        request = {"type": "leave_request", "peer": str(peer), "terminated": terminated}
        answer = self._ask(request, str(peer), "leaving", timeout)
        if isinstance(answer, str):
            raise ResizeError(answer)

    def open_end_watch(self):
        return EndWatch(self._world, self._world.current.process)

    def _tell(self, request, about, timeout):
        return msgspec.to_builtins(self._exchange(request, timeout)[0])

    def _exchange(self, request, timeout):
        """The answer, and the descriptors."""
        world, process = self._world, self._world.current.process
        world.place("asks", takes_time=True)
        host, relay = world.agent_of(process)
        asking = Request(world, process, host, relay, m.TO_BROKER.convert(request))
        host.loop.call_later(world.short(world.current.random), asking.arrive)
        while not asking.ended:
            left_s = None if timeout is None else asking.counts_from + timeout - world.loop.now
            if left_s is not None and left_s <= 0.0:
                asking.withdraw()
                raise CollectiveTimeoutError("no answer from the launcher")
            asking.news.wait(left_s)
        process.requests.remove(asking)
        world.place("is answered")
        if asking.answer is None:
            raise PeerLostError("the launcher has ended")
        return asking.answer, asking.fds

    def _ask(self, request, who, about, timeout):
        answer, fds = self._exchange(request, timeout)
        if isinstance(answer, m.Slot):
            peer = broker_protocol.PeerID.parse(answer.peer)
            self._world.current.process.granted = (peer, answer.incarnation)
            cluster = answer.cluster.cluster()
            return broker_protocol.Granted(cluster, answer.rank, fds[0], peer, answer.incarnation, fds[1:])
        return broker_protocol._meant(msgspec.to_builtins(answer), (), None, who)
