"""The table, and the text of its caption. Both are computed only from the rows of the CSV file."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.churn.systems import OWN

COLUMNS = (
    "date", "machine", "commit", "versions", "load", "system", "workload", "scenario", "every", "seed", "workers",
    "checkpoint_every", "switches", "seconds", "kills", "useful", "rate", "next_step_p50_s", "next_step_p99_s", "lost",
    "twice", "equal_weights", "ended", "epochs", "accuracy", "cpu_ms_per_sample", "memory_mib", "start",
    "hung", "wrong",
)  # fmt: skip
TARGETS = {30.0: 0.98, 10.0: 0.96, 5.0: 0.93, 1.0: 0.80}
"""ms_kungfu's goodput, by the seconds between two kills."""
Row = Mapping[str, Any]


def append(path: Path, row: Row) -> None:
    """Add a row. The first row creates the file."""
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if new:
            writer.writeheader()
        writer.writerow({name: "" if value is None else value for name, value in row.items()})


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows, with numbers and booleans converted, and None for empty values."""
    with open(path, newline="") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text == "":
        return "" if name in ("wrong", "switches", "start") else None
    if name in (
        "start",
        "system",
        "workload",
        "scenario",
        "date",
        "machine",
        "commit",
        "versions",
        "switches",
        "wrong",
    ):
        return text
    return float(text)


@dataclass(frozen=True)
class Cell:
    """The medians over the runs of one system with the same workload, scenario and interval."""

    system: str
    workload: str
    scenario: str
    every: float
    runs: int
    goodput: float | None
    """Useful samples per second, divided by those of the system's own runs without failures."""
    rate: float | None
    next_step_p50_s: float | None
    next_step_p99_s: float | None
    lost: float | None
    twice: float | None
    equal_weights: bool | None
    accuracy: float | None
    cpu_ms_per_sample: float | None
    memory_mib: float | None
    hung: int
    wrong: str


def _median(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Return a cell for each combination, in the order of the rows. Only runs without switches count."""
    plain = [row for row in rows if not row["switches"]]
    groups: dict[tuple[str, str, float, str], list[Row]] = {}
    for row in plain:
        groups.setdefault((row["workload"], row["scenario"], row["every"] or 0.0, row["system"]), []).append(row)
    found = []
    for (workload, scenario, every, system), own in groups.items():
        base = _median(groups.get((workload, "none", 0.0, system), ()), "rate")
        rate = _median(own, "rate")
        equal = [row["equal_weights"] for row in own if row["equal_weights"] is not None]
        found.append(
            Cell(
                system,
                workload,
                scenario,
                every,
                len(own),
                rate / base if base and rate is not None else None,
                rate,
                equal_weights=all(equal) if equal else None,
                hung=sum(bool(row["hung"]) for row in own),
                wrong=next((row["wrong"] for row in own if row["wrong"]), ""),
                lost=_sum(own, "lost"),
                twice=_sum(own, "twice"),
                **{
                    name: _median(own, name)
                    for name in ("next_step_p50_s", "next_step_p99_s", "accuracy", "cpu_ms_per_sample", "memory_mib")
                },
            )  # fmt: skip
        )
    return found


def _sum(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows]
    return None if any(value is None for value in values) else sum(values)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _scenario(cell: Cell) -> str:
    names = {"none": "no failures", "kill": "a kill every {} s", "resize": "4, 2, 4 every {} s", "host": "a host, {} s"}
    return names[cell.scenario].format(f"{cell.every:g}")


def _heading() -> list[str]:
    return [
        "system", "goodput", "useful samples/s", "next step, median", "p99", "lost", "twice", "equal weights",
        "accuracy", "CPU ms/sample", "memory, MiB",
    ]  # fmt: skip


def _line(cell: Cell) -> list[str]:
    seconds = [_number(value) + (" s" if value is not None else "") for value in
               (cell.next_step_p50_s, cell.next_step_p99_s)]  # fmt: skip
    note = f" ({cell.hung} of {cell.runs} runs not ended)" if cell.hung else ""
    return [
        cell.system + note, _number(cell.goodput), _number(cell.rate, 0), *seconds, _number(cell.lost, 0),
        _number(cell.twice, 0), {True: "yes", False: "no", None: "-"}[cell.equal_weights], _number(cell.accuracy),
        _number(cell.cpu_ms_per_sample, 1), _number(cell.memory_mib, 0),
    ]  # fmt: skip


def markdown(found: Sequence[Cell], missing: Mapping[str, str]) -> str:
    """Return a table for each workload and scenario, with a row for each missing system, and the caption."""
    parts = []
    for key in dict.fromkeys((cell.workload, cell.scenario, cell.every) for cell in found):
        own = [cell for cell in found if (cell.workload, cell.scenario, cell.every) == key]
        lines = [f"**{key[0]}, {_scenario(own[0])}**", "", _row(_heading()), _row(["---"] * len(_heading()))]
        lines += [_row(_line(cell)) for cell in own]
        lines += [_row([f"{name}: not installed"] + ["-"] * (len(_heading()) - 1)) for name in missing]
        lines += ["", caption(own)]
        parts.append("\n".join(lines))
    parts += [f"{name} can't be installed: `{error}`." for name, error in missing.items()]
    return "\n\n".join(parts) + "\n"


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


# (name, value of a cell, whether more is better, number format)
_COMPARED: tuple[tuple[str, Callable[[Cell], float | None], bool, str], ...] = (
    ("goodput", lambda cell: cell.goodput, True, ".2f"),
    ("useful samples a second", lambda cell: cell.rate, True, ".0f"),
    ("median time to the next step", lambda cell: cell.next_step_p50_s, False, ".2f"),
    ("p99 of the time to the next step", lambda cell: cell.next_step_p99_s, False, ".2f"),
    ("samples lost", lambda cell: cell.lost, False, ".0f"),
    ("samples trained twice", lambda cell: cell.twice, False, ".0f"),
    ("final accuracy", lambda cell: cell.accuracy, True, ".2f"),
    ("CPU time a sample", lambda cell: cell.cpu_ms_per_sample, False, ".1f"),
    ("memory", lambda cell: cell.memory_mib, False, ".0f"),
)


def caption(own: Sequence[Cell]) -> str:
    """Return sentences that name the columns in which another system is better, and the target if ms_kungfu misses it.

    Values that look equal in the table count as equal. A system with a different failure model counts like any other.
    """
    by_name = {cell.system: cell for cell in own}
    ours = by_name.get(OWN)
    if ours is None:
        return f"{OWN} has no run here."
    sentences = []
    target = TARGETS.get(ours.every) if ours.scenario == "kill" else None
    if target is not None and ours.goodput is not None and ours.goodput < target:
        sentences.append(f"{OWN} misses its target: goodput {_number(ours.goodput)}, {target:.2f} wanted.")
    peers = [cell for cell in own if not cell.system.startswith(OWN)]
    for what, number, more, form in _COMPARED:
        better = []
        for cell in peers:
            theirs, mine = number(cell), number(ours)
            if theirs is None or cell.hung:
                continue
            if mine is None or (theirs > mine if more else theirs < mine) and f"{theirs:{form}}" != f"{mine:{form}}":
                better.append(f"{cell.system} ({theirs:{form}})")
        if better:
            mine = number(ours)
            told = "no number" if mine is None else f"{mine:{form}}"
            sentences.append(f"{what[0].upper()}{what[1:]}: better than {OWN} ({told}): {', '.join(better)}.")
    if not peers:
        return " ".join([*sentences, "No peer was measured."])
    return " ".join(sentences or [f"No peer is better than {OWN} in any column."])
