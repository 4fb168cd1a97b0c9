"""Faults that scripts name (see `programs.faults`), which happen to real workers at marked places of the runtime.

``python -m tests.campaigns faults --script TEXT`` runs a script of one's own on 3 workers in 80 steps.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.driver import Campaign, folder
from tests.campaigns.jobs import PROGRAMS, BrokenError, Job, build_runtime
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
from tests.hosts.jobs import Machine

STEP_S, SIZES = 0.003, "3,20000,300000"  # of three protocols of the collectives
_PEER_TIMEOUT_S = 3  # of scripts with a worker that stops; the machine may be busy
_LIMIT_S, _PATIENCE_S = 90.0, 20.0  # of all; with the cluster's size, when all steps are done
_FD_SLACK = 2


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


def begin(script: Script, runtime: Path, at: Path) -> Job:
    flags = ["-recover", script.recover, "-standby", script.standbys]
    if script.recover == "replace" or script.standbys:
        flags += ["-max-restarts", 1000]
    if any(fault.kind == "stop" for fault in script.faults):
        flags += ["-peer-timeout", f"{_PEER_TIMEOUT_S}s"]
    environment = {
        "KUNGFU_FAULTS": to_text(script.faults), "KUNGFU_JOIN_TIMEOUT": "30", "KUNGFU_COLLECTIVE_TIMEOUT": "30",
    }  # fmt: skip
    words = [STEP_S, runtime, script.manner, SIZES]
    return Job(
        Machine(), at, script.size, *flags, program=PROGRAMS / "averaging.py", words=words, environment=environment
    )


def finish(script: Script, job: Job) -> list[int]:
    """Awaits the end; which lines of the script have happened. BrokenError where a promise was not kept."""
    numbers = {f"fired.{number}": number for number in range(len(script.faults))}
    stops = {name: script.faults[n].seconds for name, n in numbers.items() if script.faults[n].kind == "stop"}
    enough_at = 0.0

    def look() -> None:
        """Asks for the end when all steps are done and the cluster has its size, or won't get it."""
        nonlocal enough_at
        if max(map(job.steps, job.told("member")), default=-1) >= script.steps:
            enough_at = enough_at or time.monotonic()
            is_whole = script.recover != "replace" or len(job.holders()) >= _awaited(script, job)
            if is_whole or time.monotonic() > enough_at + _PATIENCE_S:
                job.stop()

    job.await_end(_LIMIT_S, {name: seconds for name, seconds in stops.items() if seconds}, look)
    fired = {numbers[name]: pid for name, pid in job.fired(numbers).items()}
    faults = [script.faults[number] for number in fired]
    job.lost = {pid: 0.0 for n, pid in fired.items() if script.faults[n].ends and script.faults[n].kind != "evict"}
    # A worker that the launcher refuses raises, as a program that fails does, and the job then ends with its code.
    may_fail = any(fault.kind == "refuse" and fault.place.startswith("broker") for fault in faults)
    job.finish(codes=(0, 1) if may_fail else (0,))
    members, ends, left = job.told("member"), job.told("end"), job.told("left")
    if left and not any(fault.kind in ("resize", "evict", "leave") for fault in script.faults):
        raise BrokenError(f"workers {sorted(left)} have left, and nobody asked for that")
    if not {pid for pid, line in members.items() if line["step"] == 0} & set(ends):
        raise BrokenError("none of the first workers has come to the end")
    for pid, line in ends.items():
        if line["step"] < script.steps:
            raise BrokenError(f"worker {pid} ended at step {line['step']} of {script.steps}")
        (fds, mappings), (fds_last, mappings_last) = line["first"], line["last"]
        if fds_last > fds + _FD_SLACK or mappings_last > mappings:
            raise BrokenError(f"worker {pid} had {fds} descriptors and {mappings} mappings, then {line['last']}")
    return sorted(fired)


def _awaited(script: Script, job: Job) -> int:
    """The size that the job comes to, with replacements, by what was done to it."""
    sizes = [script.size, *(fault.size for fault in script.faults if fault.size is not None)]
    gone = [f"fired.{number}" for number, fault in enumerate(script.faults) if fault.kind in ("leave", "evict")]
    return sizes[-1] - len(job.fired(gone))


def _kind_of(fault: Fault) -> str:
    where = "collective" if fault.place in COLLECTIVE_PLACES else fault.place
    return f"{fault.kind} {'newcomer' if fault.newcomer is not None else 'member'} {where}".rstrip()


class Scripts(Campaign):
    """Runs jobs to which happens what a script says."""

    struck = "scripts"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.runtime = build_runtime()

    @classmethod
    def options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--script", help="instead of a seed's: faults that happen to 3 workers in 80 steps")

    def try_job(self, number: int, seed: int, left: int) -> None:
        script = Script(parse(self.args.script)) if self.args.script else script_of(seed + number)
        self.try_script(script)
        self.tally.struck += 1

    def try_script(self, script: Script) -> list[int]:
        """Which lines have happened."""
        fired: list[int] = []
        with folder() as at:
            job = begin(script, self.runtime, at)
            with self.tally.judging(job, script):
                fired = finish(script, job)
        for number, fault in enumerate(script.faults):
            (self.tally.done if number in fired else self.tally.missed)[_kind_of(fault)] += 1
        return fired
