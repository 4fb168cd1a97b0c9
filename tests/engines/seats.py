"""Takes away the head of jobs over three hosts whose seat is in an etcd of three members, or its host, or rank 0.

``python -m tests.engines.seats --count 20``: each kind so often, each in a job of its own with 6 workers that count
how often they have trained each sample (`tests/fault/programs/counting.py`). Training has to go on, no member to stand
still for longer than the lease and a second (in the gate: and half a minute), the ledger to be exact, and etcd to have
one history of versions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ms_kungfu.dataset import audit
from tests.engines.members import Etcd, why_not
from tests.multiprocess.launching import Program
from tests.ports import free_ports

COUNTING = Path(__file__).parents[1] / "fault" / "programs" / "counting.py"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SECRET = "0123456789abcdef" * 2
ELECTION_MS = 2500
LEASE_S = 3 * ELECTION_MS // 1000 + 1  # whole seconds, as etcd has them
NOW = struct.Struct("=qqdd")  # of the program: steps first
KINDS = ("agent", "host", "rank 0")
STEP_S = 0.05


class Watch:
    """How long each worker stands still at most, as its file tells."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.steps: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self.longest: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            for path in self._folder.glob("now.*"):
                pid, content = int(path.suffix[1:]), path.read_bytes()
                if len(content) == NOW.size and self.steps.get(pid) != NOW.unpack(content)[0]:
                    self._note(pid, NOW.unpack(content)[0])

    def _note(self, pid: int, step: int) -> None:
        now = time.monotonic()
        if pid in self.steps:
            self.longest[pid] = max(self.longest.get(pid, 0.0), now - self._since[pid])
        self.steps[pid], self._since[pid] = step, now

    def wait_for_steps(self, pids: set[int], more: int, timeout_s: float) -> None:
        """Each makes so many more."""
        wanted = {pid: self.steps.get(pid, 0) + more for pid in pids}
        deadline = time.monotonic() + timeout_s
        while late := {pid for pid in pids if self.steps.get(pid, 0) < wanted[pid]}:
            assert time.monotonic() < deadline, f"workers {late} stand still at {self.steps}"
            time.sleep(0.02)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class SeatedJob:
    """Two workers on each of `hosts`, of which the first has the seat. `flags`: more of them."""

    def __init__(
        self, etcd: Etcd, name: str, folder: Path, hosts: tuple[str, ...] = HOSTS, *flags: str, lease_s: int = LEASE_S
    ) -> None:
        folder.mkdir()
        self.etcd, self.name, self.folder, self.size = etcd, name, folder, 2 * len(hosts)
        self._lease_s = lease_s
        where = ["-H", ",".join(f"{host}:2" for host in hosts), "-port", free_ports(1)[0], "-np", self.size, *flags]
        how = ["-w", "-recover", "shrink", "-host-timeout", f"{lease_s}s", "-config-server", etcd.url(name)]
        self._words = [*where, *how, sys.executable, COUNTING, folder, STEP_S]
        self.runs = [self.begin(host) for host in hosts]
        self.watch = Watch(folder)

    def launch(self, *words: object) -> Program:
        return Program("ms_kungfu.launcher", words, self.folder, environment={"KUNGFU_JOB_SECRET": SECRET})

    def begin(self, host: str) -> Program:
        """As at the job's start."""
        return self.launch("-self", host, *self._words)

    def join(self, host: str) -> None:
        """One host more, with two workers, or one that comes back."""
        url = self.etcd.url(self.name)
        self.runs.append(self.launch("-join", url, "-self", f"{host}:2"))
        self.runs[-1].wait_for("this host takes part in the job", timeout=60)
        self.size += 2
        deadline = time.monotonic() + 60
        while (resize := self.launch("resize", str(self.size), "-config-server", url)).wait() != 0:
            assert time.monotonic() < deadline, resize.output  # the store hears of its slots in a moment

    def let_the_head_leave(self) -> set[int]:
        """By a SIGTERM. The workers that are left."""
        workers = self.wait_until_all_train()
        self.runs[0].signal(signal.SIGTERM)
        self.runs[0].assert_exit(0, 60)
        return set().union(*workers.values()) - workers[0]

    def workers(self) -> dict[int, set[int]]:
        """The process IDs of those that train, by the number of their host."""
        members = {int(path.suffix[1:]) for path in self.folder.glob("member.*")}
        return {number: members & run.processes() for number, run in enumerate(self.runs)}

    def wait_until_all_train(self) -> dict[int, set[int]]:
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob("member.*"))) < self.size:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        found = self.workers()
        self.watch.wait_for_steps(set().union(*found.values()), 5, 60)
        self.watch.longest.clear()
        return found

    @property
    def output(self) -> str:
        return "\n".join(f"--- {host}\n{run.output}" for host, run in zip(HOSTS, self.runs))

    def strike(self, kind: str) -> set[int]:
        """The workers that are left."""
        workers = self.wait_until_all_train()
        everybody, lost = set().union(*workers.values()), workers[0]
        if kind == "rank 0":
            lost = {min(workers[0], key=lambda pid: 'rank": 0' not in (self.folder / f"member.{pid}").read_text())}
            gone = list(lost)
        else:
            gone = [self.runs[0].process.pid, *(self.runs[0].processes() if kind == "host" else ())]
        for pid in gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return everybody - lost

    def judge(self, kind: str, left: set[int], slack_s: float = 30.0) -> float:
        """AssertionError where a promise is broken. The longest that a member stood still."""
        self.watch.wait_for_steps(left, 20, self._lease_s + 60)
        longest = max(self.watch.longest[pid] for pid in left)
        (self.folder / "stop").touch()
        for run in self.runs[0 if kind == "rank 0" else 1 :]:
            run.assert_exit(0, 60)
        told = [*self.folder.glob("wrong.*"), *self.folder.glob("failed.*")]
        assert not told, "\n".join(f"{path.name}: {path.read_text()}" for path in told) + self.output
        ended = {int(path.suffix[1:]) for path in self.folder.glob("end.*")}
        assert ended == left, f"{ended} have ended well, and {left} were to\n{self.output}"
        found = audit.audit(*audit.read(self.folder / "ledger"))
        assert found.exact, audit.to_text(found)
        self._check_history()
        assert longest <= self._lease_s + slack_s, f"a member stood still for {longest:.2f} s\n{self.output}"
        return longest

    def _check_history(self) -> None:
        """Of etcd's own revisions: versions without a gap or a fork."""
        history = self.etcd.history(self.name)
        assert [each["nth"] for each in history] == list(range(1, len(history) + 1))
        assert [each["Version"] for each in history] == list(range(len(history))), history
        heads = self.etcd.history(self.name, "head")
        chosen = [each["versions"]["chosen"] for each in heads if each["versions"]["chosen"] is not None]
        assert chosen == sorted(chosen), chosen
        assert len({each["job"] for each in heads}) == 1
        assert heads[-1]["end"][0] == 0

    def end(self) -> None:
        self.watch.end()
        for run in self.runs:
            run.kill_all()


def strike(etcd: Etcd, name: str, folder: Path, kind: str, wait_s: float = 0.0, slack_s: float = 30.0) -> float:
    """One job, and what was taken from it. The longest that a member stood still."""
    job = SeatedJob(etcd, name, folder)
    try:
        job.wait_until_all_train()
        time.sleep(wait_s)
        return job.judge(kind, job.strike(kind), slack_s)
    finally:
        job.end()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.seats", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    if why_not() is not None:
        raise SystemExit(str(why_not()))
    rng, failures = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as kept:
        etcd = Etcd(Path(kept) / "etcd", election_ms=ELECTION_MS)
        try:
            for number in range(args.count):
                for kind in args.kinds:
                    name = f"{kind.replace(' ', '')}{number}"
                    result: Any = None
                    try:
                        result = f"{strike(etcd, name, Path(kept) / name, kind, rng.random(), 1.0):.2f} s"
                    except AssertionError as error:
                        failures += 1
                        result = f"FAILED: {error}"
                    print(f"{kind} {number}: {result}", flush=True)
        finally:
            etcd.close()
    print(f"{args.count} of each of {', '.join(args.kinds)}; lease {LEASE_S} s; {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
