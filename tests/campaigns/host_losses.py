"""Random hosts of jobs are lost, but for the head: killed, cut off both ways and one way, parted, paused and woken.

Jobs of 2 to 4 hosts x 2 workers, which are network namespaces. Each job loses hosts one after another, some of them as
the launcher comes to a place that is marked in its link, where it dies or stands still until the others have gone on;
each then joins again, with new workers. One job of five has the default ``-host-timeout``, the others 3 s. What has to
hold besides what `Job.finish` looks at:

- all others go on as the same processes, in a cluster version without the lost host's;
- a host that was given up ends by itself, whether its cable is healed before it knows of it or later, or it wakes after
  30 s; a killed one leaves nothing.

Told is how long after the blow the last survivor was in the version without the host, beside what is aimed at: a second
after the end of a connection, -host-timeout and a second where nothing is heard. Needs root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import time
from collections.abc import Iterator

from tests.campaigns.driver import Campaign, Tally, folder, rng_of
from tests.campaigns.host_kills import struck_job
from tests.campaigns.jobs import Job, build_runtime, kill
from tests.fault.programs.faults import PLACES_OF_A_LINK
from tests.hosts import namespaces

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
WITH_A_WORKER, WITH_A_HOST = "before_its_ranks_contribute_again", "before_a_new_epoch"
# A link comes to each place under one of these; every third job's reductions go in trees.
STRATEGIES = ("AUTO", "AUTO", "BINARY_TREE")
_REACHED_WITHIN_S = 3.0
_LOOK_S = 0.05
_FENCED_WITHIN_S = 30.0


class Losses:
    """One job, and what is done to it."""

    def __init__(self, job: Job, timeout_s: float, rng: random.Random, tally: Tally) -> None:
        self.job, self.timeout_s, self.rng, self.tally = job, timeout_s, rng, tally
        self.hosts = job.network.hosts
        self.size = 2 * len(self.hosts)
        self.version, self.pids = job.whole(self.size)
        self.also_killed: set[int] = set()  # launchers, of the loss under way

    def lose(self, way: str, place: str = "") -> tuple[float, float]:
        """A host or two, which then come back. How long it took, and what was aimed at."""
        job = self.job
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
            members = [line for line in job.lines() if line["event"] == "member"]
            took = max(line["time"] for line in members if line["version"] == version) - begin
            aim = 1.0 + (0.0 if way in KILLED else self.timeout_s)
            self.tally.struck += len(lost)
            job.lost.update(dict.fromkeys(gone, begin))
            names = " and ".join(self.hosts[number].name for number in lost)
            what = f"{way} {place}".rstrip()
            print(f"  {what}: {names} of {len(self.hosts)}: {took:.2f} s of {aim:g} s", flush=True)
            if way == "it is paused":
                time.sleep(max(0.0, begin + PAUSE_S - time.monotonic()))
            elif way not in AT_A_PLACE and self.rng.random() < 0.5:
                self.await_ends(way, lost)
        self.await_ends(way, lost)
        for number in lost:
            job.join(number, "-logfile", "log")
        job.resize(self.size, within_s=_FENCED_WITHIN_S)
        self.version, self.pids = job.whole(self.size, version)
        return took, aim

    def strike(
        self, way: str, place: str, victims: list[int], there: dict[int, set[int]], healing: contextlib.ExitStack
    ) -> float:
        job, head = self.job, self.hosts[0]
        hosts = [self.hosts[number] for number in victims]
        first, launchers = hosts[0], [job.launchers[number].process.pid for number in victims]
        self.also_killed = {victims[1]} if place == WITH_A_HOST else set()
        begin = time.monotonic()
        if way == "its launcher is killed":
            kill(launchers[0])
        elif way in AT_A_PLACE:
            kind, number = ("strike", signal.SIGKILL) if way in KILLED else ("stop", signal.SIGSTOP)
            if number == signal.SIGSTOP:
                healing.callback(kill, launchers[0], signal.SIGCONT)
            job.order(launchers[0], place, kind)
            time.sleep(_LOOK_S)
            if place == WITH_A_WORKER:
                kill(min(there[victims[0]]))
            elif place == WITH_A_HOST:
                begin = kill(launchers[1])
            died = job.struck_at(launchers[0], _REACHED_WITHIN_S)
            (self.tally.missed if died is None else self.tally.done)[f"at {place}"] += 1
            died = died or kill(launchers[0], number)
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
        else:
            apart = hosts[1:] if way == OF_SEVERAL[0] else [host for host in self.hosts if host not in hosts]
            for host in hosts[:1] if way == OF_SEVERAL[0] else hosts:
                for other in apart:
                    healing.enter_context(host.deaf_to(other))
                    healing.enter_context(other.deaf_to(host))
        return begin

    def await_ends(self, way: str, lost: list[int]) -> None:
        """Of launchers that were given up, and of all that they had started."""
        for number in lost:
            launcher = self.job.launchers[number]
            code = launcher.wait(_FENCED_WITHIN_S)
            if way != ALL_OF_IT:  # else no process was left to remove its secret
                launcher.assert_gone(time.monotonic())
            assert not launcher.processes(), f"{way}: {launcher.processes()} are left"
            expected = -signal.SIGKILL if way in KILLED or number in self.also_killed else 1
            assert code == expected, f"{way}: {self.hosts[number].name}'s launcher ended with {code}"


def ways(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Each as often as the others, and of a link each place."""
    while True:
        for way in rng.sample(WAYS, len(WAYS)):
            yield way, rng.choice(PLACES_OF_A_LINK) if way in AT_A_PLACE else ""


