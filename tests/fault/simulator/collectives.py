"""The runtime's collectives: what `docs/recovery-protocol.md` argues for, without its shared memory.

Final words, generations, steps that settle. It has the functions of `ms_kungfu._core` that a worker calls.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from ms_kungfu.comm import OPS
from ms_kungfu.errors import CollectiveTimeoutError, PeerLostError
from tests.fault.simulator.clock import Condition
from tests.fault.simulator.setting import MAX_WORKERS, Violation
from tests.fault.simulator.shards import Step

_RESERVE_S = 5.0  # of a deadline, for the launcher (deadline.h)


class Segment:
    """The shared memory of a cluster version: final words of operations, and the list of deaths."""

    def __init__(self, world, size, version, recovers):
        if world.loop.now < world.no_descriptors_until:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if size > MAX_WORKERS:
            raise ValueError(f"{size} ranks are too many")
        self.world, self.size, self.version, self.recovers = world, size, version, recovers
        self.fd = world.new_segment(self)
        self.announced = version
        self.sync_points = 0
        self.deaths = []
        self.reaped = set()
        self.lost = {}  # rank -> reason, if no rank goes on
        self.attached = {}  # rank -> process
        self.words = {}  # (name, generation, number) -> {rank: what it brings}
        self.changed = Condition(world)
        self.waits = {}  # the same keys -> Condition
        self.holds, self.held_at, self.held_s = False, 0.0, 0.0  # the members' deadlines; in all, before `held_at`
        self.sleeping = {}  # rank -> the one that it waits for, and its deadline
        self.ending = set()  # ranks that the launcher is about to end
        self.steps = {}  # rank -> its last step, the usual duration, and when the step ended

    def members(self, generation):
        dead = self.deaths[:generation]
        return [rank for rank in range(self.size) if rank not in dead]

    # What the launcher does.

    def mark_lost(self, rank, reason, recover, reaped):
        process = self.attached.get(rank)
        if process is not None and process.alive and process.fatal is None:
            raise Violation(f"{process.name}, rank {rank} of version {self.version}, is marked dead and lives")
        if reaped:
            self.reaped.add(rank)
        if rank in self.deaths or rank in self.lost:
            return
        if recover:
            self.deaths.append(rank)
        else:
            self.lost[rank] = reason
        self.changed.notify_all()
        for wait in self.waits.values():
            wait.notify_all()

    def gave_up(self, rank):
        return ""

    def awaited(self):
        return [(own, peer, deadline.is_overdue()) for own, (peer, deadline) in self.sleeping.items()]

    def set_ending(self, rank, ending):
        (self.ending.add if ending else self.ending.discard)(rank)

    def heartbeat(self, rank):
        process = self.attached.get(rank)
        if process is None:
            return 0
        now = self.world.loop.now if process.stopped_at is None else process.stopped_at
        return 1 + int(now * 10)

    def progress(self, rank):
        if rank not in self.steps:
            return None
        step, each_s, ended_at = self.steps[rank]
        return step, each_s, self.world.loop.now - ended_at

    def activity(self, rank):
        return 0, 0.0, ""

    def announce(self, version):
        if version < self.announced:
            raise Violation(f"version {version} is announced after {self.announced}")
        self.announced = version

    def hold_deadlines(self, held):
        self.held_s, self.holds, self.held_at = self.held_for_s(), held, self.world.loop.now

    def held_for_s(self):
        """In all."""
        return self.held_s + (self.world.loop.now - self.held_at if self.holds else 0.0)

    def close(self):
        pass


class Deadline:
    """Of a wait in a segment: it runs while the launcher doesn't hold it."""

    def __init__(self, world, segment, limit_s, what):
        self._world, self._segment, self._limit_s, self._what = world, segment, limit_s, what
        self._began = world.loop.now - segment.held_for_s()

    def _ran_s(self):
        return self._world.loop.now - self._segment.held_for_s() - self._began

    def left_s(self):
        """CollectiveTimeoutError where nothing is."""
        left_s, segment = self._limit_s - self._ran_s(), self._segment
        if segment.holds:
            return max(left_s, 1.0)  # it is looked at again
        if left_s <= 0:
            raise CollectiveTimeoutError(f"{self._what} within {self._limit_s:g} s, version {segment.version}")
        return left_s

    def is_overdue(self):
        return not self._segment.holds and self._ran_s() > self._limit_s - min(self._limit_s / 2, _RESERVE_S)


