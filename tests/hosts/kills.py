"""Random workers of jobs over several hosts are killed, at random moments and at every marked place of their path.

    python -m tests.hosts.kills --count 200

Jobs of 4 hosts x 2 workers, which are network namespaces, under ``-recover replace``; steps of 5 ms of sleep. Each
job loses about 20 workers one after another, a third of them at a random moment, the others as they come to a place
that is marked in the runtime (`tests.fault.programs.faults`): in a collective inside the host or over hosts, or in the
change of the cluster that another death brings about. Every third job's reductions go in slices; in half of the jobs,
by chance, a step's reductions are all started before they are waited for, as overlap does. What has to hold:

- the survivors are the same processes, and each death is followed by a whole cluster again;
- the weights after each step are the same bits at all that have done it, those that died later included;
- the ledger is exact, and the weights are what follows from it.

Pauses are those of ``bench resize --pauses kill``, of deaths that come alone. Exit status: 1 where something was
broken; what the job has left is kept then. A seed gives the same victims and places; how they fall is up to the
machine. Needs root.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import pauses
from benchmarks.group import GroupError
from benchmarks.pauses_worker import read_steps
from tests.fault.programs.faults import COLLECTIVE_PLACES, PLACES_BETWEEN_HOSTS, PLACES_OF_A_CHANGE
from tests.fault.programs.gradients import MANNERS
from tests.hosts.namespaces import Network, why_not
from tests.hosts.struck_job import IN_SLICES, LENET, StruckJob, kill, require_hosts

HOSTS, OF_A_JOB, STEP_S = 4, 20, 0.005
MOMENT = "a random moment"
# Who is to die there meets it when somebody else has died.
AFTER_A_DEATH = (
    "before_the_others_have_come", "before_the_next_generation", "before_it_brings_its_part_again", *PLACES_OF_A_CHANGE,
)  # fmt: skip
_REACHED_WITHIN_S = 3.0
_LOOK_S = 0.05  # for a worker to have seen what it is told


@dataclass
class Counts:
    """What was done, and what came of it."""

    killed: int = 0
    at: collections.Counter[str] = field(default_factory=collections.Counter)
    missed: collections.Counter[str] = field(default_factory=collections.Counter)
    pauses: dict[int, pauses.Pauses] = field(default_factory=dict)
    """By the number of weights; of deaths that came alone."""
    broken: list[str] = field(default_factory=list)


def _strike(job: StruckJob, pids: list[int], place: str, rng: random.Random, counts: Counts) -> tuple[float, list[int]]:
    """Kills one there, or two; when the first one died, and who did."""
    victim, other = rng.sample(pids, 2)
    nth = rng.randrange(1, 5) if place in COLLECTIVE_PLACES or place in PLACES_BETWEEN_HOSTS else 1
    if place == MOMENT:
        counts.at[place] += 1
        return kill(victim, signal.SIGKILL), [victim]
    first = None
    if place in AFTER_A_DEATH:
        job.order(victim, place)
        time.sleep(_LOOK_S)
        first = kill(other, signal.SIGKILL)
    else:
        job.order(victim, f"{place}:{nth}")
    died = job.struck_at(victim, _REACHED_WITHIN_S)
    if died is None:
        counts.missed[place] += 1
        died = kill(victim, signal.SIGKILL)
    else:
        counts.at[place] += 1
    return (died, [victim]) if first is None else (first, [victim, other])


def _analyse(job: StruckJob, moments: list[tuple[pauses.Moment, str]], weights: int, counts: Counts) -> None:
    steps, changes, told = dict(read_steps(job.folder)), job.changes(), job.told()
    for moment, what in moments:
        heard = [when for when in told if when >= moment.time][:1]
        found = pauses.analyse([moment], steps, changes, heard)
        of_all = counts.pauses.setdefault(weights, pauses.Pauses(found.median_step, {name: [] for name in found.parts}))
        ms = ", ".join(f"{name} {1e3 * values[0]:.1f}" for name, values in found.parts.items() if values)
        print(f"  {what}: {ms}", flush=True)
        if what.startswith("1 "):
            for name, values in found.parts.items():
                of_all.parts[name] += values


def try_job(rng: random.Random, weights: int, kills: int, counts: Counts) -> None:
    """One job that loses so many workers, or one more."""
    manner = rng.choice(sorted(MANNERS))
    places = [*COLLECTIVE_PLACES, *PLACES_BETWEEN_HOSTS, *PLACES_OF_A_CHANGE]
    if weights < IN_SLICES:
        places.remove("between_two_slices")
    moments: list[tuple[pauses.Moment, str]] = []
    with Network(HOSTS) as network, tempfile.TemporaryDirectory(prefix="kungfu-kills-") as folder:
        flags = ["-recover", "replace", "-max-restarts", 10**6]
        job = StruckJob(network, Path(folder), *flags, weights=weights, step_s=STEP_S, manner=manner)
        lost: set[int] = set()
        try:
            version, pids = job.whole(2 * HOSTS)
            job.await_steps(pids, 20)
            while len(lost) < kills:
                time.sleep(rng.uniform(0.1, 0.5))
                place = MOMENT if rng.random() < 1 / 3 else rng.choice(places)
                when, victims = _strike(job, pids, place, rng, counts)
                before, lost = pids, lost | {*victims}
                counts.killed += len(victims)
                while {*pids} & lost:  # of two the second may have died later than the first's place was filled
                    version, pids = job.whole(2 * HOSTS, version)
                dead = {*before} - {*pids} - {*victims}
                assert not dead, f"{sorted(dead)} are gone with {victims}, which died at {place}"
                survivors = tuple(pid for pid in before if pid in pids)
                moments.append((pauses.Moment(when, survivors), f"{len(victims)} at {place}"))
            time.sleep(0.2)
            job.judge(lost)
            _analyse(job, moments, weights, counts)
        except (AssertionError, GroupError) as error:
            counts.broken.append(f"{error}\n(what the job has left is in {job.keep()})")
        finally:
            job.jobs.kill_all()


def run(count: int, seed: int, of_a_job: int = OF_A_JOB) -> Counts:
    counts, number = Counts(), 0
    while counts.killed < count and not counts.broken:
        weights = IN_SLICES if number % 3 == 2 else LENET
        kills = min(of_a_job, count - counts.killed)
        try_job(random.Random(f"{seed} {number}"), weights, kills, counts)
        number += 1
        print(f"{counts.killed} killed in {number} jobs, load {os.getloadavg()[0]:.1f}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="workers to kill (default 200)")
    parser.add_argument("--seed", type=int, help="of victims and places (default: random, printed)")
    args = parser.parse_args()
    require_hosts(why_not())
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"--seed {seed}", flush=True)
    begin, counts = time.monotonic(), run(args.count, seed)
    for place in sorted({*counts.at, *counts.missed}):
        missed = f", not reached {counts.missed[place]} times" if counts.missed[place] else ""
        print(f"  {counts.at[place]:4} at {place}{missed}")
    for weights, found in counts.pauses.items():
        trial = pauses.Trial("kill", f"{HOSTS} hosts x 2, {weights} weights", counts.killed, seed, 1e3 * STEP_S, 0.0)
        print(pauses.to_text(trial, os.getloadavg()[0], found, None))
    print(f"{counts.killed} killed, {len(counts.broken)} broken, {time.monotonic() - begin:.0f} s, seed {seed}")
    for each in counts.broken:
        print(f"BROKEN: {each}")
    return 1 if counts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
