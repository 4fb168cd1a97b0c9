"""A hard trial on real processes: kills at random, resizes at random, and every sample counted.

    python -m tests.fault.trial --kills 1000
    python -m tests.fault.trial --kills 200 --hosts 4

runs jobs under ``kungfu-run -w`` until so many of their processes were killed by SIGKILL: workers, rank 0 too, several
at once, newcomers and standbys while they start, and all of them now and then in the midst of a checkpoint, an
evaluation or a change. Meanwhile sizes from 1 to 8 are asked for, several in a row without waiting for the first. Half
of the jobs run with ``-recover replace``, half with ``shrink``; steps take from 2 ms to a quarter of a second.
With several hosts, which addresses of the loopback play, each has a launcher of its own, and now and then one of these
is killed, but for the first's: its workers are lost with it.

The workers (`programs/counting.py`) have one weight a sample, which counts how often it was trained, so that exactly
once can be read from the weights: after E epochs all are E. What has to hold besides:

- no job is lost while a worker lives that has the state, and none ends before it is asked to;
- nothing hangs: within `--patience` seconds some worker ends a step;
- no worker fails by an exception, and none is ended that nobody has killed;
- all workers that live to the end have the same weights, and the ledger is exact.

A job may be lost where the trial killed the only worker that a change had just left over: whether the others had gone
before or might have stayed can't be told from outside if that was within `_AT_ONCE_S`. These are counted apart.

Exit status: 0 nothing was broken, 1 something was (named, with the job's output in a file). A seed gives the same jobs
and the same wishes to kill and to resize; how they fall is up to the machine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ms_kungfu._processes import children
from ms_kungfu.dataset import audit
from tests.multiprocess.launching import Program
from tests.ports import free_port

PROGRAM = Path(__file__).with_name("programs") / "counting.py"
SIZES = range(1, 9)
_HEAD = "127.0.0.1"
_SLOTS = 20  # of a host
_LOSES_HOST = 0.06
_NOW = struct.Struct("=qqdd")  # as in programs/counting.py
_STEPS_S = (0.002, 0.002, 0.01, 0.05, 0.25)
_SLOW_S = 0.05  # steps from here on leave time to strike between a wish and the agreement on it
_AT_ONCE_S = 0.1
_FINISH_S = 90.0
_POLL_S = 0.02
_WAITS, _SETTLE_S = 0.7, 5.0  # how often it waits for what was asked for, and how long


@dataclass(frozen=True)
class Plan:
    """A job."""

    size: int
    recover: str
    standbys: int
    step_s: float
    kills: int
    every_s: float
    """Between two blows, about."""
    hosts: int = 1

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts, " if self.hosts > 1 else ""
        return f"{hosts}-np {self.size} -recover {self.recover} -standby {self.standbys}, steps of {self.step_s:g} s"


def plan_of(rng: random.Random, kills: int, hosts: int) -> Plan:
    recover = rng.choice(("replace", "shrink"))
    standbys = rng.choice((0, 1, 2, 3))
    step_s = rng.choice(_STEPS_S)
    size, kills, every_s = rng.randrange(2, 7), min(kills, rng.randrange(15, 40)), rng.choice((0.2, 0.5, 1.0))
    if hosts > 1:
        standbys = 0  # of one host only
    return Plan(size, recover, standbys, step_s, kills, every_s, hosts)


@dataclass
class Counts:
    """What was done, and what came of it."""

    done: collections.Counter[str] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return sum(self.done[what] for what in ("members killed", "several at once", "newcomers killed", "lost hosts'"))


class Job:
    """A job that is being tried."""

    def __init__(
        self, plan: Plan, rng: random.Random, folder: Path, counts: Counts, patience_s: float,
        program: Path = PROGRAM, logs: Path | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.rng, self.folder, self.counts, self.patience_s = plan, rng, folder, counts, patience_s
        self.logs = logs
        self.killed: dict[int, float] = {}
        self.secret = secrets.token_hex(32)
        flags = ["-w", "-np", plan.size, "-recover", plan.recover, "-standby", plan.standbys]
        if plan.recover == "replace" or plan.standbys:
            flags += ["-max-restarts", 10**6]
        environment = {
            "KUNGFU_JOB_SECRET": self.secret,
            "KUNGFU_JOIN_TIMEOUT": f"{3 * patience_s:g}", "KUNGFU_COLLECTIVE_TIMEOUT": f"{3 * patience_s:g}",
        }  # fmt: skip
        words = [*flags, sys.executable, program, folder, plan.step_s]
        if plan.hosts == 1:
            self.launchers = {_HEAD: Program("ms_kungfu.launcher", words, folder, environment)}
        else:
            self.launchers = dict(_on_hosts(plan.hosts, words, folder, environment))
        self.program = self.launchers[_HEAD]
        self.lost: dict[str, Program] = {}
        self.wishes: list[list[str]] = []  # of workers, since the cluster was last as it was wished for
        self.furthest, self.progress_at = -1, time.monotonic()

    # -- what there is --

    def told(self, what: str) -> dict[int, dict[str, Any]]:
        return {int(path.name.split(".")[1]): json.loads(path.read_text()) for path in self.folder.glob(f"{what}.*")}

    def processes(self) -> set[int]:
        """The workers and standbys that run, those that have only been forked too."""
        return {pid for launcher in self.launchers.values() for pid in _workers_of(launcher)} - set(self.killed)

    def holders(self) -> list[int]:
        """Who has the state, and is in the cluster as far as can be seen."""
        gone = {*self.killed, *self.told("left"), *self.told("failed"), *self.told("end")}
        return sorted((self.told("member").keys() - gone) & self.processes())

    def now(self, pid: int) -> tuple[int, int, float, float]:
        content = (self.folder / f"now.{pid}").read_bytes()
        return _NOW.unpack(content) if len(content) == _NOW.size else (-1, -1, 0.0, 0.0)

    # -- what is done to it --

    def run(self) -> None:
        try:
            self.program.wait_for("config server: http", timeout=self.patience_s)
            url = self.program.wait_for(r"config server: (http\S+)")[0][1]
            self.server = urlsplit(url)
            killed = 0
            following, waits = time.monotonic(), False
            while killed < self.plan.kills and self.goes_on():
                late = time.monotonic() - following
                if late >= 0 and (not waits or late > _SETTLE_S or self.is_settled()):
                    killed += self.strike()
                    following = time.monotonic() + self.plan.every_s * self.rng.uniform(0.2, 1.8)
                    waits = self.rng.random() < _WAITS  # else the cluster would hardly ever grow
                time.sleep(_POLL_S)
            if self.program.process.poll() is not None:
                return self.look_at_the_loss()
            (self.folder / "stop").touch()
            deadline = time.monotonic() + _FINISH_S
            while self.goes_on():
                if time.monotonic() > deadline:
                    return self.is_broken("hang", f"did not finish within {_FINISH_S:g} s")
                time.sleep(_POLL_S)
            self.judge()
        except AssertionError as error:
            self.is_broken("hang", str(error).splitlines()[0])
        finally:
            for launcher in [*self.launchers.values(), *self.lost.values()]:
                launcher.kill_all()

    def goes_on(self) -> bool:
        """Whether the job runs; AssertionError where it hangs."""
        if self.program.process.poll() is not None:
            return False
        furthest = max((self.now(pid)[0] for pid in self.holders()), default=-1)
        if furthest > self.furthest:
            self.furthest, self.progress_at = furthest, time.monotonic()
        if time.monotonic() - self.progress_at > self.patience_s:
            raise AssertionError(f"no step ended within {self.patience_s:g} s, the last was {self.furthest}")
        return True

    def strike(self) -> int:
        """Kills some processes, or asks for other sizes; how many were killed."""
        holders, kind = self.holders(), self.rng.random()
        if not holders:
            return 0  # it starts
        if kind < 0.35:
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                self.resize()
                if self.rng.random() < 0.5:
                    time.sleep(self.rng.uniform(0, 4 * self.plan.step_s))
            if self.rng.random() < 0.5:
                return 0
            holders = self.holders()
        if len(self.launchers) > 1 and self.rng.random() < _LOSES_HOST:
            return self.lose_host(holders)
        newcomers = sorted(self.processes() - set(self.told("member")) - set(self.told("left")))
        if newcomers and self.rng.random() < (0.25 if len(holders) > 1 else 0.15):
            victims = self.rng.sample(newcomers, self.rng.randrange(1, len(newcomers) + 1))
            return self.kill(victims, "newcomers killed")
        spared = self.spared(holders)
        able = [pid for pid in holders if pid != spared]
        if able and len(able) == len(holders):
            able.remove(self.rng.choice(able))
        if not able:
            if not newcomers:
                self.resize(self.rng.randrange(2, 9))
            return 0
        if self.rng.random() < 0.3:
            victims = self.rng.sample(able, self.rng.randrange(1, len(able) + 1))
        elif self.rng.random() < 0.3:
            victims = [min(able, key=lambda pid: self.told("member")[pid]["time"])]  # rank 0, or who comes next
        else:
            victims = [self.rng.choice(able)]
        return self.kill(victims, "several at once" if len(victims) > 1 else "members killed")

    def lose_host(self, holders: list[int]) -> int:
        """Kills a launcher, where somebody who is to live is on another host."""
        spared = self.spared(holders)
        host = self.rng.choice([host for host in self.launchers if host != _HEAD])
        there = _workers_of(self.launchers[host]) - set(self.killed)
        if spared in there or not set(holders) - there:
            return 0
        launcher = self.lost[host] = self.launchers.pop(host)
        os.kill(launcher.process.pid, signal.SIGSTOP)  # it starts nobody any more
        there |= _workers_of(launcher) - set(self.killed)
        self.killed.update(dict.fromkeys(there, time.monotonic()))
        launcher.process.kill()
        self.counts.done["hosts lost"] += 1
        self.counts.done["lost hosts'"] += len(there)
        return len(there)

    def spared(self, holders: list[int]) -> int | None:
        """Where steps are short, who is in all clusters wished for: it can't be seen from outside whether the others
        have left already. None: anybody but one."""
        if not holders:
            return None
        document = self.wanted()
        if not document:
            return holders[0]
        if all(self.now(pid)[1] == document["Version"] for pid in holders):
            self.wishes.clear()
            return None
        if self.plan.step_s >= _SLOW_S:
            return None
        # Of one that has joined lately the launcher's name isn't known here, but its port is in its environment.
        named = {pid: _environment(pid).get("KUNGFU_SELF") for pid in holders}
        in_all = [p for p in holders if all(named[p] in wish for wish in [*self.wishes, document["Workers"]])]
        return in_all[0] if in_all else holders[0]

    def wanted(self) -> dict[str, Any]:
        """The newest cluster that was asked for; empty where nobody answers."""
        with contextlib.suppress(OSError):
            return self.request("GET")
        return {}

    def is_settled(self) -> bool:
        """Whether the cluster is what was asked for."""
        holders, document = self.holders(), self.wanted()
        versions = {self.now(pid)[1] for pid in holders}
        return versions == {document.get("Version")} and len(holders) == len(document["Workers"])

    def kill(self, pids: list[int], what: str) -> int:
        self.counts.done[what] += len(pids)
        for pid in pids:
            self.killed[pid] = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def resize(self, size: int | None = None) -> None:
        """As ``kungfu-run resize`` does: a compare-and-swap of the wanted cluster."""
        size = size or self.rng.choice(SIZES)
        with contextlib.suppress(OSError, KeyError):  # the server of a job that has just ended
            document = self.wanted()
            workers = document["Workers"]
            if len(workers) > size and self.plan.step_s >= _SLOW_S and self.rng.random() < 0.3:
                workers = [workers[place] for place in sorted(self.rng.sample(range(len(workers)), size))]
            places = [f"{host}:{port}" for host in self.launchers for port in range(10000, 10000 + _SLOTS)]
            free = iter(sorted(set(places) - set(workers), key=lambda _: self.rng.random()))
            workers = workers[:size] + [next(free) for _ in range(size - len(workers))]
            wanted = {**document, "Workers": workers, "Version": document["Version"] + 1}
            if self.request("PUT", json.dumps(wanted)):
                self.wishes.append(workers)
                self.counts.done["resizes"] += 1

    def request(self, method: str, body: str | None = None) -> dict[str, Any]:
        """Empty where somebody else was faster, or the server says no."""
        connection = http.client.HTTPConnection(self.server.hostname, self.server.port, timeout=self.patience_s)
        with contextlib.closing(connection):
            connection.request(method, self.server.path, body, {"Authorization": f"Bearer {self.secret}"})
            answer = connection.getresponse()
            content = answer.read()
        return json.loads(content) if answer.status == 200 else {}

    # -- what came of it --

    def look_at_the_loss(self) -> None:
        """It ended before it was asked to."""
        code = self.program.wait()
        left, failed, members = self.told("left"), self.told("failed"), self.told("member")
        last_kill = max((when for pid, when in self.killed.items() if pid in members), default=0.0)
        healthy = [pid for pid in members if pid not in {*self.killed, *left, *failed}]
        late = {pid: line for pid, line in {**left, **failed}.items() if pid in members and line["time"] > last_kill}
        if not members:
            self.is_broken("lost", f"the job ended with {code} before anybody had trained")
        elif healthy or failed.keys() - self.killed.keys() - left.keys():
            self.is_broken("lost", f"the job ended with {code} while {healthy or 'workers'} lived: {_errors(failed)}")
        elif any(line.get("asked", 0.0) > last_kill + _AT_ONCE_S for line in late.values()):
            self.is_broken("lost", f"the job ended with {code} though {sorted(late)} had the state and lived")
        else:
            self.counts.done["jobs whose only worker was killed at once with a change"] += 1

    def judge(self) -> None:
        """It was asked to end, and has."""
        codes = {launcher.wait() for launcher in self.launchers.values()}
        ends, left, failed, members = (self.told(what) for what in ("end", "left", "failed", "member"))
        if codes != {0}:
            self.is_broken("lost", f"exit status {sorted(codes)} {_errors(failed)}")
        elif not ends:
            self.is_broken("lost", "nobody has come to the end")
        if unexplained := members.keys() - ends.keys() - left.keys() - self.killed.keys() - failed.keys():
            self.is_broken("ended", f"workers {sorted(unexplained)} are gone, and nobody killed them")
        if failed.keys() - self.killed.keys():
            self.is_broken("failed", _errors(failed))
        if wrong := self.told("wrong"):
            self.is_broken("wrong weights", json.dumps(next(iter(wrong.values()))))
        if any(set(line["weights"]) != {line["epochs"]} for line in ends.values()):
            self.is_broken("wrong weights", json.dumps(list(ends.values())))
        if len({line["epochs"] for line in ends.values()}) > 1:
            self.is_broken("wrong weights", f"epochs {[line['epochs'] for line in ends.values()]}")
        report = audit.audit(*audit.read(self.folder / "ledger"))
        if not report.exact:
            self.is_broken("ledger", audit.to_text(report))
        self.counts.done["jobs finished"] += 1
        self.counts.done["epochs, each sample once"] += max((line["epochs"] for line in ends.values()), default=0)

    def is_broken(self, what: str, text: str) -> None:
        self.counts.done[f"BROKEN: {what}"] += 1
        self.counts.broken.append(f"{what}: {self.plan}: {text}")
        with tempfile.NamedTemporaryFile(
            "w", prefix="kungfu-trial-", suffix=".log", dir=self.logs, delete=False
        ) as file:
            file.write(f"{what}: {self.plan}: {text}\n\nkilled {self.killed}\n")
            for kind in ("member", "left", "failed", "end", "wrong"):
                file.write(f"{kind}: {json.dumps(self.told(kind))}\n")
            for host, launcher in {**self.launchers, **self.lost}.items():
                file.write(f"--- {host}\n{launcher.output}\n")
        print(f"BROKEN: {what}: {self.plan}: {text}\n  (the job's output: {file.name})", flush=True)


def _errors(failed: dict[int, dict[str, Any]]) -> str:
    return "; ".join(sorted({line["error"].strip().splitlines()[-1] for line in failed.values()}))


def _on_hosts(
    count: int, words: list[object], folder: Path, environment: dict[str, str]
) -> Iterator[tuple[str, Program]]:
    """A launcher a host, the head's first."""
    hosts = [f"127.0.0.{number}" for number in range(1, count + 1)]
    port, config_port = free_port(*hosts), free_port(*hosts)
    url = f"http://{_HEAD}:{config_port}/config"
    listed = ",".join(f"{host}:{_SLOTS}" for host in hosts)
    shared = ["-H", listed, "-port", port, "-builtin-config-port", config_port, "-config-server", url]
    for host in hosts:
        own = folder / f"host-{host}"
        own.mkdir()
        yield host, Program("ms_kungfu.launcher", ["-self", host, *shared, *words], own, environment)


