"""Random hosts of jobs are lost, but for the head: killed, cut off both ways and one way, parted, paused and woken.

    python -m tests.hosts.losses --count 50

Jobs of 2 to 4 hosts x 2 workers, which are network namespaces. Each job loses hosts one after another, some of them as
the launcher comes to a place that is marked in its link, where it dies or stands still until the others have gone on;
each then joins again, with new workers. One job of five has
the default ``-host-timeout``, the others 3 s. What has to hold:

- all others go on as the same processes, in a cluster version without the lost host's;
- a host that was given up ends by itself, whether its cable is healed before it knows of it or later, or it wakes after
  30 s; a killed one leaves nothing;
- no worker, not of a lost host either, has ever gone on from a step with other weights than anybody else, so that
  whatever it may have written then is right;
- the ledger, to which lost workers have written until their end, is exact, and the weights follow from it.

Told is how long after the blow the last survivor was in the version without the host, beside what is aimed at: a second
after the end of a connection, -host-timeout and a second where nothing is heard. Exit status: 1 where something was
broken; what the job has left is kept then. A seed gives the same losses; how they fall is up to the machine. Needs
root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.group import GroupError
from tests.fault.programs.faults import PLACES_OF_A_LINK
from tests.hosts.namespaces import Network, why_not
from tests.hosts.struck_job import StruckJob, kill, require_hosts

OF_A_JOB, STEP_S, PAUSE_S = 5, 0.02, 30.0
SHORT_TIMEOUT_S, DEFAULT_TIMEOUT_S = 3.0, 10.0
ALL_OF_IT = "all its processes are killed"
KILLED = ("its launcher is killed", "its launcher dies at a place", ALL_OF_IT)
DEAF = ("it is deaf to the head", "the head is deaf to it")
AT_A_PLACE = ("its launcher dies at a place", "its launcher stops at a place")
SILENT = ("its cable is cut", "its interface is down", *DEAF, "it is paused", AT_A_PLACE[1])
OF_SEVERAL = ("two don't reach each other", "two are cut off together")
WAYS = (*KILLED, *SILENT, *OF_SEVERAL)
# A link comes there when a worker of its host has died, or when another host is lost.
WITH_A_WORKER, WITH_A_HOST = "before_its_ranks_bring_their_parts_again", "before_a_new_epoch"
# A link comes to each place under one of these; every third job's reductions go in trees.
STRATEGIES = ("AUTO", "AUTO", "BINARY_TREE")
_REACHED_WITHIN_S = 3.0
_LOOK_S = 0.05
_FENCED_WITHIN_S = 30.0


@dataclass
class Counts:
    """What was done, and what came of it."""

    lost: int = 0
    took: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: collections.defaultdict(list))
    """By way: how long it took, and what was aimed at."""
    at: collections.Counter[str] = field(default_factory=collections.Counter)
    missed: collections.Counter[str] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)


class Losses:
    """One job, and what is done to it."""

    def __init__(self, job: StruckJob, timeout_s: float, rng: random.Random, counts: Counts) -> None:
        self.job, self.timeout_s, self.rng, self.counts = job, timeout_s, rng, counts
        self.hosts = job.network.hosts
        self.size = 2 * len(self.hosts)
        self.version, self.pids = job.whole(self.size)
        self.dead: set[int] = set()  # workers
        self.also_killed: set[int] = set()  # launchers, of the loss under way

    def lose(self, way: str, place: str = "") -> None:
        """A host or two, which then come back."""
        job, counts = self.job, self.counts
        able = range(1, len(self.hosts))
        two = way in OF_SEVERAL or place == WITH_A_HOST
        victims = self.rng.sample(able, 2 if two else 1)
        there = {number: {*self.hosts[number].processes()} & {*self.pids} for number in able}
        with contextlib.ExitStack() as healing:
            begin = self.strike(way, place, victims, there, healing)
            survivors = self.size - (2 if way == OF_SEVERAL[0] else 2 * len(victims))
            before = self.pids
            version, self.pids = job.whole(survivors, self.version)
            lost = [number for number in able if not there[number] & {*self.pids}]
            gone = {pid for number in lost for pid in there[number]}
            left = {*before} - {*self.pids}
            assert {*lost} <= {*victims}, f"{way}: hosts {lost} are gone, instead of {victims}"
            assert left == gone, f"{way}: {sorted(left)} are gone, of {there}"
            took = max(line["time"] for line in job.lines() if line["version"] == version) - begin
            aim = 1.0 + (0.0 if way in KILLED else self.timeout_s)
            counts.took[way].append((took, aim))
            counts.lost += len(lost)
            self.dead |= gone
            names = " and ".join(self.hosts[number].name for number in lost)
            what = f"{way} {place}".rstrip()
            print(f"  {what}: {names} of {len(self.hosts)}: {took:.2f} s of {aim:g} s", flush=True)
            if way == "it is paused":
                time.sleep(max(0.0, begin + PAUSE_S - time.monotonic()))
            elif way not in AT_A_PLACE and self.rng.random() < 0.5:
                self.await_ends(way, lost)
        self.await_ends(way, lost)
        for number in lost:
            self.come_back(number)
        self.resize(version)

    def strike(
        self, way: str, place: str, victims: list[int], there: dict[int, set[int]], healing: contextlib.ExitStack
    ) -> float:
        job, head = self.job, self.hosts[0]
        hosts = [self.hosts[number] for number in victims]
        first, launcher = hosts[0], job.over.launchers[victims[0]].process.pid
        self.also_killed = {victims[1]} if place == WITH_A_HOST else set()
        begin = time.monotonic()
        if way == "its launcher is killed":
            kill(launcher, signal.SIGKILL)
        elif way in AT_A_PLACE:
            kind, number = ("strike", signal.SIGKILL) if way in KILLED else ("stop", signal.SIGSTOP)
            if number == signal.SIGSTOP:
                healing.callback(kill, launcher, signal.SIGCONT)
            job.order(launcher, place, kind)
            time.sleep(_LOOK_S)
            if place == WITH_A_WORKER:
                kill(min(there[victims[0]]), signal.SIGKILL)
            elif place == WITH_A_HOST:
                begin = kill(job.over.launchers[victims[1]].process.pid, signal.SIGKILL)
            died = job.struck_at(launcher, _REACHED_WITHIN_S)
            (self.counts.missed if died is None else self.counts.at)[place] += 1
            died = died or kill(launcher, number)
            begin = begin if place == WITH_A_HOST else died
        elif way == ALL_OF_IT:
            first.signal(signal.SIGKILL)
        elif way == "its cable is cut":
            healing.enter_context(first.cut())
        elif way == "its interface is down":
            healing.enter_context(first.unplugged())
        elif way == "it is deaf to the head":
            healing.enter_context(first.deaf_to(head))
        elif way == "the head is deaf to it":
            healing.enter_context(head.deaf_to(first))
        elif way == "it is paused":
            healing.enter_context(first.paused())
        elif way == "two don't reach each other":
            healing.enter_context(first.deaf_to(hosts[1]))
            healing.enter_context(hosts[1].deaf_to(first))
        else:
            for host in hosts:
                for other in self.hosts:
                    if other not in hosts:
                        healing.enter_context(host.deaf_to(other))
                        healing.enter_context(other.deaf_to(host))
        return begin

    def await_ends(self, way: str, lost: list[int]) -> None:
        """Of launchers that were given up, and of all that they had started."""
        for number in lost:
            launcher = self.job.over.launchers[number]
            code = launcher.wait(_FENCED_WITHIN_S)
            if way != ALL_OF_IT:  # else there was nobody to remove its secret
                launcher.assert_gone(time.monotonic())
            assert not launcher.processes(), f"{way}: {launcher.processes()} are left"
            expected = -signal.SIGKILL if way in KILLED or number in self.also_killed else 1
            assert code == expected, f"{way}: {self.hosts[number].name}'s launcher ended with {code}"

    def come_back(self, number: int) -> None:
        host, job = self.hosts[number], self.job
        words = ["-join", job.over.url, "-self", f"{host.address}:2", "-logfile", "log"]
        job.over.launchers[number] = job.jobs.start(host, job.launcher, *words, environment=job.environment)

    def resize(self, version: int) -> None:
        """Typed until the hosts that come back are known."""
        for _ in self._until(_FENCED_WITHIN_S):
            command = self.job.over.command(0, "resize", self.size)
            if command.wait() == 0:
                break
            if "are more than the" not in command.output:
                raise AssertionError(command.output)
        self.version, self.pids = self.job.whole(self.size, version)

    def _until(self, seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield
            time.sleep(0.1)
        raise AssertionError(f"no host has come back within {seconds:g} s")


def ways(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Each as often as the others, and of a link each place."""
    while True:
        for way in rng.sample(WAYS, len(WAYS)):
            yield way, rng.choice(PLACES_OF_A_LINK) if way in AT_A_PLACE else ""


