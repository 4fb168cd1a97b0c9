"""What the ranks of several hosts do together: the contract of `transport.h`, message by message, without bytes.

A rank brings its part to its host's transport. The transports tell each other theirs; when all fit one generation each
has the outcome, says so, and gives it when all others have said so too. After the loss of a host a new epoch begins.
"""

from __future__ import annotations

import os

from ms_kungfu.errors import PeerLostError
from tests.fault.simulator.clock import Condition
from tests.fault.simulator.collectives import Core, Deadline, Segment
from tests.fault.simulator.setting import Violation


class Memory(Segment):
    """A segment or a board. The processes that wait for its list of deaths are called."""

    def __init__(self, world, size, version, recovers):
        super().__init__(world, size, version, recovers)
        self.watchers = []

    def mark_lost(self, rank, reason, recover, reaped):
        process = self.attached.get(rank)
        if process is None or not process.host.is_lost:
            super().mark_lost(rank, reason, recover, reaped)
        elif rank not in self.deaths:  # its host has been given up, and may not know yet
            self.deaths.append(rank)
            self.changed.notify_all()
        for watcher in self.watchers:
            watcher()

    def request_sync_point(self, number):
        self.sync_points = max(self.sync_points, number)


class Operation:
    """At one transport."""

    def __init__(self, world):
        self.brought = {}  # by the host's ranks
        self.at_least = 0  # the generation that they want
        self.missing = None  # how many of the host's dead are not in its part, once that is complete
        self.round = 0
        self.parts = {}  # of this epoch: (round, host) -> missing, at_least, has, part
        self.told = set()  # rounds of this epoch
        self.have = None  # (epoch, (generation, what its members brought)), got in this epoch
        self.kept = None  # the same, of an earlier one
        self.failed = ""  # why it comes to nothing
        self.acknowledged = set()
        self.given = None
        self.news = Condition(world)


