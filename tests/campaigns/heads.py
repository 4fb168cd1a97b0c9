"""Takes away the head of jobs over three hosts whose lease is in an etcd of three members, or its host, or rank 0.

Each kind so often, each in a job of its own with 6 workers that count how often they have trained each sample
(`programs/counting.py`). Training has to go on, no member to stand still for longer than the lease and a second (in the
gate: and half a minute), and etcd to have one history of versions.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.pauses_worker import read_steps
from tests.campaigns.driver import Campaign, folder, rng_of
from tests.campaigns.jobs import PROGRAMS, Job, kill
from tests.engines.members import Etcd, why_not
from tests.hosts.jobs import Loopback

HOSTS = 3
ELECTION_MS = 2500
LEASE_S = 3 * ELECTION_MS // 1000 + 1  # whole seconds, as etcd has them
KINDS = ("agent", "host", "rank 0")
STEP_S = 0.05


class ElectedJob(Job):
    """Two workers on each host, of which the first has the lease; `begun`: hosts that begin. `flags`: more of them."""

    def __init__(
        self, etcd: Etcd, name: str, at: Path, *flags: str, begun: int = HOSTS, lease_s: int = LEASE_S
    ) -> None:
        at.mkdir(exist_ok=True)
        self.etcd, self.name, self.size, self._lease_s = etcd, name, 2 * begun, lease_s
        super().__init__(
            Loopback(HOSTS, begun), at, self.size, "-recover", "shrink", "-host-timeout", f"{lease_s}s", *flags,
            program=PROGRAMS / "counting.py", words=[STEP_S], url=etcd.url(name),
        )  # fmt: skip

    def join(self, number: int, *flags: object) -> None:
        super().join(number, *flags)
        self.launchers[number].wait_for("host registered: head_node=", timeout=60)
        self.size += 2
        self.resize(self.size, by=number)

    def let_the_head_leave(self) -> set[int]:
        """By a SIGTERM. The workers that are left."""
        workers = self.wait_until_all_train()
        self.launchers[0].signal(signal.SIGTERM)
        self.launchers[0].assert_exit(0, 60)
        return set().union(*workers.values()) - workers[0]

    def wait_until_all_train(self) -> dict[int, set[int]]:
        """The process IDs of those that train, by the number of their host."""
        deadline = time.monotonic() + 120
        while len(self.told("member")) < self.size:
            assert time.monotonic() < deadline, self.over.output
            time.sleep(0.05)
        members = self.told("member").keys()
        found = {number: members & self.processes(number) for number in range(len(self.launchers))}
        self.await_more_steps(set().union(*found.values()), 5, 60)
        self._since = time.monotonic()
        return found

    def strike(self, kind: str) -> set[int]:
        """The workers that are left."""
        workers = self.wait_until_all_train()
        lost = workers[0]
        if kind == "rank 0":
            members = self.told("member")
            lost = {min(workers[0], key=lambda pid: members[pid]["rank"])}
            gone = list(lost)
        else:
            head = self.launchers[0]
            gone = [head.process.pid, *(head.processes() if kind == "host" else ())]
        self.lost.update(dict.fromkeys(lost, time.monotonic()))
        for pid in gone:
            kill(pid)
        return set().union(*workers.values()) - lost

    def judge(self, kind: str, left: set[int], slack_s: float = 30.0) -> float:
        """AssertionError where a promise is broken. The longest that a member stood still."""
        self.await_more_steps(left, 20, self._lease_s + 60)
        ends = {pid: [end for *_, end in rows if end > self._since] for pid, rows in read_steps(self.folder)}
        longest = max(after - before for pid in left for before, after in zip(ends[pid], ends[pid][1:]))
        self.finish(range(0 if kind == "rank 0" else 1, len(self.launchers)))
        ended = self.told("end").keys()
        assert ended == left, f"{ended} have ended well, and {left} were to\n{self.over.output}"
        self._check_history()
        assert longest <= self._lease_s + slack_s, f"a member stood still for {longest:.2f} s\n{self.over.output}"
        return longest

    def _check_history(self) -> None:
        """Of etcd's own revisions: versions without a gap or a fork."""
        history = self.etcd.history(self.name)
        assert [each["nth"] for each in history] == list(range(1, len(history) + 1))
        assert [each["Version"] for each in history] == list(range(len(history))), history
        heads = self.etcd.history(self.name, "head")
        committed = [each["versions"]["chosen"] for each in heads if each["versions"]["chosen"] is not None]
        assert committed == sorted(committed), committed
        assert len({each["job"] for each in heads}) == 1
        assert heads[-1]["end"][0] == 0


class Heads(Campaign):
    """Kills the head's launcher, its host, and rank 0, each in a job of its own; needs etcd."""

    struck = "of each of agent, host, rank 0"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._kept = tempfile.TemporaryDirectory(prefix="kungfu-etcd-")
        self._etcd = Etcd(Path(self._kept.name), election_ms=ELECTION_MS)

    def why_not(self) -> str | None:
        return why_not()

    def try_job(self, number: int, seed: int, left: int) -> None:
        rng = rng_of(seed, number)
        for kind in KINDS:
            with folder() as at:
                job = ElectedJob(self._etcd, f"{kind.replace(' ', '')}{number}", at)
                with self.tally.judging(job, kind):
                    job.wait_until_all_train()
                    time.sleep(rng.random())
                    longest = job.judge(kind, job.strike(kind), slack_s=1.0)
                    print(f"{kind} {number}: {longest:.2f} s of a lease of {LEASE_S} s", flush=True)
        self.tally.struck += 1

    def close(self) -> None:
        self._etcd.close()
        self._kept.cleanup()
