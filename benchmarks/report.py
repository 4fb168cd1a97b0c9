"""Results as lines of JSON and as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.rounds import Entry

Record = dict[str, Any]


def times(samples: Sequence[float]) -> Record:
    """Return the columns of a record that summarise these times in seconds."""
    quantiles = np.quantile(samples, (0, 0.5, 0.9, 0.99)) * 1e6
    return {
        "samples": len(samples),
        **{name: round(float(us), 3) for name, us in zip(("min_us", "p50_us", "p90_us", "p99_us"), quantiles)},
    }


def verdict(wrong: str | None) -> Record:
    """Return the last columns of a record: whether the result is right, and its origin."""
    return {"verified": wrong is None, "wrong": wrong, **machine.facts()}


def records(bench: str, entries: Sequence[Entry], base: Entry | None) -> list[Record]:
    """Return one record per entry.

    The times are those of the rank that counts. `ratio` is this entry's time divided by the time of `base`.
    """
    made = []
    for e in entries:
        columns = times([seconds for turn in e.rounds for seconds in turn])
        nbytes = e.about.get("bytes")
        made.append(
            {
                "bench": bench,
                "contender": e.label,
                "ranks": e.group.size,
                "transport": e.group.contender.transport,
                **e.about,
                "rounds": len(e.rounds),
                **columns,
                "algorithm_gb_s": round(nbytes / columns["p50_us"] / 1e3, 3) if nbytes else None,
                "ratio": round(e.ratio_to(base), 3) if base else None,
                "ratio_to": base.label if base else None,
                "idle_ranks_cpu": round(e.others_cpu_s / e.wall_s, 4) if e.wall_s else 0.0,
                **verdict(e.wrong),
            }
        )
    return made


class Report:
    """Collects the records of a run and prints them as they come."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, title: str, records: Iterable[Record]) -> None:
        new = list(records)
        self.records += new
        print(table(title, new), flush=True)

    @property
    def failures(self) -> list[Record]:
        return [r for r in self.records if not r["verified"]]

    def write(self, path: str) -> None:
        """Write one object per line. If `path` is "-", write to standard output."""
        text = "".join(json.dumps(r) + "\n" for r in self.records)
        if path == "-":
            sys.stdout.write(text)
        else:
            Path(path).write_text(text)


def read(paths: Iterable[str]) -> list[Record]:
    return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines() if line.strip()]


def size_text(nbytes: float) -> str:
    """
    >>> size_text(4), size_text(65536), size_text(1.5 * (1 << 20))
    ('4 B', '64 KiB', '1.5 MiB')
    """
    for unit, text in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {text}"
    return f"{nbytes:.0f} B"


def time_text(us: float) -> str:
    """
    >>> time_text(0.1234), time_text(12345.0), time_text(2e6)
    ('0.123 us', '12.3 ms', '2 s')
    """
    for unit, text in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:.3g} {text}"
    return f"{us:.3g} us"


def table(title: str, rows: Sequence[Record]) -> str:
    width = max((len(r["contender"]) for r in rows), default=10)
    lines = [title, f"  {'':{width}} {'min':>9} {'median':>9} {'p90':>9} {'p99':>9} {'GB/s':>7}  time, relative"]
    for r in rows:
        times = " ".join(f"{time_text(r[k]):>9}" for k in ("min_us", "p50_us", "p90_us", "p99_us"))
        speed = "" if r["algorithm_gb_s"] is None else f"{r['algorithm_gb_s']:.3g}"
        relative = "" if r["ratio"] is None else "1" if r["contender"] == r["ratio_to"] else f"{r['ratio']:.2f}"
        notes = ""
        if not r["verified"]:
            notes += f"  WRONG RESULT: {r['wrong']}"
        if r["idle_ranks_cpu"] > 0.1:  # a smaller share is below the clock's resolution
            notes += f"  (the idle ranks used {r['idle_ranks_cpu']:.0%} of a core)"
        lines.append(f"  {r['contender']:{width}} {times} {speed:>7}  {relative}{notes}")
    return "\n".join(lines)