class Transport:
    """`_core.InterHostTransport`."""

    def __init__(self, world, here, local, board, *, host, host_of_rank, names, connections, for_models, **others):
        self.world, self.host, self.board, self.local = world, here, board, local
        self.own, self.names, self.host_of_rank = host, names, host_of_rank
        self.ends = {}
        for place, (fds, more) in enumerate(zip(connections, for_models)):
            self.ends[place] = [self._take(fd, place) for fd in (*fds, *more)]
        del self.ends[self.own]
        self.apart = {}  # hosts -> why nothing comes from them any more
        self.losses = []  # hosts, in the order in which they were told
        self.operations = {}  # (name, number) -> Operation, those that aren't over
        self.given = {}  # name -> how many
        self.begun = {}  # name -> how many
        self.endings = {}  # hosts without living ranks -> what they had begun
        self.progress = {}  # hosts -> what they had given when this epoch began
        self.early = []  # of epochs to come
        self.is_closed = False
        local.watchers.append(self._look)
        board.watchers.append(self._look)

    def _take(self, fd, place):
        end = self.host.descriptors[fd]
        os.close(fd)
        end.on_message = lambda message: self.host.loop.call_soon(self._hear, place, message)
        end.on_end = lambda why: self.host.loop.call_soon(self._has_ended, place, why)
        if end.error is not None or end.eof or not end.is_open:
            self.host.loop.call_soon(self._has_ended, place, "it was closed")
        return end

    # ---- the launcher's ----

    def connect(self, local_rank):
        return tuple(self.host.descriptor_of(self) for _ in range(2))

    def lose_host(self, place):
        ranks = [rank for rank, host in enumerate(self.host_of_rank) if host == place]
        if not set(ranks) <= set(self.board.deaths):
            raise Violation(
                f"{self.host.name} is told of a host's loss in version {self.board.version} before its deaths"
            )
        if place in self.losses:
            return
        self.losses.append(place)
        for end in self.ends.get(place, ()):
            end.close()
        self.progress = {}
        for operation in self.operations.values():
            operation.round, operation.parts, operation.told, operation.acknowledged = 0, {}, set(), set()
            operation.kept, operation.have = operation.have or operation.kept, None
        self._tell_all(("begin", dict(self.given)))
        if self._is_empty():
            self._tell_all(("ending", dict(self.begun)))
        early, self.early = self.early, []
        for place, message in early:
            self._hear(place, message)
        self._look()

    def unreachable(self):
        return [(place, why) for place, why in self.apart.items() if place not in self.losses]

    def failure(self):
        return ""

    def close(self):
        waiting = {rank for each in self.operations.values() if each.given is None for rank in each.brought}
        left = [who for who in self.local.attached.values() if who.alive and waiting]
        if left and not self.is_closed:  # a worker that waits there fails with an error of its program's
            gone = f"{self.host.name} takes the transport of version {self.board.version} from {left[0].name}"
            self.world.trouble.append(Violation(gone))
        self.is_closed = True
        for ends in self.ends.values():
            for end in ends:
                end.close()

    # ---- the ranks' ----

    def bring(self, rank, name, number, what, at_least):
        """The operation, whose `given` tells (generation, what its members brought) in time."""
        operation = self._operation(name, number)
        operation.brought[rank] = what
        operation.at_least = max(operation.at_least, at_least)
        self._advance(name, number, operation)
        return operation

    # ---- between transports ----

    def _operation(self, name, number):
        self.begun[name] = max(self.begun.get(name, 0), number)
        return self.operations.setdefault((name, number), Operation(self.world))

    def _others(self):
        return [place for place in self.ends if place not in self.losses]

    def _tell_all(self, message):
        for place in self._others():
            if place not in self.apart:
                end = self.ends[place][0]
                end.transmit((tuple(self.losses), message))

    def _has_ended(self, place, why):
        if not self.is_closed and place not in self.apart:
            self.apart[place] = why
            for end in self.ends[place]:
                end.close()

    def _hear(self, place, told):
        losses, message = told
        own = tuple(self.losses)
        if self.is_closed or place in self.losses or losses == own[: len(losses)] != own:
            return  # of an epoch that is over
        if losses != own:
            if losses[: len(own)] != own:
                raise Violation(f"{self.host.name} has lost {own}, and {self.names[place]} {losses}: not one order")
            self.early.append((place, told))
            return
        what, *rest = message
        if what == "begin":
            self.progress[place] = rest[0]
        elif what == "ending":
            self.endings[place] = rest[0]
        else:
            name, number, *rest = rest
            if number <= self.given.get(name, 0):
                return
            operation = self.operations.setdefault((name, number), Operation(self.world))
            if what == "part":
                operation.parts[rest[0], place] = rest[1:]
            elif what == "have":
                operation.acknowledged.add(place)
            else:
                self._fail(operation, rest[0])
        self._look()

    def _is_empty(self):
        here = [rank for rank, host in enumerate(self.host_of_rank) if host == self.own]
        return set(here) <= set(self.board.deaths)

    def _look(self):
        """Something has changed."""
        if self.is_closed or self.host.is_over:
            return
        if self._is_empty() and self.own not in self.endings:
            self.endings[self.own] = dict(self.begun)
            self._tell_all(("ending", self.endings[self.own]))
        for (name, number), operation in list(self.operations.items()):
            self._advance(name, number, operation)

    def _advance(self, name, number, operation):
        if operation.failed or self.is_closed:
            return
        if operation.missing is None and not self._completes(name, number, operation):
            return
        others = self._others()
        if self.losses and not all(place in self.progress for place in others):
            return
        done = [place for place in others if self.progress.get(place, {}).get(name, 0) >= number]
        if done and not (operation.have or operation.kept):
            raise Violation(f"{name} {number} was given at {self.names[done[0]]}, and {self.host.name} lacks it")
        if done:
            self._give(name, number, operation, operation.have or operation.kept)
            return
        ended = [place for place in others if place in self.endings and number > self.endings[place].get(name, 0)]
        while operation.have is None:
            if operation.round not in operation.told:
                operation.told.add(operation.round)
                part = operation.missing, operation.at_least, operation.kept, self._part(operation)
                operation.parts[operation.round, self.own] = part
                self._tell_all(("part", name, number, operation.round, *part))
            told = {
                place: operation.parts.get((operation.round, place))
                for place in (self.own, *others) if place not in ended
            }  # fmt: skip
            if None in told.values():
                return
            if operation.round == 0 and operation.kept and all(part[2] == operation.kept for part in told.values()):
                self._give(name, number, operation, operation.kept)
                return
            operation.kept = None
            generation = self._generation(told, ended)
            if generation is None:
                return  # the board hasn't heard yet of all that the others know
            dead = self.board.deaths[:generation]
            if any(self._count(place, dead) > part[0] for place, part in told.items()):
                operation.missing = max(operation.missing, self._count(self.own, dead))
                operation.round += 1
                continue
            brought = {rank: what for part in told.values() for rank, what in part[3].items()}
            operation.have = tuple(self.losses), (generation, brought)
            self._tell_all(("have", name, number))
        if operation.acknowledged >= {place for place in others if place not in ended}:
            self._give(name, number, operation, operation.have)

    def _completes(self, name, number, operation):
        """The ranks of the host have all brought their parts, or died."""
        here = [rank for rank, host in enumerate(self.host_of_rank) if host == self.own]
        dead = [rank for rank in self.board.deaths if rank in here]
        awaited = [rank for rank in here if rank not in operation.brought and rank not in dead]
        gone = [rank for rank in awaited if rank in self.board.lost]
        if gone and operation.brought:
            self._fail(operation, f"rank {gone[0]}: {self.board.lost[gone[0]]}")
            self._tell_all(("failed", name, number, operation.failed))
        if awaited:
            return False
        if not operation.brought and number > self.endings.get(self.own, self.begun).get(name, 0):
            return False  # no rank here had begun it
        operation.missing = max(
            (place + 1 for place, rank in enumerate(dead) if rank not in operation.brought), default=0
        )
        return True

    def _part(self, operation):
        dead = [rank for rank in self.board.deaths if self.host_of_rank[rank] == self.own][: operation.missing]
        return {rank: what for rank, what in operation.brought.items() if rank not in dead}

    def _count(self, place, dead):
        return sum(self.host_of_rank[rank] == place for rank in dead)

    def _generation(self, told, ended):
        """The earliest that is late enough for all; None: more deaths are to be heard of."""
        wanted = {place: part[0] for place, part in told.items()}
        wanted |= {place: self.host_of_rank.count(place) for place in (*ended, *self.losses)}
        at_least = max(part[1] for part in told.values())
        for generation in range(at_least, len(self.board.deaths) + 1):
            if all(self._count(place, self.board.deaths[:generation]) >= count for place, count in wanted.items()):
                return generation
        return None

    def _fail(self, operation, why):
        operation.failed = why
        operation.news.notify_all()

    def _give(self, name, number, operation, outcome):
        operation.given = outcome[1]
        del self.operations[name, number]
        self.given[name] = max(self.given.get(name, 0), number)
        operation.news.notify_all()


