"""Kill and resize a user's job while it runs, and report whether it survives: ``python -m ms_kungfu.chaos``.

The job runs under ``kungfu-run -w -recover replace``. Every few seconds, this tool kills a random worker with SIGKILL,
or resizes the cluster to a random size. It never kills the last worker that is known to have the training state. After
``-for`` seconds, the tool lets the job finish. Then it checks:

- that the program uses ms_kungfu, and that the cluster has changed,
- that the job finished with exit status 0,
- that the ledger is exact (``python -m ms_kungfu.dataset.audit``), if the program writes a ledger. The tool sets
  KUNGFU_LEDGER_DIR for this purpose,
- that all workers ended with the same parameters, if each worker prints a line ``parameters CHECKSUM``,
- that the launcher and long-lived workers don't use ever more descriptors, shared-memory mappings or memory,
- that none of the job's processes and files in /dev/shm remain.

The exit status is 0 if there are no problems, 1 if there are problems, which the output names, and 2 if the command
line is invalid.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from ms_kungfu._processes import children, descendants, end_launcher, ended_by_signals, is_fork_server, stat_of

_MEMORY_SLACK = 1.3  # from the first to the second half of a process's samples, memory may grow by this factor
_MEMORY_SLACK_BYTES = 64 << 20
_FD_SLACK = 4
_PERIOD_S = 0.5
_START_S = 20.0  # a worker may need this time to import and compile; its growth in this time isn't checked
_JUDGED_S = 20.0  # a process is checked only if it has been sampled for this time after its start
_SHM = "/dev/shm"
_KILLS = 0.7  # the fraction of actions that are kills; the other actions are resizes


@dataclass(frozen=True)
class Sample:
    """The resources that a process uses at one time."""

    memory_bytes: int
    descriptors: int
    shared_mappings: int


def leaks(samples: Sequence[Sample], typical: Callable[[Iterable[int]], float] = max) -> list[str]:
    """Return messages about a process's growth from the first half of its samples to the second half.

    Memory is compared by its maximum in each half. Descriptors and mappings are compared by the function `typical`.
    """
    half = len(samples) // 2
    if half < 3:
        return []
    early, late = samples[:half], samples[half:]
    found = []
    memory = [max(s.memory_bytes for s in part) for part in (early, late)]
    if memory[1] > memory[0] * _MEMORY_SLACK + _MEMORY_SLACK_BYTES:
        found.append(f"memory grew from {memory[0] >> 20} to {memory[1] >> 20} MiB")
    for what in ("descriptors", "shared_mappings"):
        most = [typical(getattr(s, what) for s in part) for part in (early, late)]
        if most[1] > most[0] + _FD_SLACK:
            found.append(f"{what.replace('_', ' ')} grew from {most[0]:g} to {most[1]:g}")
    return found


def settled(samples: Sequence[Sample], start_s: float) -> Sequence[Sample]:
    """Return the samples after the first `start_s` seconds of a process; an empty list if there are too few."""
    later = samples[int(start_s / _PERIOD_S) :]
    return later if len(later) * _PERIOD_S >= _JUDGED_S else []


def launcher_leaks(samples: Sequence[tuple[int, Sample]]) -> list[str]:
    """Return messages about the launcher's growth. `samples`: pairs of the number of workers and a sample.

    The launcher's resources depend on the number of workers, so only samples with the same number are compared. While
    workers are joining and leaving, the launcher briefly needs more resources, so medians are compared.
    """
    found = []
    for size in sorted({size for size, _ in samples}):
        alike = settled([sample for workers, sample in samples if workers == size], 0.0)
        found += [f"with {size} workers, {text}" for text in leaks(alike, statistics.median)]
    return found


def sample(pid: int) -> Sample | None:
    """Return a sample of a process; None if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        maps = Path(f"/proc/{pid}/maps").read_text()
        found = re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)
        if found is None:
            return None
        return Sample(int(found[1]) << 10, len(os.listdir(f"/proc/{pid}/fd")), maps.count("/memfd:kungfu"))
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return a process's start time; None if the process has ended, even if it is still a zombie.

    ID and start time together identify a process, because the system reuses IDs.
    """
    with contextlib.suppress(OSError):
        fields = stat_of(pid)
        return None if fields[0] in "ZX" else fields[19]
    return None


def _shm_files(pid: int) -> set[str]:
    """Return the names of the files in /dev/shm that a process has mapped or opened."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found |= set(re.findall(rf" {_SHM}/([^\s/]+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                folder, _, name = os.readlink(entry).rpartition("/")
                if folder == _SHM:
                    found.add(name)
    return found


class _Job:
    """A job that runs under kungfu-run, with its output and its workers."""

    def __init__(self, arguments: Sequence[str], ledger: Path) -> None:
        flags = ["-w", "-recover", "replace", "-max-restarts", "1000000"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ms_kungfu.launcher", *flags, *arguments],
            env={"KUNGFU_LEDGER_DIR": str(ledger), **os.environ},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        self.url = ""
        self.checksums: list[str] = []
        self.members: set[int] = set()  # the processes that are known to have been in the cluster
        self.has_changed = False  # whether the launcher has got a request for another cluster version
        self.has_followed = False  # whether the workers have adopted another cluster version
        self.samples: dict[int, list[Sample]] = {}
        self.launcher: list[tuple[int, Sample]] = []  # (number of workers, sample)
        self._processes: set[tuple[int, str]] = set()  # (process ID, start time)
        self._shm_before = {*os.listdir(_SHM)}
        self._shm_used: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"config server: url=(http\S+)", line):
                self.url = found[1]
            elif found := re.search(r"\bparameters ([0-9a-f]{8,})\s*$", line):
                self.checksums.append(found[1])
            elif re.search(r"cluster desired: version=\d+", line):
                self.has_changed = True
            elif found := re.search(r"cluster committed: version=(\d+) workers=(\d+)", line):
                self.has_followed = self.has_followed or int(found[1]) > 0
                self._note(int(found[2]))

    def _note(self, size: int) -> None:
        # If the cluster has as many workers as there are processes, all processes are in the cluster.
        workers = self.workers()
        if len(workers) == size:
            self.members |= set(workers)

    def workers(self) -> list[int]:
        supervisors = children(self.process.pid)
        return [pid for supervisor in supervisors for pid in children(supervisor) if not is_fork_server(pid)]

    def look(self) -> None:
        workers = self.workers()
        if not self.has_changed:
            self.members |= set(workers)  # the workers of the first cluster
        own = sample(self.process.pid)
        if own is not None:
            self.launcher.append((len(workers), own))
        for pid in workers:
            found = sample(pid)
            if found is not None:
                self.samples.setdefault(pid, []).append(found)
        family = [self.process.pid, *descendants(self.process.pid)]
        self._processes |= {(pid, started) for pid in family if (started := _started(pid)) is not None}
        for pid in family:
            self._shm_used |= _shm_files(pid)

    def left(self) -> list[str]:
        """Return the processes and files that remain after the job has ended."""
        files = ({*os.listdir(_SHM)} - self._shm_before) & self._shm_used
        running = sorted(pid for pid, started in self._processes if _started(pid) == started)
        return [f"process {pid} remains" for pid in running] + [f"{_SHM}/{name} remains" for name in sorted(files)]

    def wait(self, timeout: float) -> int | None:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(10)
        return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ms_kungfu.chaos",
        description="Kills and resizes a job while it runs, and checks that it continues without errors.",
        epilog="Give kungfu-run's flags and the program after --: python -m ms_kungfu.chaos -- -np 2 python train.py",
    )
    parser.add_argument("-seed", type=int, help="seed of the random actions (default: random, printed)")
    parser.add_argument("-every", type=float, default=5.0, metavar="S", help="average time between actions (default 5)")
    parser.add_argument(
        "-for", dest="duration", type=float, default=120.0, metavar="S", help="duration of the actions (default 120)"
    )
    parser.add_argument("-resize", default="1:4", metavar="A:B", help="range of sizes for resizes (default 1:4)")
    parser.add_argument(
        "-finish",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit for the job to finish afterwards (default 600)",
    )
    parser.add_argument("command", nargs="+", metavar="-- [kungfu-run flags] program")
    args = parser.parse_args(arguments)
    low, _, high = args.resize.partition(":")
    if not (args.resize.isascii() and low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        parser.error(f"-resize {args.resize} is not A:B with 1 <= A <= B")
    if args.every <= 0 or args.duration <= 0:
        parser.error(f"-every {args.every:g} -for {args.duration:g}: both must be positive numbers of seconds")
    args.sizes = range(int(low), int(high) + 1)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"chaos: -seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kungfu-chaos-") as folder:
        ledger = Path(os.environ.get("KUNGFU_LEDGER_DIR") or folder)
        with ended_by_signals():
            job = _Job(args.command, ledger)
            try:
                done = _disturb(job, random.Random(seed), args.every, args.duration, args.sizes)
                code = _finish(job, args.finish)
            finally:
                end_launcher(job.process)
        wrong, is_audited = _check(job, code, ledger)
    print(f"chaos: {done['kills']} kills, {done['resizes']} resizes, seed {seed}")
    for text in wrong:
        print(f"chaos: WRONG: {text}")
    well = "no problems" if is_audited else "no problems, but lost samples can't be detected without a ledger"
    print(f"chaos: {well}" if not wrong else "chaos: there are problems")
    return 1 if wrong else 0


