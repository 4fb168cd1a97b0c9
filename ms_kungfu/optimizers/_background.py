"""The groups of a plan, reduced in the background while the backward pass goes on."""

from __future__ import annotations

from mindspore import nn

from ms_kungfu.fusion import Plan
from ms_kungfu.ops._overlap import AllReduceStart, AllReduceWait


# By slices: a graph of ResNet-50's 161 gradients, taken one by one, took seconds longer to compile.
def take(tensors, stretches):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """The stretches [start, stop) of a tuple, one after another."""
    taken = ()
    for start, stop in stretches:
        taken = taken + tensors[start:stop]
    return taken


class BackgroundReduction(nn.Cell):
    """Start the reduction of each group of gradients, then wait for all of them.

    A backward pass makes the last gradients first, so the last group is started first. Its operation is called
    ``name/overlap/0``: were they numbered the other way, ranks with another number of groups would wait for each other
    instead of seeing at the first one that they differ.
    """

    def __init__(self, plan: Plan, op: str, name: str) -> None:
        super().__init__(auto_prefix=False)
        self.runs = plan.runs()[::-1]
        self.starts = tuple(AllReduceStart(op, f"{name}/overlap/{i}") for i in range(len(self.runs)))
        sizes = [len(group.members) for group in plan.groups[::-1]]
        self.wait = AllReduceWait(sizes)
        # Where each group's results begin among all.
        begins = [sum(sizes[:i]) for i in range(len(sizes))][::-1]
        self.places = tuple((begins[g] + start, begins[g] + stop) for g, start, stop in plan.pieces())

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        results = ()
        brought = ()
        tickets = ()
        for i in range(len(self.runs)):
            group = take(gradients, self.runs[i])
            started = self.starts[i](group)
            results = results + started[:-1]
            brought = brought + group
            tickets = tickets + started[-1:]
        return take(self.wait(results + brought + tickets), self.places)