class Lost(Exception):
    """A member's part is unfinished for ever."""


class Core:
    """`ms_kungfu._core` in one process, as far as a training asks it."""

    def __init__(self, world, process):
        self.world, self.process = world, process
        self.segment = None
        self.own_rank = 0
        self.generations = {}  # name -> the generation it has come to
        self.numbers = {}  # (name, generation) -> operations so far
        self.committed_in = []  # the generations of commits, from 1, that no rank has asked for
        self.reduced_in = 0  # the latest one of anything else, likewise
        self.has_state = False
        self.sharded = Step(self)

    # What concerns the machine, or other libraries.

    def set_join_handler(self, handler):
        pass

    def set_resize_handler(self, handler):
        pass

    def set_store_handlers(self, announce, find):
        pass

    def set_delay_for_tests(self, delay_ms):
        pass

    def set_claim(self, text):
        pass

    def set_sources(self, givers):
        pass  # on one host they make no difference

    def note_step(self, step, each_s):
        if self.segment is not None:
            self.segment.steps[self.own_rank] = step, each_s, self.world.loop.now

    def note_activity(self, activity):
        pass

    def traffic(self):
        return 0, 0, 0.0, 0.0, []

    def set_weight(self, samples):
        pass

    def join(self, fd, rank, address, has_state, collective_timeout_s, join_timeout_s):
        world, segment = self.world, self.world.segments[fd]
        world.place("joining")
        if self.segment is not None and segment.version <= self.segment.version:
            raise Violation(f"{self.process.name} goes from version {self.segment.version} to {segment.version}")
        if rank in segment.attached:
            raise Violation(
                f"{self.process.name} and {segment.attached[rank].name} are both rank {rank} of version "
                f"{segment.version}"
            )
        self.segment, self.own_rank = segment, rank
        self.generations, self.numbers, self.committed_in, self.reduced_in = {}, {}, [], 0
        segment.attached[rank] = self.process
        self.has_state = has_state
        segment.changed.notify_all()
        world.say("in", f"{self.process.name} is rank {rank} of {segment.size} in version {segment.version}")
        self.collective_timeout_s = collective_timeout_s
        deadline = Deadline(world, segment, join_timeout_s, "join: not all have come")
        while any(r not in segment.attached and r not in segment.deaths for r in range(segment.size)):
            self._check_lost()
            segment.changed.wait(deadline.left_s())
        world.place("joined")

    def leave(self, reason):
        pass

    def rank(self):
        return self.own_rank

    def size(self):
        return 1 if self.segment is None else self.segment.size  # a process is a cluster of one until it has joined

    def cluster_version(self):
        return self.segment.version

    def announced_version(self):
        return self.segment.announced

    def deadlines_held(self):
        return self.segment.holds

    def sync_points(self):
        return self.segment.sync_points

    def request_sync_point(self, number):
        self.segment.sync_points = max(self.segment.sync_points, number)

    def living(self):
        return self.segment.members(len(self.segment.deaths))

    def state_root(self):
        segment = self.segment
        for rank in self.living():
            if rank in segment.attached and segment.attached[rank].core.has_state:
                return rank
        return segment.size

    def take_reductions(self):
        commits, latest = self.committed_in, self.reduced_in
        self.committed_in, self.reduced_in = [], 0
        return max(commits, default=0), latest, len(commits), *(commits[:1] or [0]), *(commits[-1:] or [0])

    def members_of(self, generation):
        return self.segment.members(generation)

    def all_reduce(self, name, input, output, op, dtype=-1):
        assert op == OPS["max"]
        brought, generation = self.run(name, input.copy())
        output[:] = np.maximum.reduce(list(brought.values()))
        self.reduced_in = max(self.reduced_in, generation + 1)

    def agree_after_step(self, size, outcome, word):
        row = np.array([self.announced_version(), size, outcome, word, word ^ 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
        self.all_reduce("kungfu/step", row, row, OPS["max"])
        announced, size, outcome, word, complement = map(int, row)
        return announced, size, outcome, word == complement ^ 0xFFFF_FFFF_FFFF_FFFF

    def all_gather(self, name, input, output, dtype=-1, kind=""):
        brought, _ = self.run(name, input.copy())
        output[:] = 0  # of the dead
        for rank, row in brought.items():
            output[rank] = row

    def broadcast(self, name, input, output, root, dtype=-1, kind=""):
        brought, _ = self.run(name, input.copy() if root == self.own_rank else None, root)
        output[:] = brought[root]

    def commit(self, names, contribution):
        """A step's gradient groups: what each participant brought to all of them, once they are of one mind."""
        results = [self.run(name, contribution) for name in names]
        while True:
            latest = max(generation for _, generation in results)
            behind = [k for k, (_, generation) in enumerate(results) if generation < latest]
            if not behind:
                break
            for k in behind:
                results[k] = self.run(names[k], contribution, generation=latest)
        self.committed_in.append(results[0][1] + 1)
        return [brought for brought, _ in results]

    # Of a step that is a deal of shards.

    def begin_sharded_step(self, leaves, last, mean, weights, seed, step, statistics):
        self.sharded.begin(leaves, last, mean, weights, (seed, step))

    def missing_shards(self):
        return self.sharded.missing()

    def take_shard(self, leaf):
        self.sharded.take(leaf)

    def take_no_shard(self):
        self.sharded.take("none")

    def take_shard_for_hashes(self, leaf):
        self.sharded.take("for hashes")

    def shard_hashes(self):
        return self.sharded.hashes

    def end_sharded_step(self):
        self.sharded.inside = ""

    def shard_pace(self):
        return self.sharded.seconds, self.sharded.computed

    def sharded_members(self):
        return self.sharded.members()

    # What they all are made of.

    def run(self, name, brings, root=None, generation=0):
        """What the members of the generation in which the operation ended have brought, by rank; and it."""
        return self.renew(name, lambda _: brings, generation, root)

    def renew(self, name, brings_in, generation=0, root=None):
        """The same where each generation takes something else, which `brings_in` tells; what it raises ends it."""
        segment, own = self.segment, self.own_rank
        if self.sharded.inside == "shard":
            raise Violation(f"{self.process.name} comes to {name} while it computes a shard")
        self.generations[name] = max(self.generations.get(name, 0), generation)
        while True:
            generation = self.generations[name]
            brings = brings_in(generation)
            members = segment.members(generation)
            if root is not None and root not in members:
                raise PeerLostError(f"broadcast {name}: its root, rank {root}, has died")
            if own not in members:
                raise Violation(f"{self.process.name} goes on without itself")
            number = self.numbers[name, generation] = self.numbers.get((name, generation), 0) + 1
            key = name, generation, number
            try:
                words = self._attempt(key, members, brings, root)
                return {rank: words.get(rank) for rank in members}, generation
            except Lost:
                self.world.place("before the next generation")
                self.generations[name] = generation + 1

    def _attempt(self, key, members, brings, root):
        segment, world = self.segment, self.world
        words = segment.words.setdefault(key, {})
        wait = segment.waits.setdefault(key, Condition(world))
        world.place(f"before its word in {key[0]}", takes_time=True)
        words[self.own_rank] = brings
        if len(words) == len(members) or segment.deaths:
            wait.notify_all()
        world.place(f"after its word in {key[0]}")
        self.sharded.check_wait(key[0])
        deadline = Deadline(world, segment, self.collective_timeout_s, f"{key[0]}: not all have come")
        while True:
            missing = [rank for rank in members if rank not in words and (root is None or not self.is_dead(rank, root))]
            if not missing:
                return words
            self._check_lost()
            if self.unfinished(missing):
                raise Lost
            self._sleep(wait, missing[0], deadline)

    def _sleep(self, wait, peer, deadline):
        """For `peer`; CollectiveTimeoutError when the time is over, unless the launcher is about to end that one."""
        segment, own = self.segment, self.own_rank
        left_s = max(deadline.left_s(), 0.1) if peer not in segment.ending else 0.1
        segment.sleeping[own] = peer, deadline
        try:
            wait.wait(left_s)
        finally:
            segment.sleeping.pop(own, None)

    def is_dead(self, rank, root):
        """Of a broadcast only the root's part is missed."""
        return rank != root and rank in self.segment.deaths

    def unfinished(self, missing):
        return any(rank in self.segment.deaths for rank in missing)

    def _check_lost(self):
        if self.segment.lost:
            raise PeerLostError(f"rank {next(iter(self.segment.lost))}: {next(iter(self.segment.lost.values()))}")
