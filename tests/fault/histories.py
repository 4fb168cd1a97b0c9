"""Random histories of a cluster that trains a MindSpore network in shards: each ends with the bits of one worker.

    python -m tests.fault.histories --count 200                      # of all networks, in the shares of `EVIDENCE`
    python -m tests.fault.histories --net resnet --count 5 --seed 7  # LeNet, ResNet or Transformer, in graph mode
    python -m tests.fault.histories --net lenet --count 5 --seed 7 --list

A *history* is an epoch of twelve steps from the same first weights on, and what happens to the cluster meanwhile, drawn
from a seed of its own: its first size, growing and shrinking, SIGKILLs at a shard or some milliseconds later (several
at once, the lowest rank among them), SIGSTOPs, and workers that are slow. It ends with one SHA-256, at all its workers,
of weights, optimizer state and moving statistics, which has to be that of one worker to which nothing happens.

`AT_ONCE` histories follow one another in one job, since starting processes is what takes time: between them all
workers take the first weights again. So each is a sequence of events of its own, of which only two things come from
the history before: the workers it begins with, where the size stays; and, where workers that died are replaced, the
newcomers that are still on their way. The n-th of a job trains the n-th epoch's order of the samples, and is compared
with the n-th of the job of one worker. All of a job's steps are proven by its ledger.

Nobody dies who is the last (`dooms` in programs/history.py). What is drawn and doesn't happen isn't counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ms_kungfu.dataset import audit
from tests.fault.faulty_jobs import BrokenError
from tests.multiprocess.launching import Program

PROGRAM = Path(__file__).with_name("programs") / "history.py"
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
class Job:
    kind: str
    """What is trained: a key of KINDS in programs/trained.py."""
    mode: str
    recover: str
    histories: tuple[History, ...]

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


def jobs_of(kind: str, mode: str, seed: int, count: int) -> list[Job]:
    """Jobs with the histories of `count` seeds from `seed` on."""
    histories = [history_of(each) for each in range(seed, seed + count)]
    parts = [tuple(histories[i : i + AT_ONCE]) for i in range(0, count, AT_ONCE)]
    return [
        Job(kind, mode, "replace" if random.Random(f"job {part[0].seed}").random() < 0.4 else "shrink", part)
        for part in parts
    ]


def undisturbed(kind: str, mode: str, count: int) -> Job:
    """One worker, to which nothing happens."""
    return Job(kind, mode, "shrink", tuple(History(-1, 1, (), ()) for _ in range(count)))


@dataclass(frozen=True)
class Outcome:
    sha256: list[str]
    """Of each history."""
    sizes: list[dict[int, int]]
    """Of each history: how many workers a step was dealt to, as far as somebody saw it who came to its end."""
    happened: list[list[Stroke]]


def run(job: Job) -> Outcome:
    """Runs the job. BrokenError where a promise was not kept."""
    with tempfile.TemporaryDirectory(prefix="kungfu-histories-") as name:
        folder = Path(name)
        plan = {"kind": job.kind, "mode": job.mode, "sizes": job.sizes(), "histories": list(map(asdict, job.histories))}
        (folder / "plan.json").write_text(json.dumps(plan))
        flags = ["-w", "-np", job.histories[0].size, "-recover", job.recover]
        if job.recover == "replace":
            flags += ["-max-restarts", 1000]
        if any(stroke.kind == "stop" and stroke.ends for history in job.histories for stroke in history.strokes):
            flags += ["-peer-timeout", f"{_PEER_TIMEOUT_S}s"]
        program = Program("ms_kungfu.launcher", [*flags, sys.executable, PROGRAM, folder], folder)
        try:
            _await(program, folder, job)
            ended = time.monotonic()
            code = program.wait()
            program.assert_gone(ended)
            if code != 0:
                raise BrokenError(f"exit code {code}")
            return check(job, folder)
        except Exception as error:
            text = "\n".join(map(str, job.histories))
            raise BrokenError(
                f"{error}\n{job.kind}, {job.mode}, -recover {job.recover}\n{text}\n{program.output[-12000:]}"
            ) from error
        finally:
            program.kill_all()


def _await(program: Program, folder: Path, job: Job) -> None:
    """Until the launcher has ended; continues who was stopped for some time."""
    limit = _STARTING_S + _A_HISTORY_S * len(job.histories)
    deadline = time.monotonic() + limit
    waiting = {
        folder / f"fired.{h}.{n}": stroke.seconds + stroke.after_ms / 1e3
        for h, history in enumerate(job.histories)
        for n, stroke in enumerate(history.strokes)
        if stroke.kind == "stop" and not stroke.ends
    }
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.process.wait(0.02)
            return
        if time.monotonic() > deadline:
            raise BrokenError(f"still running after {limit:g} s")
        for path, seconds in list(waiting.items()):
            late = time.time() - path.stat().st_mtime - seconds if path.exists() else -1.0
            if late >= 0:  # and again for a while: a stop by a timer may come later than it should
                with contextlib.suppress(ProcessLookupError):
                    os.kill(json.loads(path.read_text())["pid"], signal.SIGCONT)
            if late > 2:
                del waiting[path]


def _told(folder: Path, what: str) -> dict[int, dict[str, Any]]:
    lines = (json.loads(path.read_text()) for path in folder.glob(f"{what}.*"))
    return {line["pid"]: line for line in lines}


def check(job: Job, folder: Path) -> Outcome:
    """What the workers have left in `folder`. BrokenError where a promise was not kept."""
    found = Outcome([], [], [])
    lost: set[int] = set()
    for h, history in enumerate(job.histories):
        fired = {n: folder / f"fired.{h}.{n}" for n in range(len(history.strokes))}
        happened = {n: json.loads(path.read_text())["pid"] for n, path in fired.items() if path.exists()}
        lost |= {pid for n, pid in happened.items() if history.strokes[n].ends}
        found.happened.append([history.strokes[n] for n in happened])
        ends = _told(folder, f"end.{h}")
        hashes = {line["sha256"] for line in ends.values()}
        if len(hashes) != 1:
            raise BrokenError(f"history {h} ends with {sorted(hashes) or 'nobody'}")
        found.sha256.extend(hashes)
        sizes = max((line["sizes"] for line in ends.values()), key=len)
        found.sizes.append({int(step): size for step, size in sizes.items()})
    members, left = _told(folder, "member"), _told(folder, "left")
    last = _told(folder, f"end.{len(job.histories) - 1}")
    if missing := set(members) - set(last) - set(left) - lost:
        raise BrokenError(f"workers {sorted(missing)} are gone, and nothing was done to them")
    report = audit.audit(*audit.read(folder / "ledger"))
    if not report.exact:
        raise BrokenError(audit.to_text(report))
    steps = [epoch.steps for epoch in report.epochs]
    if steps != [STEPS] * len(job.histories):
        raise BrokenError(f"the ledger has epochs of {steps} steps")
    return found


def compare(found: Outcome, expected: Outcome, job: Job) -> list[str]:
    """What to say of the histories that ended with other bits than one worker."""
    return [
        f"{job.kind}, {job.mode}, -recover {job.recover}: history {number} ended with {ours[:16]}, one worker with "
        f"{theirs[:16]}\n  {job.histories[number]}"
        for number, (ours, theirs) in enumerate(zip(found.sha256, expected.sha256))
        if ours != theirs
    ]


def try_out(kind: str, mode: str, seed: int, count: int) -> dict[str, Any]:
    """Runs so many histories and prints what is wrong with them; what came of it."""
    begin = time.monotonic()
    expected = run(undisturbed(kind, mode, min(count, AT_ONCE)))
    right, wrong = 0, 0
    happened: collections.Counter[str] = collections.Counter()
    seen = set()
    for job in jobs_of(kind, mode, seed, count):
        try:
            found = run(job)
        except BrokenError as error:
            wrong += len(job.histories)
            print(f"BROKEN: {error}\n", flush=True)
            continue
        differing = compare(found, expected, job)
        for line in differing:
            print(f"DIFFERENT: {line}\n", flush=True)
        wrong, right = wrong + len(differing), right + len(found.sha256) - len(differing)
        for sizes, strokes in zip(found.sizes, found.happened):
            deaths = collections.Counter(stroke.step for stroke in strokes if stroke.ends)
            happened.update(stroke.kind for stroke in strokes)
            happened["several died at once"] += sum(many > 1 for many in deaths.values())
            happened["the lowest rank died"] += sum(stroke.ends and stroke.place == 0 for stroke in strokes)
            seen.add((tuple(sorted(sizes.items())), tuple(map(str, strokes))))
            happened[f"up to {max(sizes.values(), default=0)} workers"] += 1
        print(f"  {right + wrong} of {count}, {time.monotonic() - begin:.0f} s", flush=True)
    return {
        "kind": kind, "mode": mode, "seed": seed, "histories": count, "same": right, "wrong": wrong,
        "different_courses": len(seen), "happened": dict(sorted(happened.items())), "sha256": expected.sha256,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def to_text(result: dict[str, Any]) -> str:
    happened = ", ".join(f"{what} {count}" for what, count in result["happened"].items())
    return (
        f"{result['kind']}, {result['mode']} mode, seeds from {result['seed']}: {result['same']} of "
        f"{result['histories']} histories ended with the SHA-256 of one worker; "
        f"{result['different_courses']} different courses; {result['seconds']:.0f} s\n"
        f"  {happened}\n  {' '.join(each[:16] for each in result['sha256'])}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.histories", description=__doc__.split("\n")[0])
    parser.add_argument("--net", choices=NETS, help="one of them; without it all, as EVIDENCE shares them out")
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    parser.add_argument("--count", type=int, default=5, help="histories (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    parser.add_argument("--list", action="store_true", help="only say what they are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object for each network and mode")
    args = parser.parse_args(words)
    total = sum(count for _, _, count in EVIDENCE)
    shares = [(kind, mode, -(-count * args.count // total)) for kind, mode, count in EVIDENCE]
    wanted = [(args.net, args.mode, args.count)] if args.net else shares
    results, seed = [], args.seed
    for kind, mode, count in wanted:
        if args.list:
            print(
                kind,
                mode,
                *(f"  {history}" for job in jobs_of(kind, mode, seed, count) for history in job.histories),
                sep="\n",
            )
        else:
            results.append(try_out(kind, mode, seed, count))
            print(to_text(results[-1]), flush=True)
        seed += count
    if args.json:
        args.json.write_text("".join(json.dumps(result) + "\n" for result in results))
    return 1 if any(result["wrong"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