def least_hosts(way: str, place: str) -> int:
    """How many there have to be, with the head and one that goes on."""
    return 4 if way == OF_SEVERAL[1] else 3 if way in OF_SEVERAL or place == WITH_A_HOST else 2


class HostLosses(Campaign):
    """Kills, cuts off and pauses hosts of jobs in network namespaces; needs root."""

    struck = "lost"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.runtime = build_runtime()
        self.took: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        """By way: how long it took, and what was aimed at."""
        self.ways: Iterator[tuple[str, str]] | None = None

    def why_not(self) -> str | None:
        return namespaces.why_not()

    def try_job(self, number: int, seed: int, left: int) -> None:
        rng = rng_of(seed, number)
        self.ways = self.ways or ways(random.Random(seed))
        timeout_s = DEFAULT_TIMEOUT_S if rng.random() < 1 / 5 else SHORT_TIMEOUT_S
        flags = ["-strategy", rng.choice(STRATEGIES)]
        if timeout_s != DEFAULT_TIMEOUT_S:
            flags += ["-host-timeout", f"{timeout_s:g}s"]
        size = rng.choice((2, 3, 4, 4))
        what = f"{size} hosts, -host-timeout {timeout_s:g}s, {' '.join(flags[:2])}"
        print(what, flush=True)
        with namespaces.Network(size) as network, folder() as at:
            job = struck_job(network, at, self.runtime, *flags, step_s=STEP_S, agents=True)
            with self.tally.judging(job, what):
                losses = Losses(job, timeout_s, rng, self.tally)
                job.await_steps(losses.pids, 20)
                for _ in range(min(OF_A_JOB, left)):
                    way, place = next(each for each in self.ways if least_hosts(*each) <= size)
                    time.sleep(rng.uniform(0.1, 0.5))
                    self.took[way].append(losses.lose(way, place))
                job.finish()

    def report(self) -> list[str]:
        lines = []
        for way, took in sorted(self.took.items()):
            late = sum(seconds > aim for seconds, aim in took)
            over = [seconds - aim + 1 for seconds, aim in took]  # after the end of the connection or the lease
            seconds = f"{min(over):.2f} to {max(over):.2f} s after it was told"
            lines.append(f"  {len(took):3} {way}: {seconds}, {late} in more than 1 s")
        return lines
