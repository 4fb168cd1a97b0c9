"""A step that is a deal of shards: what `ops_src/shards` does in one process, and what comes of a job where nothing
ever happens.

Gradients are numbers in which there is all that they may depend on, and a sum is a number in which there is which side
is which. So what is added up in another order, twice, or not at all, is another number.
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_kungfu import _core
from ms_kungfu.dataset import sharding
from ms_kungfu.errors import KungFuError
from tests.fault.simulator.setting import Violation


def plus(left, right):
    return hash((1, left, right))


def times(share, value):
    return value if share == 1 else hash((2, share, value))


def over(divisor, value):
    return hash((3, divisor, value))


def gradient(weights, seed, step, group, samples):
    return hash((4, weights, seed, step, group, tuple(samples)))


def updated(weights, roots):
    return hash((5, weights, tuple(roots)))


class Tree:
    """`tree.h`: a node is (level, index), and named as the highest one of those that are the same."""

    def __init__(self, leaves):
        self.leaves = leaves
        self.root = (leaves - 1).bit_length(), 0

    def highest(self, level, index):
        while level < self.root[0] and (index ^ 1) << level >= self.leaves:
            level, index = level + 1, index // 2
        return level, index

    def add(self, nodes, leaf, value):
        """To the nodes that there are, as far as siblings meet."""
        node = self.highest(0, leaf)
        if node in nodes:
            raise Violation(f"leaf {leaf} is added twice")
        while node != self.root and (sibling := (node[0], node[1] ^ 1)) in nodes:
            other = nodes.pop(sibling)
            value = plus(other, value) if node[1] % 2 else plus(value, other)
            node = self.highest(node[0] + 1, node[1] // 2)
        nodes[node] = value

    def sum(self, nodes, node=None):
        node = self.root if node is None else node
        if node in nodes:
            return nodes[node]
        level, index = node
        while level and (2 * index + 1) << (level - 1) >= self.leaves:
            level, index = level - 1, 2 * index
        if not level:
            raise Violation(f"the sum is made without leaf {index}")
        return plus(self.sum(nodes, (level - 1, 2 * index)), self.sum(nodes, (level - 1, 2 * index + 1)))


def lose(dealt, rank):
    """`partition.h`: this rank's leaves are the others', beside what these have."""
    lost = dealt.pop(rank)
    begin = 0
    for place, other in enumerate(sorted(dealt), 1):
        end = len(lost) * place // len(dealt)
        dealt[other] = sorted(dealt[other] + lost[begin:end])
        begin = end


@dataclass(frozen=True)
class Part:
    """What a rank brings to the sum of a group: its nodes, and the deal as it knows it."""

    nodes: dict
    deal: tuple


class Owes(Exception):
    """This rank has more to compute before it can take part in the sum."""


class Step:
    """`step.h`: one process's part in a step."""

    def __init__(self, core):
        self._core = core
        self._segment = None
        self._generation = 0  # in which the step before has ended
        self._over = True
        self._taken = None
        self.inside = ""  # what the process is at: a "shard", the "update", or nothing of a step

    def begin(self, leaves, last, mean, weights, key):
        segment = self._core.segment
        if segment is not self._segment:
            self._segment, self._generation = segment, 0
        members = segment.members(self._generation)
        mine = [weights[rank] for rank in members if rank < len(weights)]
        if len(mine) < len(members):
            mine = []
        self.dealt = {rank: list(_core.partition_shards(leaves, members, mine, rank)) for rank in members}
        self._tree, self._leaves, self._last, self._mean, self.key = Tree(leaves), leaves, last, mean, key
        self._brought, self._sums, self._roots = set(), None, []
        self._over, self._taken = False, None
        self.seconds, self.computed = 0.0, 0

    def missing(self):
        return [leaf for leaf in self.dealt[self._core.own_rank] if leaf not in self._brought]

    def take(self, what):
        if self._over:
            raise KungFuError("no sharded step has begun")
        if isinstance(what, int) and what not in self.missing():
            raise KungFuError(f"shard {what} isn't assigned to this rank, or was already added")
        self._taken, self._taken_at = what, self._core.world.loop.now
        self.inside = "shard"

    def bring(self, gradients):
        """One leaf's, of each group: the roots where the step is over, else None, and there is more in `missing`."""
        taken, self._taken = self._taken, None
        if self._over or taken is None:
            raise KungFuError("a second sum in one step, or one outside of it")
        self.inside = "update"
        if taken == "for hashes":
            self.hashes = [value % 2**64 for value in gradients]
            return None
        if self._sums is None:
            self._sums = [{} for _ in gradients]
        if isinstance(taken, int):
            share = self._last if taken + 1 == self._leaves else 1
            for group in range(len(self._roots), len(gradients)):
                self._tree.add(self._sums[group], taken, times(share, gradients[group]))
            self._brought.add(taken)
            self.seconds += self._core.world.loop.now - self._taken_at
            self.computed += 1
        self._core.world.place("when a shard is added")
        self._over = not self.missing() and self._reduce(len(gradients))
        if not self._over:
            self._core.world.place("between two shards")
            return None
        return list(self._roots)

    def _reduce(self, groups):
        divisor = self._leaves - 1 + self._last if self._mean else 1
        while (group := len(self._roots)) < groups:
            name = f"shards/{group}"
            try:
                parts, generation = self._core.renew(name, lambda now, g=group: self._part(now, g), self._generation)
            except Owes:
                return False
            self._move_to(generation)
            deals = {part.deal for part in parts.values()}
            if len(deals) > 1:
                raise Violation(f"{self._core.process.name}: the ranks of a step deal its shards differently: {deals}")
            nodes = {}
            for part in parts.values():
                if nodes.keys() & part.nodes.keys():
                    raise Violation(f"a leaf is brought twice: {parts}")
                nodes.update(part.nodes)
            self._roots.append(over(divisor, self._tree.sum(nodes)))
            self._core.world.place("between the sums of a step")
        return True

    def _part(self, generation, group):
        self._move_to(generation)
        if self.missing():
            raise Owes
        deal = tuple((rank, tuple(leaves)) for rank, leaves in sorted(self.dealt.items()))
        return Part(dict(self._sums[group]), (self._leaves, self._last, self._mean, self.key, deal))

    def _move_to(self, generation):
        while self._generation < generation:
            self._generation += 1
            (dead,) = set(self.dealt).difference(self._segment.members(self._generation))
            lose(self.dealt, dead)

    def members(self):
        now = self._core.segment
        return now.members(self._generation if now is self._segment else 0)

    def check_wait(self, name):
        """A rank that waits for a sum owes nothing to it, so that no ranks wait in a circle."""
        if self.inside and name.startswith("shards/") and self.missing():
            raise Violation(f"{self._core.process.name} waits for {name} and owes the leaves {self.missing()}")


