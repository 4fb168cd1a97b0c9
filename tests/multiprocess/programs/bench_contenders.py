"""Contenders that the bench must not trust."""

import os

from benchmarks.contenders.kungfu import KungFu


class OffByOne(KungFu):
    """Its last element is wrong at rank 1, in the timed calls."""

    def loop(self, work):
        right = super().loop(work)

        def wrong(samples, batch):
            seconds = right(samples, batch)
            if self.rank == 1:
                work.sets[0][1][-1][-1] += 1
            return seconds

        return wrong


class Dies(KungFu):
    """Rank 1 is gone at the first task, which leaves rank 0 in a collective."""

    def measure(self, task):
        if self.rank == 1:
            print("rank 1 says goodbye", flush=True)
            os._exit(3)
        return super().measure(task)


class NeverReady(KungFu):
    def __init__(self, rank, size, *extra):
        raise RuntimeError("no such hardware")
