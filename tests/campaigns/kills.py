"""Kills at random, resizes at random, and every sample counted.

Jobs run under ``kungfu-run -w`` until so many of their processes were killed by SIGKILL: workers, rank 0 too, several
at once, newcomers and standbys while they start, and all of them now and then in the midst of a checkpoint, an
evaluation or a change. Meanwhile sizes from 1 to 8 are asked for, several in a row without waiting for the first. Half
of the jobs run with ``-recover replace``, half with ``shrink``; steps take from 2 ms to a quarter of a second.
With several hosts, which addresses of the loopback play, each has a launcher of its own, and now and then one of these
is killed, but for the first's: its workers are lost with it.

The workers (`programs/counting.py`) have one weight a sample, which counts how often it was trained, so that exactly
once can be read from the weights: after E epochs all are E. What has to hold besides what `Job.finish` looks at:

- no job is lost while a worker lives that has the state, and none ends before it is asked to;
- nothing hangs: within `--patience` seconds some worker ends a step.

A job may be lost where the trial killed the only worker that a change had just left over: whether the others had gone
before or might have stayed can't be told from outside if that was within `_AT_ONCE_S`. These are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import open_store
from ms_kungfu.errors import KungFuError
from tests.campaigns.driver import Campaign, Tally, folder, rng_of
from tests.campaigns.jobs import FINISH_S, PROGRAMS, BrokenError, Job, kill, workers_of
from tests.hosts.jobs import SECRET, Loopback, Machine

SIZES = range(1, 9)
_SLOTS = 20  # of a host
_LOSES_HOST = 0.06
_STEPS_S = (0.002, 0.002, 0.01, 0.05, 0.25)
_SLOW_S = 0.05  # steps from here on leave time to strike between a wish and the agreement on it
_AT_ONCE_S = 0.1
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
    return Plan(size, recover, standbys, step_s, kills, every_s, hosts)


class Trial:
    """A job, and what is done to it."""

    def __init__(
        self, plan: Plan, rng: random.Random, tally: Tally, patience_s: float, at: Path,
        program: Path = PROGRAMS / "counting.py",
    ) -> None:  # fmt: skip
        self.plan, self.rng, self.tally, self.patience_s = plan, rng, tally, patience_s
        flags = ["-recover", plan.recover, "-standby", plan.standbys]
        if plan.recover == "replace" or plan.standbys:
            flags += ["-max-restarts", 10**6]
        limits = dict.fromkeys(("KUNGFU_JOIN_TIMEOUT", "KUNGFU_COLLECTIVE_TIMEOUT"), f"{3 * patience_s:g}")
        self.job = Job(
            Machine() if plan.hosts == 1 else Loopback(plan.hosts), at, plan.size, *flags,
            program=program, words=[plan.step_s], environment=limits, slots=_SLOTS,
        )  # fmt: skip
        self.hosts = list(range(plan.hosts))  # that aren't lost
        self.wishes: list[tuple[PeerID, ...]] = []  # of workers, since the cluster was last as it was wished for
        self.furthest, self.progress_at = -1, time.monotonic()

    def run(self) -> None:
        job = self.job
        url = job.launchers[0].wait_for(r"config server: url=(http\S+)", timeout=self.patience_s)[0][1]
        self.store = open_store(url, SECRET, timeout_s=self.patience_s)
        killed = 0
        following, waits = time.monotonic(), False
        while killed < self.plan.kills and self.goes_on():
            late = time.monotonic() - following
            if late >= 0 and (not waits or late > _SETTLE_S or self.is_settled()):
                killed += (now := self.strike())
                self.tally.struck += now
                following = time.monotonic() + self.plan.every_s * self.rng.uniform(0.2, 1.8)
                waits = self.rng.random() < _WAITS  # else the cluster would hardly ever grow
            time.sleep(_POLL_S)
        if job.process.poll() is not None:
            return self.look_at_the_loss()
        job.stop()
        deadline = time.monotonic() + FINISH_S
        while self.goes_on():
            assert time.monotonic() < deadline, f"hang: did not finish within {FINISH_S:g} s"
            time.sleep(_POLL_S)
        job.finish(self.hosts)
        self.tally.done["jobs finished"] += 1
        epochs = [line["epochs"] for line in job.told("end").values()]
        self.tally.done["epochs, each sample once"] += max(epochs)
        return None

    def goes_on(self) -> bool:
        """Whether the job runs; BrokenError where it hangs."""
        if self.job.process.poll() is not None:
            return False
        furthest = max(map(self.job.steps, self.job.holders()), default=-1)
        if furthest > self.furthest:
            self.furthest, self.progress_at = furthest, time.monotonic()
        if time.monotonic() - self.progress_at > self.patience_s:
            raise BrokenError(f"hang: no step ended within {self.patience_s:g} s, the last was {self.furthest}")
        return True

    # ---- what is done to it ----

    def strike(self) -> int:
        """Kills some processes, or asks for other sizes; how many were killed."""
        holders, kind = self.job.holders(), self.rng.random()
        if not holders:
            return 0  # it starts
        if kind < 0.35:
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                self.resize()
                if self.rng.random() < 0.5:
                    time.sleep(self.rng.uniform(0, 4 * self.plan.step_s))
            if self.rng.random() < 0.5:
                return 0
            holders = self.job.holders()
        if len(self.hosts) > 1 and self.rng.random() < _LOSES_HOST:
            return self.lose_host(holders)
        processes = set().union(*map(self.job.processes, self.hosts))
        newcomers = sorted(processes - self.job.told("member").keys() - self.job.told("left").keys())
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
            members = self.job.told("member")
            victims = [min(able, key=lambda pid: members[pid]["time"])]  # rank 0, or the next one
        else:
            victims = [self.rng.choice(able)]
        return self.kill(victims, "several at once" if len(victims) > 1 else "members killed")

    def kill(self, pids: Iterable[int], what: str) -> int:
        self.job.kill(pids := [*pids])
        self.tally.done[what] += len(pids)
        return len(pids)

    def lose_host(self, holders: list[int]) -> int:
        """Kills a launcher if a worker that is to live is on another host."""
        host, spared = self.rng.choice(self.hosts[1:]), self.spared(holders)
        there = self.job.processes(host)
        if spared in there or not set(holders) - there:
            return 0
        self.hosts.remove(host)
        launcher = self.job.launchers[host]
        launcher.signal(signal.SIGSTOP)  # it starts no worker any more
        there |= workers_of(launcher) - self.job.lost.keys()
        self.job.lost.update(dict.fromkeys(there, kill(launcher.process.pid)))
        self.tally.done["hosts lost"] += 1
        self.tally.done["lost hosts' workers"] += len(there)
        return len(there)

    def spared(self, holders: list[int]) -> int | None:
        """If steps are short, the workers in all requested clusters: it can't be seen from outside whether the others
        have left already. None: all workers but one."""
        if not holders:
            return None
        wanted, versions = self.wanted(), self.job.versions()
        if wanted is None:
            return holders[0]
        if all(versions[pid] == wanted.version for pid in holders):
            self.wishes.clear()
            return None
        if self.plan.step_s >= _SLOW_S:
            return None
        # Of one that has joined lately the launcher's name isn't known here, but its port is in its environment.
        named = {pid: _name_of(pid) for pid in holders}
        in_all = [p for p in holders if all(named[p] in map(str, wish) for wish in [*self.wishes, wanted.workers])]
        return in_all[0] if in_all else holders[0]

    def wanted(self) -> Cluster | None:
        """The newest cluster that was asked for; None if no server answers."""
        with contextlib.suppress(KungFuError, OSError):
            return self.store.get()
        return None

    def is_settled(self) -> bool:
        """Whether the cluster is what was asked for."""
        holders, wanted, versions = self.job.holders(), self.wanted(), self.job.versions()
        return wanted is not None and [versions[pid] for pid in holders] == [wanted.version] * wanted.size

    def resize(self, size: int | None = None) -> None:
        """As ``kungfu-run resize`` does: a compare-and-swap of the wanted cluster."""
        size = size or self.rng.choice(SIZES)
        wanted = self.wanted()
        if wanted is None:  # the server of a job that has just ended
            return
        workers = list(wanted.workers)
        if len(workers) > size and self.plan.step_s >= _SLOW_S and self.rng.random() < 0.3:
            workers = [workers[place] for place in sorted(self.rng.sample(range(len(workers)), size))]
        addresses = [self.job.network.hosts[number].address for number in self.hosts]
        places = [PeerID(address, 10000 + slot) for address in addresses for slot in range(_SLOTS)]
        free = iter(sorted(set(places) - set(workers), key=lambda _: self.rng.random()))
        workers = workers[:size] + [next(free) for _ in range(size - len(workers))]
        with contextlib.suppress(KungFuError, OSError):  # another writer was faster, or the server says no
            self.store.put(replace(wanted, workers=tuple(workers), version=wanted.version + 1))
            self.wishes.append(tuple(workers))
            self.tally.done["resizes"] += 1

    # ---- what came of it ----

    def look_at_the_loss(self) -> None:
        """It ended before it was asked to."""
        job = self.job
        code = job.launchers[0].wait()
        left, failed, members = job.told("left"), job.told("failed"), job.told("member")
        last_kill = max((when for pid, when in job.lost.items() if pid in members), default=0.0)
        healthy = [pid for pid in members if pid not in {*job.lost, *left, *failed}]
        late = {pid: line for pid, line in {**left, **failed}.items() if pid in members and line["time"] > last_kill}
        if not members:
            raise BrokenError(f"lost: the job ended with {code} before anybody had trained")
        if healthy or failed.keys() - job.lost.keys() - left.keys():
            raise BrokenError(f"lost: the job ended with {code} while {healthy or 'workers'} lived: {failed}")
        if any(line.get("asked", 0.0) > last_kill + _AT_ONCE_S for line in late.values()):
            raise BrokenError(f"lost: the job ended with {code} though {sorted(late)} had the state and lived")
        self.tally.done["jobs whose only worker was killed at once with a change"] += 1


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.partition("=")[::2] for entry in content.split("\0")).get("KUNGFU_SELF", "")
    return ""


class Kills(Campaign):
    """Kills and resizes jobs on one host at random."""

    HOSTS = 1

    @classmethod
    def options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--patience", type=float, default=40.0, help="seconds without a step that are a hang (default 40)"
        )

    def try_job(self, number: int, seed: int, left: int) -> None:
        rng = rng_of(seed, number)
        plan = plan_of(rng, left, self.HOSTS)
        print(plan, flush=True)
        with folder() as at:
            trial = Trial(plan, rng, self.tally, self.args.patience, at)
            with self.tally.judging(trial.job, plan):
                trial.run()


class KillsOnHosts(Kills):
    """Kills and resizes jobs at random whose launchers play four hosts, and kills launchers."""

    HOSTS = 4
