"""Execute a run: start a system, kill its workers by the schedule, and collect the results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.churn import workloads
from benchmarks.churn.measure import Observed, numbers
from benchmarks.churn.schedule import Event, events, victim
from benchmarks.churn.shim import descendants
from benchmarks.churn.systems import SYSTEMS
from benchmarks.churn.systems.base import ROOT, Command, NotApplicable, System
from benchmarks.churn.worker import Plan, read_steps

_WARM_STEPS = 20
_START_S, _WHOLE_S, _END_S, _EXIT_S = 180.0, 60.0, 120.0, 15.0
_LOOK_EVERY_S = 2.0
_HOSTS = 2


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    system: str
    workload: str
    scenario: str
    every: float
    seconds: float
    seed: int
    workers: int = 4
    checkpoint_every: int = 100
    switches: tuple[str, ...] = ()
    """The parts of ms_kungfu that are switched off, see :mod:`.cost`."""


class Failed(Exception):
    """A run didn't start. The message contains the end of its log."""


class _Job:
    """The processes of a run."""

    def __init__(self, folder: Path, hosts: Any) -> None:
        self.folder, self._hosts = folder, hosts
        self._shim = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.churn.shim", str(folder)], stdin=subprocess.PIPE, text=True, cwd=ROOT,
            start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.memory: list[int] = []
        self._used: dict[tuple[int, str], tuple[float, bool]] = {}
        self._started: set[str] = set()

    def _tell(self, **words: Any) -> None:
        assert self._shim.stdin is not None
        self._shim.stdin.write(json.dumps(words) + "\n")
        self._shim.stdin.flush()

    def start(self, command: Command) -> None:
        if not command.serves:
            self._started.add(command.name)
        within: list[str] = []
        if self._hosts:
            host = self._hosts[command.host]
            # Programs send their host's name to each other, but no server resolves it. So a host's name is its address.
            within = [*host.within(), "sh", "-c", 'hostname "$0" && exec "$@"', host.address]
        self._tell(start=command.name, argv=[*within, *command.argv], env=command.env, again=command.again)

    def signal(self, name: str, number: int) -> None:
        self._tell(signal=name, number=number)

    def workers(self) -> list[int]:
        """Return the living workers in the order of their start. A spare process counts after its first step."""
        steps = (path for path in (self.folder / "steps").glob("*.rows") if path.stat().st_size)
        named = {int(path.stem): path.stat().st_ctime for path in steps}
        for path in (self.folder / "workers").glob("*"):
            named[int(path.name)] = path.stat().st_mtime
        return [pid for pid in sorted(named, key=lambda pid: (named[pid], pid)) if _lives(pid)]

    def stepped(self, count: int, steps: int, since: float = 0.0) -> bool:
        """Return whether `count` living workers have each done `steps` steps since the time `since`."""
        done = [pid for pid, rows in read_steps(self.folder) if sum(at >= since for at, _ in rows) >= steps]
        return len([pid for pid in done if _lives(pid)]) >= count

    def over(self) -> bool:
        """Return whether all commands, and so the job, have ended."""
        exits = self.folder / "exits.jsonl"
        lines = exits.read_text().splitlines() if exits.exists() else []
        return self._started <= {json.loads(line)["name"] for line in lines}

    def ended(self) -> bool:
        """Return whether workers have completed, and no other worker remains."""
        ends = {int(path.stem) for path in (self.folder / "ends").glob("*.json")}
        return bool(ends) and ends.issuperset(self.workers())

    def look(self) -> None:
        """Record the memory and the processor time of all processes.

        The shim can't learn the processor time of a process whose parent ignores SIGCHLD, as Ray's raylet does.
        """
        total = 0
        for pid in descendants(self._shim.pid):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += sum(int(kib) for kib in re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)) * 1024
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                parent = Path(f"/proc/{fields[1]}/status").read_text()
                ignored = int(parent.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGCHLD - 1) & 1
                used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                self._used[pid, fields[19]] = used, bool(ignored)
        self.memory.append(total)

    def seen_s(self, uncollected: bool) -> float:
        """Return the recorded processor time of all processes, or only of those whose time the shim can't learn."""
        return sum(used for used, ignored in self._used.values() if ignored or not uncollected)

    def close(self) -> None:
        assert self._shim.stdin is not None
        self._shim.stdin.close()
        self._shim.wait(60)

    def log(self) -> str:
        said = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log")]
        return "\n".join(said)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _act(event: Event, system: System, plan: Plan, job: _Job, hosts: Any) -> bool:
    """Execute an event. Return whether it killed a worker or a host, or requested a resize."""
    if event.action == "resize":
        commands, signals = system.resize(plan, job.folder, event.size)
        for name, number in signals:
            job.signal(name, number)
        for command in commands:
            job.start(command)
        return True
    if event.action == "host":
        hosts[-1].signal(signal.SIGKILL)
        return True
    if event.action == "host-back":
        for command in system.host_commands(plan, job.folder, len(hosts) - 1):
            job.start(command)
        return False
    living = job.workers()
    if not living:
        return False  # all workers are still starting
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim(living, event.draw), signal.SIGKILL)
        return True
    return False