def _workers_of(launcher: Program) -> set[int]:
    return {worker for guard in children(launcher.process.pid) for worker in children(guard)}


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)
    return {}


def run(kills: int, seed: int, at_once: int = 1, patience_s: float = 40.0, hosts: int = 1) -> Counts:
    """Jobs until there were so many kills."""
    counts, lock, numbers = Counts(), threading.Lock(), iter(range(1 << 30))

    def work() -> None:
        while counts.killed < kills:
            with lock:
                number = next(numbers)
            rng = random.Random(f"{seed} {number}")
            plan = plan_of(rng, kills, hosts)
            with tempfile.TemporaryDirectory(prefix="kungfu-trial-") as folder:
                Job(plan, rng, Path(folder), counts, patience_s).run()
            print(f"job {number}: {plan}; {counts.killed} kills, {counts.done['resizes']} resizes so far", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        for future in [pool.submit(work) for _ in range(at_once)]:
            future.result()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fault.trial", description="Kills and resizes jobs at random."
    )
    parser.add_argument("--kills", type=int, default=1000, help="processes to kill (default 1000)")
    parser.add_argument("--seed", type=int, help="of the jobs and the blows (default: random, printed)")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time (default 1)")
    parser.add_argument(
        "--patience", type=float, default=40.0, help="seconds without a step that are a hang (default 40)"
    )
    parser.add_argument("--hosts", type=int, default=1, help="hosts of a job (default 1)")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"--seed {seed}", flush=True)
    began = time.monotonic()
    counts = run(args.kills, seed, args.at_once, args.patience, args.hosts)
    for what, count in sorted(counts.done.items()):
        print(f"  {count:6} {what}")
    print(f"{len(counts.broken)} broken in {time.monotonic() - began:.0f} s, seed {seed}")
    return 1 if counts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