class Undisturbed:
    """The weights after each step of a job of one worker, to which nothing happens: written without the above."""

    def __init__(self, setup):
        self._setup = setup
        self._weights = [0]
        self._epoch, self._number = -1, 0
        self._rest = []

    def after(self, step):
        while len(self._weights) <= step:
            self._weights.append(self._next(self._weights[-1]))
        return self._weights[step]

    def _next(self, weights):
        setup, done = self._setup, len(self._weights) - 1
        changes = [pair for step, *pair in sorted(setup.resharded) if step <= done]
        global_batch, count = changes[-1] if changes else (setup.global_batch, setup.shards)
        unit = global_batch // count
        length = sharding.step_length(len(self._rest), global_batch, setup.drop_remainder, unit)
        if length == 0:
            self._epoch, self._number = self._epoch + 1, 0
            self._rest = sharding.permutation(setup.samples, setup.seed, self._epoch).tolist()
            length = sharding.step_length(len(self._rest), global_batch, setup.drop_remainder, unit)
        batch, self._rest = self._rest[:length], self._rest[length:]
        shards = [batch[begin : begin + unit] for begin in range(0, length, unit)]
        share = len(shards[-1]) / unit
        for part in range(setup.sums):
            key = self._epoch << 40 | self._number << 8 | part
            roots = []
            for group in range(len(setup.groups)):
                leaves = [gradient(weights, setup.seed, key, group, samples) for samples in shards]
                leaves[-1] = times(share, leaves[-1])
                roots.append(over(len(leaves) - 1 + share, self._sum(leaves)))
            weights = updated(weights, roots)
        self._number += 1
        return weights

    def _sum(self, leaves):
        """On the left as many as there are in the largest full tree that isn't all of it."""
        if len(leaves) == 1:
            return leaves[0]
        left = 1 << (len(leaves) - 1).bit_length() - 1
        return plus(self._sum(leaves[:left]), self._sum(leaves[left:]))
