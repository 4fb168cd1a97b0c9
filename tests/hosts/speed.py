"""How fast a job over several hosts reduces, beside Gloo and MPI in the same namespaces.

    python -m tests.hosts.speed bound --hosts 2,4 --megabits 1000
    python -m tests.hosts.speed vs --hosts 2 --ranks 1,2 --vs gloo,mpi
    python -m tests.hosts.speed overlap --hosts 2,4 --megabits 1000

`bound` shapes each host's link to a rate, measures what one stream gets through it, and says what part of the bound of
an all-reduce, 2 (n - 1) / n * bytes / rate, is reached. Beside it stands what each of the streams of a ring gets when
all hosts send to the next one at once: where one machine plays them all, its cores may be busy with less than the
links could carry, and `--mtu 9000` has them handle a sixth of the packets. `--slow MEGABITS` gives the last host a
slower link: then the bound is that link's. `vs` shapes nothing: there the kernel's copies bound all of them; baselines
take turns in one run. `overlap` trains a network of dense layers with MindSpore, its gradients reduced in the
background or not (`programs/overlapped.py`); `--megabits 0` shapes nothing.

Needs root, as tests/hosts does. A contender's ranks are one process each in their host's namespace.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report, rounds
from benchmarks.group import running
from benchmarks.workload import DTYPES, Task
from tests.hosts.contenders import HOSTS, GlooOverHosts, KungFuOverHosts, MpiOverHosts, launchers
from tests.hosts.namespaces import Host, Network, why_not

KIB, MIB = 1 << 10, 1 << 20
_STREAM_BYTES = 64 * MIB
_TIMEOUT_S = 300.0

_STREAM_IN = """
import socket, sys, time
with socket.create_server((sys.argv[1], 9300)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    got, begin = 0, None
    while data := connection.recv(1 << 20):
        begin = begin or time.perf_counter()
        got += len(data)
    print(got / (time.perf_counter() - begin))
"""
_STREAM_OUT = """
import socket, sys
with socket.create_connection((sys.argv[1], 9300)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


PROGRAM = Path(__file__).with_name("programs") / "overlapped.py"
CONTENDERS = {"kungfu": KungFuOverHosts, "gloo": GlooOverHosts, "mpi": MpiOverHosts}


def _task(nbytes: int, samples: int) -> Task:
    count = max(1, nbytes // DTYPES["float32"].unit)
    batch = min(20, max(1, 64 * KIB // nbytes))
    return Task("all_reduce", (count,), ((0, 1),), "float32", "sum", 0, 1, samples, batch)


def _stream_rate(pairs: list[tuple[Host, Host]]) -> float:
    """Bytes a second of a stream from the first to the second of each pair, all at once; of the slowest."""
    servers = [
        subprocess.Popen(
            [*to.within(), sys.executable, "-c", _STREAM_IN, to.address], stdout=subprocess.PIPE, text=True
        )
        for _, to in pairs
    ]
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
    clients = [
        subprocess.Popen([*out.within(), sys.executable, "-c", _STREAM_OUT, to.address, str(_STREAM_BYTES)])
        for out, to in pairs
    ]
    for client in clients:
        assert client.wait() == 0
    return min(float(server.communicate()[0]) for server in servers)


@contextlib.contextmanager
def _over(count: int, megabits: float | None = None, slow: float | None = None, mtu: int = 1500) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        HOSTS[:] = stack.enter_context(Network(count, mtu)).hosts
        for host in HOSTS if megabits is not None else ():
            stack.enter_context(host.slowed(slow if slow is not None and host is HOSTS[-1] else megabits))
        yield


def bound(
    counts: list[int], sizes: list[int], megabits: float, slow: float | None, mtu: int, turns: int, file: Path | None
) -> None:
    for count in counts:
        with _over(count, megabits, slow, mtu):
            rate = statistics.median(_stream_rate([(HOSTS[0], HOSTS[-1])]) for _ in range(3))
            all_at_once = statistics.median(_stream_rate([*zip(HOSTS, [*HOSTS[1:], HOSTS[0]])]) for _ in range(3))
            print(f"{count} hosts at {megabits:g} Mbit/s, MTU {mtu}"
                  + (f", the last one at {slow:g}" if slow else "")
                  + f": one stream {rate * 8e-6:.1f} Mbit/s of payload, {all_at_once * 8e-6:.1f} each in a ring",
                  flush=True)  # fmt: skip
            with running({"kungfu": KungFuOverHosts}, count, _TIMEOUT_S) as groups:
                for size in sizes:
                    entry = rounds.Entry("kungfu", groups["kungfu"], _task(size, 3))
                    rounds.run([entry], turns)
                    assert entry.wrong is None, entry.wrong
                    seconds = statistics.median(statistics.median(each) for each in entry.rounds)
                    least = 2 * (count - 1) / count * size / rate
                    print(f"  {report.size_text(size):>8}  {seconds * 1e3:9.2f} ms  "
                          f"{least / seconds:5.2f} of the bound, "
                          f"{least / seconds * rate / all_at_once:5.2f} of the ring's streams", flush=True)  # fmt: skip
                    if file is not None:  # as `python -m benchmarks simulate --measured` reads it
                        with file.open("a") as lines:
                            lines.write(json.dumps({"hosts": count, "nbytes": size, "seconds": seconds}) + "\n")


def versus(counts: list[int], each: list[int], names: list[str], sizes: list[int], turns: int) -> None:
    for count in counts:
        for ranks in each:
            kinds = {name: CONTENDERS[name] for name in ["kungfu", *names]}
            with _over(count), running(kinds, count * ranks, _TIMEOUT_S) as groups:
                print(f"{count} hosts x {ranks}: ms, times kungfu's, CPU seconds a GB")
                for size in sizes:
                    entries = [rounds.Entry(name, group, _task(size, 5)) for name, group in groups.items()]
                    used = {}
                    for entry in entries:
                        before = entry.group.cpu_seconds(starters=True)
                        rounds.run([entry], 0)  # warms up, and counts
                        gigabytes = 1e-9 * size * (entry.task.samples + 2) * entry.task.batch
                        used[entry.label] = (entry.group.cpu_seconds(starters=True) - before) / gigabytes
                    rounds.run(entries, turns)
                    cells = []
                    for entry in entries:
                        assert entry.wrong is None, entry.wrong
                        seconds = statistics.median(statistics.median(r) for r in entry.rounds)
                        cells.append(f"{entry.label} {seconds * 1e3:.3f} ({entry.ratio_to(entries[0]):.2f}x, "
                                     f"{used[entry.label]:.1f})")  # fmt: skip
                    print(f"  {report.size_text(size):>8}  " + "   ".join(cells), flush=True)


def overlap(counts: list[int], megabits: float, mib: int, turns: int) -> None:
    for count in counts:
        with _over(count, megabits or None):
            print(f"{count} hosts, {f'{megabits:g} Mbit/s' if megabits else 'not shaped'}, {mib} MiB", flush=True)
            command = [sys.executable, PROGRAM, str(mib), str(turns)]
            processes = [
                subprocess.Popen([*each.command, *command], env={**os.environ, **each.environ})
                for each in launchers(count)
            ]
            codes = [process.wait() for process in processes]
            assert not any(codes), codes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.speed")
    parser.add_argument("part", choices=("bound", "vs", "overlap"))
    parser.add_argument("--hosts", default="2", help="how many, of each run")
    parser.add_argument("--ranks", default="1", help="on each host (vs)")
    parser.add_argument("--sizes", default=None, help="bytes")
    parser.add_argument("--megabits", type=float, default=1000.0)
    parser.add_argument("--slow", type=float, default=None)
    parser.add_argument("--mtu", type=int, default=1500, help="of the links (bound)")
    parser.add_argument("--strategy", default="AUTO", help="kungfu-run's")
    parser.add_argument("--vs", default="gloo,mpi")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="also write what bound has measured")
    args = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    KungFuOverHosts.strategy = args.strategy
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    counts = [int(word) for word in args.hosts.split(",")]
    sizes = [int(word) for word in args.sizes.split(",")] if args.sizes else None
    if args.part == "bound":
        bound(
            counts, sizes or [MIB, 4 * MIB, 16 * MIB, 64 * MIB], args.megabits, args.slow, args.mtu, args.rounds,
            args.json,
        )  # fmt: skip
    elif args.part == "overlap":
        for mib in sizes or [16 * MIB, 64 * MIB]:
            overlap(counts, args.megabits, mib // MIB, args.rounds)
    else:
        each = [int(word) for word in args.ranks.split(",")]
        names = [name for name in args.vs.split(",") if name]
        versus(counts, each, names, sizes or [4, KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB], args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