def try_job(rng: random.Random, all_ways: Iterator[tuple[str, str]], count: int, counts: Counts) -> None:
    """One job that loses so many hosts."""
    timeout_s = DEFAULT_TIMEOUT_S if rng.random() < 1 / 5 else SHORT_TIMEOUT_S
    flags = ["-strategy", rng.choice(STRATEGIES)]
    if timeout_s != DEFAULT_TIMEOUT_S:
        flags += ["-host-timeout", f"{timeout_s:g}s"]
    size = rng.choice((2, 3, 4, 4))
    with Network(size) as network, tempfile.TemporaryDirectory(prefix="kungfu-losses-") as folder:
        job = StruckJob(network, Path(folder), *flags, step_s=STEP_S, agents=True)
        try:
            losses = Losses(job, timeout_s, rng, counts)
            job.await_steps(losses.pids, 20)
            print(f"{size} hosts, -host-timeout {timeout_s:g}s, {' '.join(flags[:2])}", flush=True)
            for _ in range(count):
                way, place = next(all_ways)
                while size <= (3 if way == OF_SEVERAL[1] else 2 if way in OF_SEVERAL or place == WITH_A_HOST else 1):
                    way, place = next(all_ways)
                time.sleep(rng.uniform(0.1, 0.5))
                losses.lose(way, place)
            job.judge(losses.dead)
        except (AssertionError, GroupError) as error:
            counts.broken.append(f"{error}\n(what the job has left is in {job.keep()})")
        finally:
            job.jobs.kill_all()