def _disturb(job: _Job, rng: random.Random, every: float, duration: float, sizes: range) -> dict[str, int]:
    done = {"kills": 0, "resizes": 0}
    end = time.monotonic() + duration
    following = time.monotonic() + every
    while time.monotonic() < end and job.wait(_PERIOD_S) is None:
        job.look()
        if time.monotonic() < following or not job.url:
            continue
        following = time.monotonic() + every * rng.uniform(0.5, 1.5)
        if rng.random() < _KILLS:
            workers = job.workers()
            victim = rng.choice(sorted(workers)) if workers else None
            if victim is not None and (job.members & set(workers)) - {victim}:
                print(f"chaos: kill -9 {victim}", flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                done["kills"] += 1
        else:
            size = rng.choice(sizes)
            print(f"chaos: resize {size}", flush=True)
            subprocess.run(
                [sys.executable, "-m", "ms_kungfu.launcher", "resize", str(size), "-config-server", job.url],
                stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            done["resizes"] += 1
    return done


def _finish(job: _Job, limit_s: float) -> int | None:
    print("chaos: no more actions; waiting for the job to finish", flush=True)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        code = job.wait(_PERIOD_S)
        if code is not None:
            return code
        job.look()
    return None


def _check(job: _Job, code: int | None, ledger: Path) -> tuple[list[str], bool]:
    """Return the problems of the job, and whether there was a ledger to check."""
    from ms_kungfu.dataset import audit

    wrong = []
    if not job.has_changed:
        wrong.append("the job ended before any action, so nothing was tested; train for longer, or decrease -every")
    elif not job.has_followed:
        wrong.append("no worker followed a change of the cluster; the program must use ms_kungfu for training")
    if code is None:
        wrong.append("the job did not finish")
    elif code != 0:
        wrong.append(f"the job ended with exit status {code}")
    files, problems, notes = audit.read(ledger)
    if any(files.values()):
        found = audit.audit(files, problems, notes)
        print(audit.to_text(found))
        if not found.exact:
            wrong.append("the ledger is not exact")
    else:
        print("chaos: no ledger in KUNGFU_LEDGER_DIR; check a ledger elsewhere with ms_kungfu.dataset.audit")
    if len(set(job.checksums)) > 1:
        wrong.append(f"the workers' parameters differ: {', '.join(sorted(set(job.checksums)))}")
    print(f"chaos: {len(job.checksums)} workers reported their parameters")
    judged = {pid: held for pid, samples in job.samples.items() if (held := settled(samples, _START_S))}
    wrong += [f"worker process {pid}: {text}" for pid, samples in judged.items() for text in leaks(samples)]
    wrong += [f"the launcher: {text}" for text in launcher_leaks(job.launcher)]
    wrong += job.left()
    print(
        f"chaos: {len(judged)} of {len(job.samples)} worker processes lived for {_START_S + _JUDGED_S:g} s and were "
        f"checked for growth, as was the launcher with {len(job.launcher)} samples"
    )
    for pid, samples in judged.items():
        print(f"chaos: worker process {pid}: at first {samples[0]}, at last {samples[-1]}")
    if job.launcher:
        print(f"chaos: the launcher: at first {job.launcher[0][1]}, at last {job.launcher[-1][1]}")
    return wrong, any(files.values())
