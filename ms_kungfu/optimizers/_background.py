"""The groups of a plan, reduced in the background while the backward pass goes on."""

from __future__ import annotations

from mindspore import nn

from ms_kungfu.ops._overlap import AllReduceStart, AllReduceWait
from ms_kungfu.optimizers._grouping import take


class BackgroundReduction(nn.Cell):
    """Start the reduction of each group of gradients, then wait for all of them.

    `members` are the gradients of each group, in the order of the parameters; a backward pass makes the last first, so
    the last group is started first. Its operation is called ``name/overlap/0``: were they numbered the other way, ranks
    with another number of groups would wait for each other instead of seeing at the first one that they differ.
    """

    def __init__(self, members: tuple[tuple[int, ...], ...], op: str, name: str) -> None:
        super().__init__(auto_prefix=False)
        self.members = members[::-1]
        self.starts = tuple(AllReduceStart(op, f"{name}/overlap/{i}") for i in range(len(members)))
        self.wait = AllReduceWait([len(group) for group in self.members])
        started = [i for group in self.members for i in group]
        self.places = tuple(started.index(i) for i in range(len(started)))

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        results = ()
        brought = ()
        tickets = ()
        for i in range(len(self.members)):
            group = take(gradients, self.members[i])
            started = self.starts[i](group)
            results = results + started[:-1]  # type: ignore[assignment]
            brought = brought + group  # type: ignore[assignment]
            tickets = tickets + started[-1:]  # type: ignore[assignment]
        return take(self.wait(results + brought + tickets), self.places)