def run(count: int, seed: int, of_a_job: int = OF_A_JOB) -> Counts:
    counts, number, rng = Counts(), 0, random.Random(seed)
    all_ways = ways(rng)
    while counts.lost < count and not counts.broken:
        try_job(rng, all_ways, min(of_a_job, count - counts.lost), counts)
        number += 1
        print(f"{counts.lost} lost in {number} jobs, load {os.getloadavg()[0]:.1f}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.losses", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="hosts to lose (default 50)")
    parser.add_argument("--seed", type=int, help="of victims and ways (default: random, printed)")
    args = parser.parse_args()
    require_hosts(why_not())
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"--seed {seed}", flush=True)
    begin, counts = time.monotonic(), run(args.count, seed)
    for way, took in sorted(counts.took.items()):
        late = sum(seconds > aim for seconds, aim in took)
        over = [seconds - aim + 1 for seconds, aim in took]  # after the end of the connection or the lease
        print(f"  {len(took):3} {way}: {min(over):.2f} to {max(over):.2f} s after it was told, {late} in more than 1 s")
    for place in sorted({*counts.at, *counts.missed}):
        missed = f", not reached {counts.missed[place]} times" if counts.missed[place] else ""
        print(f"  {counts.at[place]:3} at {place}{missed}")
    print(f"{counts.lost} lost, {len(counts.broken)} broken, {time.monotonic() - begin:.0f} s, seed {seed}")
    for each in counts.broken:
        print(f"BROKEN: {each}")
    return 1 if counts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