class HostsCore(Core):
    """`_core` in a worker of one of several hosts."""

    def join(self, *arguments):
        self.transport = None
        super().join(*arguments)

    def join_hosts(
        self, fd, board, transport, models, rank, where, address, has_state, collective_timeout_s, join_timeout_s
    ):
        world, self.transport, before = self.world, self.world.received_things[transport], self.segment
        world.place("joining")
        local, board = world.received_things[fd], world.received_things[board]
        if before is not None and board.version <= before.version:
            raise Violation(f"{self.process.name} goes from version {before.version} to {board.version}")
        if rank in board.attached:
            raise Violation(
                f"{self.process.name} and {board.attached[rank].name} are both rank {rank} of {board.version}"
            )
        self.segment, self.own_rank = board, rank
        self.generations, self.numbers, self.committed_in, self.reduced_in = {}, {}, [], 0
        board.attached[rank] = self.process
        here = [r for r, place in enumerate(where) if place == where[rank]]
        local.attached[here.index(rank)] = self.process
        self.has_state, self.collective_timeout_s = has_state, collective_timeout_s
        self.givers = []
        world.say("in", f"{self.process.name} is rank {rank} of {board.size} in version {board.version}")
        self.states, _ = self.run("kungfu/join", has_state, timeout_s=join_timeout_s)
        world.place("joined")

    def state_root(self):
        if self.transport is None:
            return super().state_root()
        return next((rank for rank in self.living() if self.states.get(rank)), self.segment.size)

    def set_sources(self, givers):
        self.givers = givers

    def broadcast(self, name, input, output, root, dtype=-1, kind=""):
        if self.transport is None:
            super().broadcast(name, input, output, root, dtype, kind)
            return
        givers = self.givers if root in self.givers else [root]
        # Also where a giver is known to have died: that is for the transports to find, all alike.
        brought, _ = self.run(name, (givers, input.copy()))
        if any(each is not None and each[0] != givers for each in brought.values()):
            raise Violation(f"{name}: {givers} give to {self.process.name}, and others to others")
        where = self.transport.host_of_rank
        giver_on = {where[giver]: giver for giver in reversed(givers)} | {where[root]: root}
        gone = [giver for giver in giver_on.values() if giver not in brought]
        if gone:
            raise PeerLostError(f"broadcast {name}: rank {gone[0]}, which gives, has died")
        taking = sorted({where[rank] for rank in brought} - giver_on.keys())
        giver_on |= {host: giver_on[sorted(giver_on)[k % len(giver_on)]] for k, host in enumerate(taking)}
        output[:] = brought[giver_on[where[self.own_rank]]][1]

    def run(self, name, brings, root=None, generation=0, timeout_s=None):
        if self.transport is None:
            return super().run(name, brings, root, generation)
        world, transport = self.world, self.transport
        number = self.numbers[name] = self.numbers.get(name, 0) + 1
        world.place(f"before its word in {name}", takes_time=True)
        operation = transport.bring(self.own_rank, name, number, brings, generation)
        world.place(f"after its word in {name}")
        deadline = Deadline(world, self.segment, timeout_s or self.collective_timeout_s, f"{name}: not all have come")
        while operation.given is None:
            if operation.failed:
                raise PeerLostError(operation.failed)
            operation.news.wait(deadline.left_s())
        generation, brought = operation.given
        return {rank: brought.get(rank) for rank in self.segment.members(generation)}, generation