@contextlib.contextmanager
def _network(run: Run) -> Iterator[Any]:
    if run.scenario != "host":
        yield None
        return
    from tests.hosts.namespaces import Network

    with Network(_HOSTS) as network:
        yield network.hosts


@contextlib.contextmanager
def _watched(job: _Job) -> Iterator[None]:
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_EVERY_S):
            job.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def carry_out(run: Run, python: str, keep: Path | None = None) -> dict[str, Any]:
    """Execute a run and return its numbers.

    Args:
        python: the interpreter of the other systems.
        keep: a folder to which the run's files are copied.

    Raises:
        Failed: the workers don't start.
        NotApplicable: the system can't do the run.
    """
    system = SYSTEMS[run.system]
    with tempfile.TemporaryDirectory(prefix="churn-", ignore_cleanup_errors=True) as name, _network(run) as hosts:
        folder = Path(name)
        plan = Plan(
            name, run.workload, run.workers, run.checkpoint_every, python,
            tuple(host.address for host in hosts or ()), run.switches, elastic=run.scenario == "resize",
            shards=run.workers if system.shards else None,
        )  # fmt: skip
        plan.write()
        workloads.write(run.workload, folder)
        commands = system.commands(plan, folder)
        if run.scenario == "resize":
            system.resize(plan, folder, 2)  # NotApplicable before anything is started
        job = _Job(folder, hosts)
        try:
            observed = _watch(run, system, plan, job, hosts, commands)
        finally:
            job.close()
            if keep is not None:
                shutil.copytree(
                    folder,
                    keep,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("sockets", "session_latest", "*.status"),
                )
        return numbers(folder, observed)


def _watch(
    run: Run, system: System, plan: Plan, job: _Job, hosts: Any, commands: list[Command]
) -> Observed:  # fmt: skip
    for command in commands:
        job.start(command)
    limit = time.monotonic() + _START_S
    while not job.stepped(run.workers, _WARM_STEPS):
        if time.monotonic() > limit or job.over():
            raise Failed(f"{run.workers} workers haven't done {_WARM_STEPS} steps in {_START_S:.0f} s\n{job.log()}")
        time.sleep(0.05)
    begin = time.monotonic()
    lost: list[float] = []
    with _watched(job):
        for event in events(run.scenario, run.every, run.seconds, run.seed):
            time.sleep(max(0.0, begin + event.at - time.monotonic()))
            now = time.monotonic()
            if _act(event, system, plan, job, hosts):
                lost.append(now)
        time.sleep(max(0.0, begin + run.seconds - time.monotonic()))
        end = time.monotonic()
    # Wait until replacements have joined before the end, so that all workers' weights can be compared.
    while not job.stepped(run.workers, 1, end) and not job.over() and time.monotonic() < end + _WHOLE_S:
        time.sleep(0.1)
    (job.folder / "stop").touch()
    limit = time.monotonic() + _END_S
    while not (finished := job.ended()) and not job.over() and time.monotonic() < limit:
        time.sleep(0.1)
    limit = time.monotonic() + _EXIT_S
    while finished and not job.over() and time.monotonic() < limit:
        time.sleep(0.1)
    return Observed(
        begin,
        end,
        tuple(lost),
        finished,
        tuple(job.memory),
        job.seen_s(uncollected=True),
        job.seen_s(uncollected=False),
    )


__all__ = ["Failed", "NotApplicable", "Run", "carry_out"]
