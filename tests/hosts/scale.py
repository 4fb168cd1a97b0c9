"""Measures what the launchers of a job need: memory, descriptors and processor time, by workers and by hosts.

    python -m tests.hosts.scale --workers 1,8,16,32,64 --hosts 2,4,8,16,32,64

With `--workers`, all workers are on one host. With `--hosts`, each host has one worker. The workers join, reduce 4
bytes 200 times, and then sleep. The first launcher of a job also runs the controller. For each series, the script fits
a line to the measurements. Needs root, as tests/hosts does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.hosts.contenders import HOSTS, launchers
from tests.hosts.namespaces import Network, why_not

_IDLE_S = 10.0
_NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORKER = """
import statistics, time
import numpy as np
import ms_kungfu as kf
kf.init()
x, times = np.ones(1, np.float32), []
for _ in range(200):
    began = time.perf_counter()
    assert kf.comm.all_reduce(x, name="x")[0] == kf.current_cluster_size()
    times.append(time.perf_counter() - began)
if kf.current_rank() == 0:
    print(f"reduced {statistics.median(times) * 1e6:.0f}", flush=True)
time.sleep(600)
"""


class Need(NamedTuple):
    """What one launcher needs."""

    megabytes: float
    descriptors: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Need:
        process = Path("/proc") / str(pid)
        found = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
        assert found is not None
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(int(found[1]) / 1024, len(list((process / "fd").iterdir())), ticks / _TICKS_PER_S)


class Job(NamedTuple):
    """A measurement: the first launcher, the mean of the others, and the job."""

    n: int
    start_s: float
    reduce_us: float
    first: Need
    others: Need | None
    idle: float
    """The share of a core that all launchers of an idle job use."""


def _mean(needs: list[Need]) -> Need | None:
    return Need(*(float(np.mean(column)) for column in zip(*needs))) if needs else None  # type: ignore[arg-type]


@contextlib.contextmanager
def _enough_neighbours(hosts: int) -> Iterator[None]:
    """Let the kernel keep the addresses of all pairs of hosts in its table, which all network namespaces share."""
    before = _NEIGHBOURS.read_text()
    _NEIGHBOURS.write_text(str(max(int(before), 2 * hosts * hosts)))
    try:
        yield
    finally:
        _NEIGHBOURS.write_text(before)


def measure(workers: int, hosts: int) -> Job:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_enough_neighbours(hosts))
        HOSTS[:] = stack.enter_context(Network(hosts)).hosts
        began = time.monotonic()
        processes = []
        for each in launchers(workers):
            # 64 launchers and workers that start on two cores can be silent for longer than the default, 10 s.
            command = [*each.command, "-host-timeout", "2m", sys.executable, "-c", _WORKER]
            processes.append(
                subprocess.Popen(command, env={**os.environ, **each.environ}, stdout=subprocess.PIPE, text=True)
            )
        try:
            out = processes[0].stdout
            assert out is not None
            reduced = next((line for line in out if "reduced" in line), None)
            if reduced is None:
                raise RuntimeError(f"the job of {workers} workers on {hosts} hosts ended before it reduced")
            start_s = time.monotonic() - began
            needs = [Need.of(process.pid) for process in processes]
            time.sleep(_IDLE_S)
            after = [Need.of(process.pid) for process in processes]
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(60)
        idle = sum(b.cpu_s - a.cpu_s for a, b in zip(needs, after)) / _IDLE_S
        return Job(workers, start_s, float(reduced.split()[-1]), needs[0], _mean(needs[1:]), idle)


def _line(jobs: list[Job], values: list[float]) -> str:
    slope, constant = np.polyfit([job.n for job in jobs], values, 1)
    return f"{constant:.2f} + {slope:.3f} n"


def series(title: str, jobs: list[Job]) -> None:
    print(f"{title}: n, s until reduced, us per reduction, first launcher, mean of the others, idle cores")
    for job in jobs:
        needs = [f"{n.megabytes:.1f} MB {n.descriptors:.0f} fd {n.cpu_s:.2f} s" for n in (job.first, job.others) if n]
        print(f"  {job.n:4} {job.start_s:6.1f} {job.reduce_us:8.0f}  {' | '.join(needs)}  {job.idle:.4f}")
    if len(jobs) > 1:
        columns: dict[str, list[float]] = {
            "MB": [job.first.megabytes for job in jobs],
            "fd": [job.first.descriptors for job in jobs],
            "CPU s": [job.first.cpu_s for job in jobs],
            "idle cores": [job.idle for job in jobs],
        }
        fits = (f"{name} = {_line(jobs, values)}" for name, values in columns.items())
        print(f"  first launcher: {'; '.join(fits)}", flush=True)


def _numbers(text: str) -> list[int]:
    words = [word for word in text.split(",") if word]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a list of numbers of 1 or more, as in 2,4")
    return [int(word) for word in words]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.scale")
    several = {"type": _numbers, "metavar": "N,..."}
    parser.add_argument("--workers", default="1,8,16,32,64", help="on one host (default %(default)s)", **several)
    parser.add_argument("--hosts", default="2,4,8,16,32,64", help="of one worker each (default %(default)s)", **several)
    args = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    if args.workers:
        series("workers on one host", [measure(n, 1) for n in args.workers])
    if args.hosts:
        series("hosts with one worker", [measure(n, n) for n in args.hosts])
    return 0


if __name__ == "__main__":
    sys.exit(main())
