"""Random workers of jobs over several hosts are killed, at random moments and at every marked place of their path.

Jobs of 4 hosts x 2 workers, which are network namespaces, under ``-recover replace``; steps of 5 ms of sleep. Each
job loses about 20 workers one after another, a third of them at a random moment, the others as they come to a place
that is marked in the runtime (`tests.fault.programs.faults`): in a collective inside the host or over hosts, or in the
change of the cluster that another death brings about. Every third job's reductions go in slices; in half of the jobs,
by chance, a step's reductions are all started before they are waited for, as overlap does. The survivors have to be the
same processes, and each death is followed by a whole cluster again.

Pauses are those of ``benchmarks resize --pauses kill``, of deaths that come alone. Needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

from benchmarks import pauses
from benchmarks.pauses_worker import read_steps
from tests.campaigns.driver import Campaign, folder, rng_of
from tests.campaigns.jobs import PROGRAMS, Job, build_runtime
from tests.fault.programs.faults import COLLECTIVE_PLACES, PLACES_BETWEEN_HOSTS, PLACES_OF_A_CHANGE
from tests.hosts import namespaces

HOSTS, OF_A_JOB, STEP_S = 4, 20, 0.005
MOMENT = "a random moment"
# The worker that is to fail there gets there after another one has failed.
AFTER_A_DEATH = (
    "before_the_others_have_come", "before_the_next_generation", "before_it_contributes_again", *PLACES_OF_A_CHANGE,
)  # fmt: skip
LENET = 61706
IN_SLICES = 700_000
"""Weights of which the gradients are reduced in slices."""
_REACHED_WITHIN_S = 3.0
_LOOK_S = 0.05  # for a worker to have seen what it is told


def struck_job(
    network: namespaces.Network, at: Path, runtime: Path, *flags: object, step_s: float, weights: int = LENET,
    manner: str = "together", agents: bool = False,
) -> Job:  # fmt: skip
    """Two workers a host, which die where they are told to. `agents`: links do, too."""
    environment = {"STRUCK_FOLDER": str(at), "STRUCK_RUNTIME": str(runtime)}
    launcher = {"launcher": "tests.fault.programs.agent"} if agents else {}
    return Job(
        network, at, 2 * len(network.hosts), "-logfile", "log", *flags, program=PROGRAMS / "averaging.py",
        words=[step_s, runtime, manner, f"3,{weights - 3}"], environment=environment, **launcher,
    )  # fmt: skip


class HostKills(Campaign):
    """Kills workers of jobs over network namespaces; needs root."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.runtime = build_runtime()
        self.pauses: dict[int, pauses.Pauses] = {}
        """By the number of weights; of deaths that came alone."""

    def why_not(self) -> str | None:
        return namespaces.why_not()

    def try_job(self, number: int, seed: int, left: int) -> None:
        weights = IN_SLICES if number % 3 == 2 else LENET
        self.lose_workers(rng_of(seed, number), weights, min(OF_A_JOB, left))

    def lose_workers(self, rng: random.Random, weights: int, kills: int) -> None:
        """One job that loses so many, or one more."""
        manner = rng.choice(("background", "together"))
        places = [*COLLECTIVE_PLACES, *PLACES_BETWEEN_HOSTS, *PLACES_OF_A_CHANGE]
        if weights < IN_SLICES:
            places.remove("between_two_slices")
        moments: list[tuple[pauses.Moment, str]] = []
        with namespaces.Network(HOSTS) as network, folder() as at:
            flags = ["-recover", "replace", "-max-restarts", 10**6]
            job = struck_job(network, at, self.runtime, *flags, step_s=STEP_S, weights=weights, manner=manner)
            with self.tally.judging(job, f"{weights} weights, {manner}"):
                version, pids = job.whole(2 * HOSTS)
                job.await_steps(pids, 20)
                while len(job.lost) < kills:
                    time.sleep(rng.uniform(0.1, 0.5))
                    place = MOMENT if rng.random() < 1 / 3 else rng.choice(places)
                    before, (when, victims) = pids, self.strike(job, pids, place, rng)
                    self.tally.struck += len(victims)
                    while {*pids} & job.lost.keys():  # of two the second may have died after the first was replaced
                        version, pids = job.whole(2 * HOSTS, version)
                    dead = {*before} - {*pids} - {*victims}
                    assert not dead, f"{sorted(dead)} are gone with {victims}, which died at {place}"
                    survivors = tuple(pid for pid in before if pid in pids)
                    moments.append((pauses.Moment(when, survivors), f"{len(victims)} at {place}"))
                time.sleep(0.2)
                job.finish()
                self.analyse(job, moments, weights)

    def strike(self, job: Job, pids: list[int], place: str, rng: random.Random) -> tuple[float, list[int]]:
        """Kills one there, or two; when the first one died, and which ones did."""
        victim, other = rng.sample(pids, 2)
        nth = rng.randrange(1, 5) if place in COLLECTIVE_PLACES or place in PLACES_BETWEEN_HOSTS else 1
        if place == MOMENT:
            self.tally.done[place] += 1
            return job.kill([victim]), [victim]
        first = None
        if place in AFTER_A_DEATH:
            job.order(victim, place)
            time.sleep(_LOOK_S)
            first = job.kill([other])
        else:
            job.order(victim, f"{place}:{nth}")
        died = job.struck_at(victim, _REACHED_WITHIN_S)
        (self.tally.missed if died is None else self.tally.done)[place] += 1
        when = job.kill([victim]) if died is None else died
        job.lost[victim] = when
        return (when, [victim]) if first is None else (first, [victim, other])

    def analyse(self, job: Job, moments: list[tuple[pauses.Moment, str]], weights: int) -> None:
        steps, heard = dict(read_steps(job.folder)), job.heard()
        changes: dict[int, list[float]] = {}
        for line in job.lines():
            if line["event"] == "member":
                changes.setdefault(line["pid"], []).append(line["time"])
        for moment, what in moments:
            found = pauses.analyse([moment], steps, changes, [when for when in heard if when >= moment.time][:1])
            empty = pauses.Pauses(found.median_step, {name: [] for name in found.parts})
            of_all = self.pauses.setdefault(weights, empty)
            ms = ", ".join(f"{name} {1e3 * values[0]:.1f}" for name, values in found.parts.items() if values)
            print(f"  {what}: {ms}", flush=True)
            if what.startswith("1 "):
                for name, values in found.parts.items():
                    of_all.parts[name] += values

    def report(self) -> list[str]:
        return [
            pauses.to_text(
                pauses.Trial("kill", f"{HOSTS} hosts x 2, {weights} weights", self.tally.struck, 0, 1e3 * STEP_S, 0.0),
                os.getloadavg()[0], found, None,
            )
            for weights, found in self.pauses.items()
        ]  # fmt: skip
