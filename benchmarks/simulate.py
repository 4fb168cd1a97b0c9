"""Predict the time of an all-reduce between many hosts by an alpha-beta model, fitted to measurements on a few.

Four numbers describe a network. An operation takes:
- `base_s`, whatever its size, in which the ranks and their host's transport wait for each other
- `step_s` (alpha) for each message that waits for another host's message
- `byte_s` (beta) for each byte that a host sends over its network connection
- `work_s` for each byte that a host's memory and cores move to the transport and back

The steps and bytes are those of two algorithms. The model selects one by the rule that the runtime uses between hosts
with equal connections (`ops_src/collectives/hosts/selector.cc`; slices count as one operation):

- recursive doubling: log2(n) steps, and two more if n is no power of two. Each step sends all bytes, and reduces them
  before the next step.
- a ring: 2 (n - 1) steps, each with 1/n of the bytes.

The model ignores computation on the hosts, other traffic on their connections, and oversubscribed switches. It also
ignores jitter: each of a ring's 2 (n - 1) steps waits for the slowest host. So with many hosts the result is a lower
bound rather than a prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report

UNHIDDEN_REDUCTION = 10  # kUnhiddenReduction of ops_src/collectives/hosts/selector.cc
_MEASURED_SIZES = (4, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_MEASURED_TIMES = 15
_MOST_TURNS = 10
_NAMES = ("base_s", "step_s", "byte_s", "work_s")


@dataclass(frozen=True)
class Network:
    """The four numbers (see above)."""

    base_s: float
    step_s: float
    byte_s: float
    work_s: float

    def seconds(self, hosts: int, nbytes: int, ring: bool | None = None) -> float:
        """Return the time of an all-reduce. `ring`: whether to use a ring; None: as the runtime selects."""
        ring = self.takes_ring(hosts, nbytes) if ring is None else ring
        return float(np.dot(_costs(hosts, nbytes, ring), astuple(self)))

    def takes_ring(self, hosts: int, nbytes: int) -> bool:
        (_, few, much, _), (_, many, less, _) = (_costs(hosts, nbytes, ring) for ring in (False, True))
        doubling = few * self.step_s + much * self.byte_s * (1 + 1 / UNHIDDEN_REDUCTION)
        return hosts > 1 and many * self.step_s + less * self.byte_s <= doubling


# Assumed, not measured: 1 Gbit/s per host behind one switch, 0.1 ms for a message through both hosts' kernels and
# transport threads, some GB/s of memory bandwidth. --measured replaces these by fitted numbers.
DEFAULT = Network(base_s=150e-6, step_s=100e-6, byte_s=8e-9, work_s=1e-9)


@dataclass(frozen=True)
class Measurement:
    hosts: int
    nbytes: int
    seconds: float


def _costs(hosts: int, nbytes: int, ring: bool) -> tuple[float, float, float, float]:
    """Return the factors by which to multiply a network's four numbers."""
    if ring:
        steps, through = 2 * (hosts - 1), 2 * (hosts - 1) / hosts * nbytes
    else:
        steps = hosts.bit_length() - 1 + (0 if hosts & (hosts - 1) == 0 else 2)
        through = steps * nbytes
    return 1.0, steps, through, nbytes


def fit(measured: Sequence[Measurement]) -> Network:
    """Fit the network by the least squares of relative errors, with numbers of at least 0.

    Raise ValueError if the data don't suffice. The file doesn't contain the algorithm of each measurement. The
    algorithm depends on the network, so iteration finds both.
    """
    network = DEFAULT
    for _ in range(_MOST_TURNS):
        ways = [network.takes_ring(m.hosts, m.nbytes) for m in measured]
        network = _fit_to(measured, ways)
        if ways == [network.takes_ring(m.hosts, m.nbytes) for m in measured]:
            break
    return network


def _fit_to(measured: Sequence[Measurement], ways: Sequence[bool]) -> Network:
    rows = [np.divide(_costs(m.hosts, m.nbytes, ring), m.seconds) for m, ring in zip(measured, ways)]
    costs = np.array(rows, float).reshape(-1, 4)
    if len({m.hosts for m in measured}) < 2 or np.linalg.matrix_rank(costs / np.abs(costs).max(axis=0)) < 4:
        raise ValueError("to tell a network's numbers apart takes two numbers of hosts, small sizes and large ones")
    free = [True] * 4
    while True:
        # Scale the columns to similar size. Otherwise the bytes' column would cause the others to be rounded to 0.
        scale = np.abs(costs).max(axis=0)
        found = np.zeros(4)
        found[free] = np.linalg.lstsq((costs / scale)[:, free], np.ones(len(costs)), rcond=None)[0]
        if (found >= 0).all():
            return Network(*map(float, found / scale))
        free[int(np.argmin(found))] = False


