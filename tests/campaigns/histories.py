"""Random histories of a cluster that trains a MindSpore network in shards: each ends with the bits of one worker.

    python -m tests.campaigns histories --count 200                      # of all networks, as in `EVIDENCE`
    python -m tests.campaigns histories --net resnet --count 5 --seed 7  # LeNet, ResNet or Transformer, in graph mode

A *history* is an epoch of twelve steps from the same first weights on, and what happens to the cluster meanwhile, drawn
from a seed of its own: its first size, growing and shrinking, SIGKILLs at a shard or some milliseconds later (several
at once, the lowest rank among them), SIGSTOPs, and workers that are slow. It ends with one SHA-256, on all its workers,
of weights, optimizer state and moving statistics, which has to be that of one worker to which nothing happens.

`AT_ONCE` histories follow one another in one job, since starting processes is what takes time: between them all
workers take the first weights again. So each is a sequence of events of its own, of which only two things come from
the history before: the workers it begins with, where the size stays; and, where workers that died are replaced, the
newcomers that are still on their way. The n-th of a job trains the n-th epoch's order of the samples, and is compared
with the n-th of the job of one worker. All of a job's steps are proven by its ledger.

The last worker is never killed (`dooms` in programs/history.py). What is drawn and doesn't happen isn't counted.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ms_kungfu.dataset import audit
from tests.campaigns.driver import Campaign, folder
from tests.campaigns.jobs import PROGRAMS, BrokenError, Job
from tests.hosts.jobs import Machine

NETS = ("lenet", "resnet", "transformer")
STEPS = 12  # of a history, as in programs/trained.py
AT_ONCE = 5
EVIDENCE = (("lenet", "graph", 140), ("lenet", "pynative", 10), ("resnet", "graph", 30), ("transformer", "graph", 20))
"""Network, mode, how many."""
_PEER_TIMEOUT_S = 8  # of jobs with a worker that stops for ever; the machine may be busy
_STARTING_S, _A_HISTORY_S = 120.0, 60.0  # limits


@dataclass(frozen=True)
class Stroke:
    """What happens to a worker."""

    kind: str
    """kill, stop or slow."""
    step: int
    """Of the history, from 1."""
    place: int
    """Among the living workers that the step is dealt to, in the order of their ranks, and beginning again at the first
    where there are fewer."""
    shard: int = 0
    """Before its so manieth shard of the step, from 0; behind its last one where it has fewer."""
    after_ms: float = 0.0
    """So much later, wherever it is then."""
    seconds: float = 0.0
    """Of a stop (0: for ever); of the pause that a slow worker makes before each shard, until the history ends."""

    @property
    def ends(self) -> bool:
        return self.kind == "kill" or (self.kind == "stop" and not self.seconds)

    def __str__(self) -> str:
        text = f"{self.kind} place {self.place} step {self.step} shard {self.shard}"
        text += f" + {self.after_ms:g} ms" if self.after_ms else ""
        return text + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass(frozen=True)
class History:
    seed: int
    size: int
    """At the beginning."""
    changes: tuple[tuple[int, int], ...]
    """(step, size): asked for after this step."""
    strokes: tuple[Stroke, ...]

    def __str__(self) -> str:
        changes = "".join(f", {size} workers after step {step}" for step, size in self.changes)
        return (
            f"seed {self.seed}: {self.size} workers{changes}; {'; '.join(map(str, self.strokes)) or 'nobody is hurt'}"
        )


@dataclass(frozen=True)
class Plan:
    """A job."""

    kind: str
    """What is trained: a key of KINDS in programs/trained.py."""
    mode: str
    recover: str
    histories: tuple[History, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}, {self.mode}, -recover {self.recover}", *map(str, self.histories)])

    def strokes(self) -> dict[str, Stroke]:
        """By the file that a worker leaves when it begins with one."""
        return {
            f"fired.{h}.{n}": each for h, history in enumerate(self.histories) for n, each in enumerate(history.strokes)
        }

    def sizes(self) -> dict[int, int]:
        """The schedule: by steps of the whole job."""
        found = {}
        for number, history in enumerate(self.histories):
            if number:
                found[number * STEPS] = history.size
            found.update({number * STEPS + step: size for step, size in history.changes})
        return found


def history_of(seed: int) -> History:
    """A random history in which at least two things are to happen."""
    rng = random.Random(f"history {seed}")
    while True:
        size = rng.choices((1, 2, 3, 4, 7), (10, 25, 30, 30, 5))[0]
        changes = sorted(rng.sample(range(1, STEPS), rng.choice((0, 1, 1, 1, 2))))
        sizes: list[int] = []
        for _ in changes:
            sizes.append(rng.choice([n for n in (1, 2, 3, 4) if n != (sizes or [size])[-1]]))
        strokes: list[Stroke] = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            step, when = rng.randint(1, STEPS), {"shard": rng.randrange(6)}
            if rng.random() < 0.5:
                when["after_ms"] = round(rng.uniform(0.1, 20.0), 1)
            several = rng.choice((2, 3)) if rng.random() < 0.25 else 1
            places = rng.sample(range(7), several)
            if rng.random() < 0.35:
                places[0] = 0
            strokes += [Stroke("kill", step, place, **when) for place in dict.fromkeys(places)]
        if rng.random() < 0.3:
            seconds = 0.0 if rng.random() < 0.15 else round(rng.uniform(0.02, 0.5), 3)
            after = rng.choice((0.0, round(rng.uniform(0.1, 20.0), 1)))
            strokes.append(Stroke("stop", rng.randint(1, STEPS), rng.randrange(7), rng.randrange(4), after, seconds))
        if rng.random() < 0.3:
            seconds = round(rng.uniform(0.005, 0.03), 4)
            strokes.append(Stroke("slow", rng.randint(1, STEPS // 2), rng.randrange(7), seconds=seconds))
        if (changes or size > 1) and len(changes) + len(strokes) > 1:
            return History(seed, size, tuple(zip(changes, sizes)), tuple(strokes))


def plans_of(kind: str, mode: str, seed: int, count: int) -> list[Plan]:
    """Jobs with the histories of `count` seeds from `seed` on."""
    histories = [history_of(each) for each in range(seed, seed + count)]
    parts = [tuple(histories[i : i + AT_ONCE]) for i in range(0, count, AT_ONCE)]
    return [
        Plan(kind, mode, "replace" if random.Random(f"job {part[0].seed}").random() < 0.4 else "shrink", part)
        for part in parts
    ]


def undisturbed(kind: str, mode: str, count: int) -> Plan:
    """One worker, to which nothing happens."""
    return Plan(kind, mode, "shrink", tuple(History(-1, 1, (), ()) for _ in range(count)))


@dataclass(frozen=True)
class Outcome:
    sha256: list[str]
    """Of each history."""
    sizes: list[dict[int, int]]
    """Of each history: how many workers a step was assigned to, as far as a worker that finished the step saw it."""
    happened: list[list[Stroke]]


def begin(plan: Plan, at: Path) -> Job:
    histories = list(map(asdict, plan.histories))
    text = {"kind": plan.kind, "mode": plan.mode, "sizes": plan.sizes(), "histories": histories}
    (at / "plan.json").write_text(json.dumps(text))
    flags = ["-recover", plan.recover]
    if plan.recover == "replace":
        flags += ["-max-restarts", 1000]
    if any(stroke.kind == "stop" and stroke.ends for history in plan.histories for stroke in history.strokes):
        flags += ["-peer-timeout", f"{_PEER_TIMEOUT_S}s"]
    return Job(Machine(), at, plan.histories[0].size, *flags, program=PROGRAMS / "history.py")


def finish(plan: Plan, job: Job) -> Outcome:
    """Awaits the end. BrokenError where a promise was not kept."""
    strokes = plan.strokes()
    stops = {name: stroke for name, stroke in strokes.items() if stroke.kind == "stop" and not stroke.ends}
    limit_s = _STARTING_S + _A_HISTORY_S * len(plan.histories)
    job.await_end(limit_s, {name: stroke.seconds + stroke.after_ms / 1e3 for name, stroke in stops.items()})
    job.lost = {pid: 0.0 for name, pid in job.fired(strokes).items() if strokes[name].ends}
    job.finish()
    return outcome(plan, job.folder, job.lines())


def outcome(plan: Plan, folder: Path, lines: Sequence[dict[str, Any]]) -> Outcome:
    """Of what the workers have left in `folder`. BrokenError where a promise was not kept."""
    found = Outcome([], [], [])
    for h, history in enumerate(plan.histories):
        found.happened.append([each for n, each in enumerate(history.strokes) if (folder / f"fired.{h}.{n}").exists()])
        ends = [line for line in lines if line["event"] == "history" and line["number"] == h]
        hashes = {line["sha256"] for line in ends}
        if len(hashes) != 1:
            raise BrokenError(f"history {h} ends with {sorted(hashes) or 'nobody'}")
        found.sha256.extend(hashes)
        sizes = max((line["sizes"] for line in ends), key=len)
        found.sizes.append({int(step): size for step, size in sizes.items()})
    steps = [epoch.steps for epoch in audit.audit(*audit.read(folder / "ledger")).epochs]
    if steps != [STEPS] * len(plan.histories):
        raise BrokenError(f"the ledger has epochs of {steps} steps")
    return found


def compare(found: Outcome, expected: Outcome, plan: Plan) -> list[str]:
    """What to say of the histories that ended with other bits than one worker."""
    return [
        f"history {number} ended with {ours[:16]}, one worker with {theirs[:16]}: {plan.histories[number]}"
        for number, (ours, theirs) in enumerate(zip(found.sha256, expected.sha256))
        if ours != theirs
    ]


class Histories(Campaign):
    """Runs trainings in shards that end with the bits of one worker."""

    struck = "histories"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.plans: list[Plan] = []
        self.alone: dict[tuple[str, str], Outcome | None] = {}
        """Of one worker, by network and mode."""
        self.courses: set[tuple[Any, ...]] = set()

    @classmethod
    def options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--net", choices=NETS, help="one of them; without it all, as EVIDENCE shares them out")
        parser.add_argument("--mode", choices=("graph", "pynative"), default="graph", help="of the one")

    def try_job(self, number: int, seed: int, left: int) -> None:
        if not self.plans:
            shares = shares_of(left) if self.args.net is None else [(self.args.net, self.args.mode, left)]
            for kind, mode, count in shares:
                self.plans += plans_of(kind, mode, seed, count)
                seed += count
        plan = self.plans[number]
        kind = plan.kind, plan.mode
        if kind not in self.alone:
            most = max(len(each.histories) for each in self.plans if (each.kind, each.mode) == kind)
            self.alone[kind] = self.run(undisturbed(*kind, most))
        found, alone = self.run(plan), self.alone[kind]
        self.tally.struck += len(plan.histories)
        if found is None or alone is None:
            return
        for text in compare(found, alone, plan):
            self.tally.broke(f"{plan}: {text}")
        for sizes, strokes in zip(found.sizes, found.happened):
            deaths = collections.Counter(stroke.step for stroke in strokes if stroke.ends)
            self.tally.done.update(stroke.kind for stroke in strokes)
            self.tally.done["several died at once"] += sum(many > 1 for many in deaths.values())
            self.tally.done["the lowest rank died"] += sum(stroke.ends and stroke.place == 0 for stroke in strokes)
            self.tally.done[f"up to {max(sizes.values(), default=0)} workers"] += 1
            self.courses.add((*kind, tuple(sorted(sizes.items())), tuple(map(str, strokes))))

    def run(self, plan: Plan) -> Outcome | None:
        """None where something was broken."""
        found = None
        with folder() as at:
            job = begin(plan, at)
            with self.tally.judging(job, plan):
                found = finish(plan, job)
        return found

    def report(self) -> list[str]:
        alone = {kind: found.sha256 for kind, found in self.alone.items() if found is not None}
        return [
            f"  {len(self.courses)} different courses",
            *(f"  {' '.join(kind)}: {' '.join(each[:16] for each in sha256)}" for kind, sha256 in alone.items()),
        ]


def shares_of(count: int) -> list[tuple[str, str, int]]:
    """So many histories, shared out as in EVIDENCE."""
    total, sums = sum(each for _, _, each in EVIDENCE), [0]
    for _, _, each in EVIDENCE:
        sums.append(sums[-1] + each)
    ends = [round(count * each / total) for each in sums]
    return [(kind, mode, end - begin) for (kind, mode, _), begin, end in zip(EVIDENCE, ends, ends[1:]) if end > begin]
