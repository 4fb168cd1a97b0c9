"""Jobs of real processes to which faults happen, and what has to hold of them afterwards.

``python -m tests.fault.faulty_jobs SEED [COUNT]`` runs the scripts of these seeds, and ``--script TEXT`` one of your
own (see `programs.faults`). A seed gives the same script each time; how it falls is up to the machine.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ms_kungfu.dataset import audit, sharding
from tests.conftest import build_cpp
from tests.fault.programs.faults import (
    COLLECTIVE_PLACES,
    CONNECTIONS,
    PLACES,
    PLACES_OF_A_CHANGE,
    PLACES_OF_A_STEP,
    Fault,
    parse,
    to_text,
)
from tests.multiprocess.launching import Program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("programs") / "faulty.py"
_PEER_TIMEOUT_S = 3  # of scripts with a worker that stops; the machine may be busy
_LIMIT_S = 90.0
_FD_SLACK = 2


def build_runtime() -> Path:
    """The runtime with the places of its collectives marked, built beside the C++ tests, of which it is a part."""
    return build_cpp("kungfu_runtime") / "ops_src" / "libkungfu_runtime.so"


@dataclass(frozen=True)
class Script:
    """A job, and what is to happen to it."""

    faults: tuple[Fault, ...]
    size: int = 3
    steps: int = 80
    recover: str = "replace"
    standbys: int = 0
    manner: str = "together"

    def __str__(self) -> str:
        return (
            f"-np {self.size} -recover {self.recover} -standby {self.standbys}, {self.steps} steps, "
            f'{self.manner}: KUNGFU_FAULTS="{to_text(self.faults)}"'
        )


class BrokenError(AssertionError):
    """A promise that was not kept."""


def script_of(seed: int) -> Script:
    """A random script. It never costs the job the last worker that has been there from the beginning."""
    rng = random.Random(seed)
    size, steps = rng.choice((2, 3, 3, 4)), rng.randrange(50, 130)
    recover = "replace" if rng.random() < 0.7 else "shrink"
    faults: list[Fault] = []
    budget = size - 1
    if rng.random() < 0.25:
        wanted = rng.choice((2, 3, 4))
        faults.append(Fault("resize", step=rng.randrange(2, steps - 20), size=wanted))
        budget = min(budget, wanted - 1)
    for number in range(rng.randrange(1, 6)):
        kind = rng.choices(("kill", "slow", "stop", "refuse", "leave", "evict"), (55, 12, 8, 15, 5, 5))[0]
        from_step = rng.random() < 0.5
        who: dict[str, Any] = {"rank": rng.randrange(size), "step": rng.randrange(0, steps - 2), "from_step": from_step}
        is_newcomer = number > 0 and rng.random() < 0.4 and kind not in ("leave", "evict")
        if is_newcomer:
            who = {"newcomer": rng.choice((0, 0, 0, 1, 1, 2))}
        seconds, place, nth = 0.0, "", 1
        if kind in ("kill", "slow", "stop"):
            in_collective = rng.random() < 0.5
            others = PLACES if is_newcomer else PLACES_OF_A_CHANGE if from_step else PLACES_OF_A_STEP
            place = rng.choice(COLLECTIVE_PLACES if in_collective else others)
            nth = rng.randrange(1, 4 if who.get("step") and not from_step else 20) if in_collective else 1
        if kind == "refuse":
            place = rng.choice(CONNECTIONS)
        if kind == "slow" or (kind == "stop" and rng.random() < 0.3):
            seconds = round(rng.uniform(0.02, 0.4), 3)
        fault = Fault(kind, place=place, nth=nth, seconds=seconds, **who)
        if fault.ends and not is_newcomer:
            if budget == 0:
                continue
            budget -= 1
        faults.append(fault)
    return Script(
        tuple(faults), size, steps, recover,
        standbys=rng.choice((0, 0, 0, 1)), manner=rng.choice(("together", "together", "background")),
    )  # fmt: skip


def run(script: Script, runtime: Path) -> list[int]:
    """Runs the job; which lines of the script have happened. BrokenError where a promise was not kept."""
    with tempfile.TemporaryDirectory(prefix="kungfu-faults-") as name:
        folder = Path(name)
        flags = ["-w", "-np", script.size, "-recover", script.recover, "-standby", script.standbys]
        if script.recover == "replace" or script.standbys:
            flags += ["-max-restarts", 1000]
        if any(fault.kind == "stop" for fault in script.faults):
            flags += ["-peer-timeout", f"{_PEER_TIMEOUT_S}s"]
        environment = {
            "KUNGFU_FAULTS": to_text(script.faults), "KUNGFU_JOIN_TIMEOUT": "30", "KUNGFU_COLLECTIVE_TIMEOUT": "30",
        }  # fmt: skip
        awaited = script.size if script.recover == "replace" else 0
        words = [sys.executable, PROGRAM, folder, script.steps, runtime, awaited, script.manner]
        job = Program("ms_kungfu.launcher", [*flags, *words], folder, environment)
        try:
            _await(job, folder, script)
            ended = time.monotonic()
            # Who is refused by the launcher raises, as a program that fails does, and the job then ends with its code.
            may_fail = any(fault.kind == "refuse" and fault.place.startswith("broker") for fault in script.faults)
            if job.wait() not in ((0, 1) if may_fail else (0,)):
                raise BrokenError(f"exit code {job.process.returncode}")
            job.assert_gone(ended)
            return _check(script, folder)
        except Exception as error:
            raise BrokenError(f"{error}\n{script}\n{job.output[-12000:]}") from error
        finally:
            job.kill_all()


def _await(job: Program, folder: Path, script: Script) -> None:
    """Until the launcher has ended; continues who was stopped for some time."""
    deadline = time.monotonic() + _LIMIT_S
    waiting = {n: fault.seconds for n, fault in enumerate(script.faults) if fault.kind == "stop" and fault.seconds}
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(0.02)
            return
        if time.monotonic() > deadline:
            raise BrokenError(f"still running after {_LIMIT_S:g} s")
        for number, seconds in list(waiting.items()):
            path = folder / f"fired.{number}"
            if path.exists() and time.time() - path.stat().st_mtime >= seconds:
                del waiting[number]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGCONT)


def _told(folder: Path, what: str) -> dict[int, dict[str, Any]]:
    lines = (json.loads(path.read_text()) for path in folder.glob(f"{what}.*"))
    return {line["pid"]: line for line in lines}


def _check(script: Script, folder: Path) -> list[int]:
    fired = {n: int((folder / f"fired.{n}").read_text()) for n in range(len(script.faults)) if _fired(folder, n)}
    lost = {pid for n, pid in fired.items() if script.faults[n].ends and script.faults[n].kind != "evict"}
    members, ends, left = (_told(folder, what) for what in ("member", "end", "left"))
    may_leave = any(fault.kind in ("resize", "evict", "leave") for fault in script.faults)
    if missing := set(members) - set(ends) - set(left) - lost:
        raise BrokenError(f"workers {sorted(missing)} are gone, and nothing was done to them")
    if left and not may_leave:
        raise BrokenError(f"workers {sorted(left)} have left, and nobody asked for that")
    if not ends:
        raise BrokenError("nobody has come to the end")
    if not {pid for pid, line in members.items() if line["step"] == 0} & set(ends):
        raise BrokenError("none of the first workers has come to the end")
    last = max(line["step"] for line in ends.values())
    for pid, line in ends.items():
        if line["step"] != last or last < script.steps:
            raise BrokenError(f"worker {pid} ended at step {line['step']}, others at {last} of {script.steps}")
        (fds, mappings), (fds_last, mappings_last) = line["first"] or line["last"], line["last"]
        if fds_last > fds + _FD_SLACK or mappings_last > mappings:
            raise BrokenError(f"worker {pid} had {fds} descriptors and {mappings} mappings, then {line['last']}")
    if len({line["digest"] for line in ends.values()}) != 1:
        raise BrokenError(f"the parameters differ: {ends}")
    found = audit.audit(*audit.read(folder / "ledger"))
    if not found.exact:
        raise BrokenError(audit.to_text(found))
    steps, weight, tolerance = weight_of(folder / "ledger")
    if steps != last:
        raise BrokenError(f"the ledger has {steps} steps, {last} were trained")
    head = next(iter(ends.values()))["head"]
    if abs(head - weight) > tolerance:
        raise BrokenError(f"the first weight is {head}, by the ledger it has to be {weight}")
    return sorted(fired)


def _fired(folder: Path, number: int) -> bool:
    return (folder / f"fired.{number}").exists()


def weight_of(ledger: Path) -> tuple[int, float, float]:
    """How many steps were committed, what the first weight has to be after what they have trained, and how far it may
    be off: it is a float32 that each step rounds once (2**-24 of it), after a weighted mean of numbers of at most 1
    (two roundings for each of up to 16 ranks)."""
    steps: dict[tuple[int, int], float] = {}
    for path in ledger.iterdir():
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # torn by a kill
            line = json.loads(text)
            if "step" in line:
                batch = tuple((first, last) for first, last in line["batch"])
                step = sharding.Step(line["step"], batch, tuple(line["members"]))
                trained, _ = step.outcome(line["participants"])
                steps[line["epoch"], line["step"]] = float(np.sin(sharding.positions(trained)).mean())
    sums = np.cumsum([0.0, *(steps[key] for key in sorted(steps))])
    return len(steps), float(sums[-1]), len(steps) * (float(np.abs(sums).max()) + 32) * 2.0**-24


def _kind_of(fault: Fault) -> str:
    where = "collective" if fault.place in COLLECTIVE_PLACES else fault.place
    return f"{fault.kind} {'newcomer' if fault.newcomer is not None else 'member'} {where}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.faulty_jobs", description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many (default 1)")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time (default 1)")
    parser.add_argument("--script", help="instead of a seed's: faults that happen to 3 workers in 80 steps")
    args = parser.parse_args()
    runtime = build_runtime()
    if args.script:
        print("happened:", run(Script(parse(args.script)), runtime))
        return 0
    begin, broken = time.monotonic(), 0
    written, happened = collections.Counter[str](), collections.Counter[str]()
    seeds = range(args.first, args.first + args.count)
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        futures = {seed: pool.submit(run, script_of(seed), runtime) for seed in seeds}
        for seed, future in futures.items():
            faults = script_of(seed).faults
            written.update(_kind_of(fault) for fault in faults)
            try:
                happened.update(_kind_of(faults[number]) for number in future.result())
            except BrokenError as error:
                broken += 1
                print(f"seed {seed}: {error}\n", flush=True)
            if (seed - args.first) % 25 == 24:
                print(f"{seed - args.first + 1} scripts, {time.monotonic() - begin:.0f} s", flush=True)
    took = time.monotonic() - begin
    print(f"{args.count} scripts, {broken} broken, {sum(happened.values())} faults happened, {took:.0f} s")
    for kind, count in sorted(written.items()):
        print(f"  {kind:40} {happened[kind]} of {count}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