def read(path: Path) -> list[Measurement]:
    """Read measurements. Raise ValueError if a line is invalid."""
    measured = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            one = Measurement(int(fields["hosts"]), int(fields["nbytes"]), float(fields["seconds"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number} is no measurement") from None
        if one.hosts < 2 or one.nbytes < 1 or not 0 < one.seconds < math.inf:
            raise ValueError(f"{path}:{number} is no measurement between hosts")
        measured.append(one)
    return measured


def errors(network: Network, measured: Iterable[Measurement]) -> list[float]:
    """Return the relative errors of the prediction."""
    return [network.seconds(m.hosts, m.nbytes) / m.seconds - 1 for m in measured]


# ---- the command ----


def run(arguments: argparse.Namespace, out: report.Report) -> None:
    if arguments.measure is not None:
        measure(Path(arguments.measure))
        return
    network = DEFAULT
    if arguments.measured is not None:
        measured = read(Path(arguments.measured))
        network = fit(measured)
        _tell_of_fit(network, measured)
    else:
        print("nothing was measured: a network of 1 Gbit/s is assumed; --measured FILE takes another's figures")
    if arguments.megabits is not None:
        network = Network(network.base_s, network.step_s, 8e-6 / arguments.megabits, network.work_s)
    print("  ".join(f"{name} {value * 1e6:.4g} us" for name, value in zip(_NAMES, astuple(network))))
    print(f"{'hosts':>6} {'bytes':>8} {'ms':>10}  {'by':<8} {'MB/s':>8}  the other way, ms")
    for hosts in arguments.hosts:
        for nbytes in arguments.sizes:
            ring = network.takes_ring(hosts, nbytes)
            seconds, other = network.seconds(hosts, nbytes), network.seconds(hosts, nbytes, not ring)
            how = "ring" if ring else "doubling"
            print(f"{hosts:>6} {report.size_text(nbytes):>8} {seconds * 1e3:>10.3f}  {how:<8} "
                  f"{nbytes / seconds * 1e-6:>8.1f}  {other * 1e3:.3f}")  # fmt: skip
            out.records.append({"bench": "simulate", "hosts": hosts, "nbytes": nbytes, "seconds": seconds,
                                "algorithm": how, "other_s": other, **vars(network),
                                **report.verdict(None)})  # fmt: skip


def _tell_of_fit(network: Network, measured: Sequence[Measurement]) -> None:
    found = [abs(error) for error in errors(network, measured)]
    print(f"fitted to {len(measured)} measurements: off by {np.median(found):.0%} (median), {max(found):.0%} at most")
    most = max(m.hosts for m in measured)
    fewer, last = [m for m in measured if m.hosts < most], [m for m in measured if m.hosts == most]
    try:
        told = errors(fit(fewer), last)
    except ValueError:
        return  # too few measurements
    print(f"{most} hosts, foretold from fewer:")
    for m, error in zip(last, told):
        print(f"  {report.size_text(m.nbytes):>8}  measured {m.seconds * 1e3:9.3f} ms, foretold {error:+.0%}")


def measure(path: Path) -> None:
    """Measure within a job over several hosts: each rank runs this, and rank 0 adds its results to the file."""
    import ms_kungfu as kf
    from ms_kungfu import comm

    kf.init()
    own = np.frombuffer((os.environ.get("KUNGFU_SELF", "").rpartition(":")[0]).encode().ljust(64, b"\0"), np.uint8)
    hosts = len({row.tobytes() for row in comm.all_gather(own, name="hosts").reshape(-1, 64)})
    if hosts < 2:
        raise ValueError("--measure is for a job over several hosts: kungfu-run -np 4 -H 10.0.0.1:1,... python -m ...")
    lines = []
    for nbytes in _MEASURED_SIZES:
        brought = np.ones(nbytes // 4, np.float32)
        taken = []
        for _ in range(_MEASURED_TIMES):
            comm.barrier()
            begin = time.perf_counter()
            comm.all_reduce(brought, name=f"measured {nbytes}", out=np.empty_like(brought))
            own_s = np.array([time.perf_counter() - begin])
            taken.append(float(comm.all_reduce(own_s, "max", name="slowest")[0]))
        found: dict[str, Any] = {"hosts": hosts, "nbytes": nbytes, "seconds": float(np.median(taken[3:]))}
        lines.append(json.dumps(found) + "\n")
    if kf.current_rank() == 0:
        with path.open("a") as file:
            file.writelines(lines)
        print("".join(lines), end="")
