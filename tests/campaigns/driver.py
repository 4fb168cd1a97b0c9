"""Jobs to which faults happen, drawn from a seed, until there were so many: ``python -m tests.campaigns NAME``.

A campaign says which jobs there are and what happens to them (`Campaign.try_job`); `jobs.Job` is such a job and what
has to hold of it. A seed gives the same jobs and faults each time; how they fall is up to the machine. Exit status: 1
where something was broken, which is named, with a copy of what the job has left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.group import GroupError
from tests.campaigns.jobs import Job

CAMPAIGNS = {
    "kills": ("kills", "Kills"),
    "kills-on-hosts": ("kills", "KillsOnHosts"),
    "faults": ("scripts", "Scripts"),
    "histories": ("histories", "Histories"),
    "host-kills": ("host_kills", "HostKills"),
    "host-losses": ("host_losses", "HostLosses"),
    "heads": ("heads", "Heads"),
}
"""The module of this package and the class of each."""
_MOST_BROKEN = 5  # then something is wrong with all


@dataclass
class Tally:
    """What was done, and what came of it."""

    struck: int = 0
    """What the campaign counts."""
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    missed: collections.Counter[str] = field(default_factory=collections.Counter)
    """What was to happen, at a place to which no process came in time."""
    broken: list[str] = field(default_factory=list)

    def broke(self, text: str) -> None:
        self.broken.append(text)
        print(f"BROKEN: {text}", flush=True)

    @contextlib.contextmanager
    def judging(self, job: Job, what: object) -> Iterator[None]:
        """A job's course: what is broken in it is noted, and it is ended with it."""
        try:
            yield
        except (AssertionError, GroupError) as error:
            self.broke(f"{error}\n  {what}\n  (what the job has left is in {job.keep()})")
        finally:
            job.end()

    def lines(self) -> list[str]:
        missed = {each: f", not reached {times} times" for each, times in self.missed.items()}
        return [f"  {self.done[each]:6} {each}{missed.get(each, '')}" for each in sorted({*self.done, *missed})]


class Campaign:
    """`args`: what `options` has added to the command line."""

    struck = "killed"
    """What is counted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.tally = args, Tally()

    @classmethod
    def options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds those of this campaign."""

    @classmethod
    def made(cls, *words: str) -> Campaign:
        """With these options."""
        parser = argparse.ArgumentParser()
        cls.options(parser)
        return cls(parser.parse_args(words))

    def why_not(self) -> str | None:
        """Why it can't be run on this machine."""
        return None

    def try_job(self, number: int, seed: int, left: int) -> None:
        """The campaign's n-th job, or a few that belong together, with at most `left` of what is counted, about."""
        raise NotImplementedError

    def report(self) -> list[str]:
        """Lines to print besides the tally's."""
        return []

    def close(self) -> None:
        """What all jobs have used is ended."""


def run(campaign: Campaign, count: int, seed: int, at_once: int = 1) -> Tally:
    """Jobs until so many were struck, or too many are broken."""
    tally, numbers = campaign.tally, itertools.count()

    def work() -> None:
        while tally.struck < count and len(tally.broken) < _MOST_BROKEN:
            number = next(numbers)
            campaign.try_job(number, seed, count - tally.struck)
            load = os.getloadavg()[0]
            print(f"job {number}: {tally.struck} {campaign.struck} so far, load {load:.1f}", flush=True)

    try:
        with ThreadPoolExecutor(at_once) as pool:
            for future in [pool.submit(work) for _ in range(at_once)]:
                future.result()
    finally:
        campaign.close()
    return tally


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kungfu-faults-") as name:
        yield Path(name)


def rng_of(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed} {number}")


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    module, name = CAMPAIGNS[words[0]]
    kind: type[Campaign] = getattr(importlib.import_module(f"tests.campaigns.{module}"), name)
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaigns {words[0]}", description=kind.__doc__)
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--seed", type=int, required=True, help="of the jobs and of what happens to them")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time (default 1)")
    kind.options(parser)
    args = parser.parse_args(words[1:])
    campaign = kind(args)
    if (reason := campaign.why_not()) is not None:
        raise SystemExit(f"{words[0]} can't be run here: {reason}")
    begin = time.monotonic()
    tally = run(campaign, args.count, args.seed, args.at_once)
    print(*tally.lines(), *campaign.report(), sep="\n")
    took = time.monotonic() - begin
    print(f"{tally.struck} {campaign.struck}, {len(tally.broken)} broken, {took:.0f} s, seed {args.seed}")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
