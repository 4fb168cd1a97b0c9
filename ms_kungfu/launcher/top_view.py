"""Draw a job for ``kungfu-run top``, with rich, from the job's status document."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ms_kungfu.launcher.state.account import number_of, spell
from ms_kungfu.launcher.state.progress import stall_of
from ms_kungfu.launcher.status_command import COLUMNS, change_of, clock, row_of, span, states_of

_CHANGES_SHOWN = 5
_BAR_COLUMNS = 30
_COLUMNS = 80  # the width of the picture if the environment variable COLUMNS is 0
_BAD_STATES = ("stuck", "failing", "overdue", "killed", "unkillable", "exited")


def show_live(first: dict[str, Any], look: Callable[[], dict[str, Any] | None], look_s: float) -> None:
    """Show the job on a separate screen until the job has ended.

    `look()` returns the job's status document, or None when the job has ended.
    """
    console = _console()
    job: dict[str, Any] | None = first
    last = first
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while job is not None:
            last = {**last, **job} if "error" in job else job
            live.update(picture(last, time.time(), console.height), refresh=True)
            time.sleep(look_s)
            job = look()
    console.print(picture(last, time.time(), None))
    console.print("The job has ended.")


def show_once(job: dict[str, Any]) -> None:
    """Print the picture once."""
    _console().print(picture(job, time.time(), None))


def _console() -> Console:
    console = Console()
    console.width = console.width or _COLUMNS
    return console


def picture(job: Mapping[str, Any], now: float, height: int | None) -> RenderableType:
    """Return the picture of a job. `height`: the maximum number of rows, or None for no limit."""
    above: list[RenderableType] = [*_title(job, now), Text(states_of(job), "bold")]
    if "error" in job:
        above.append(Text(job["error"], "red"))
    if job.get("training"):
        above += ["", _training(job["training"])]
    above += [Text(stall_of(stall), "bold red") for stall in job.get("stalls", ())]
    changes = [Text(f"  {change_of(each)}", no_wrap=True, overflow="ellipsis") for each in job.get("changes", ())]
    below: list[RenderableType] = ["", Text("last changes", "bold"), *changes[-_CHANGES_SHOWN:]] if changes else []
    rows_left = None if height is None else height - len(above) - len(below) - 4
    return Group(*above, "", _ranks(job, rows_left), *below)


def _title(job: Mapping[str, Any], now: float) -> list[RenderableType]:
    if "launcher" not in job:
        return [Text(f"config server {job['config_server']}")]
    launcher = job["launcher"]
    return [
        Text(" ".join(job["command"]), "bold cyan", no_wrap=True, overflow="ellipsis"),
        Text(
            f"process {launcher['pid']} on {launcher['host']}, since {clock(job['started_at'])} "
            f"({span(now - job['started_at'])})"
        ),
    ]


def _training(training: Mapping[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    left = f"{spell(round(training['left_s']))} left" if training["left_s"] else ""
    table.add_row("step", *_bar(training["step"], training["total_steps"]), left)
    if training["epochs"]:
        done = training["epoch"] - 1
        if training["step"] is not None and training["step"] == training["total_steps"]:
            done = training["epochs"]
        table.add_row("epoch", *_bar(done, training["epochs"], f"{training['epoch']}/{training['epochs']}"), "")
    units = {"samples_per_s": "samples/s", "steps_per_s": "steps/s"}
    rates = [f"{training[name]:.4g} {unit}" for name, unit in units.items() if training[name] is not None]
    if training["loss"] is not None:
        rates.append(f"loss {number_of(training['loss'])}")
    return Group(table, Text("  ".join(rates))) if rates else table


def _bar(done: int | None, total: int | None, text: str = "") -> tuple[RenderableType, RenderableType]:
    if done is None or not total:
        return "", "-" if done is None else str(done)
    share = f"{text or f'{done}/{total}'} ({100 * done / total:.0f}%)"
    return ProgressBar(total=total, completed=min(done, total), width=_BAR_COLUMNS), share


def _ranks(job: Mapping[str, Any], rows_left: int | None) -> RenderableType:
    processes: Sequence[Mapping[str, Any]] = job["processes"]
    shown = list(processes)
    if rows_left is not None and len(shown) > max(rows_left, 1):
        # Prefer processes that have a problem.
        shown = sorted(shown, key=lambda p: not (p["state"] in _BAD_STATES or p.get("why")))[: max(rows_left - 1, 1)]
        shown.sort(key=processes.index)
    version = None if job.get("cluster") is None else job["cluster"]["version"]
    names = [*COLUMNS[:-1], "memory", COLUMNS[-1]]
    rows = []
    for each in shown:
        *values, state = row_of(each, version)
        rows.append([*values, _memory(each.get("memory")), state])
    empty = {i for i in range(len(names)) if all(row[i] == "-" for row in rows)} | {names.index("name")}
    table = Table(box=None, header_style="bold", padding=(0, 1), collapse_padding=True)
    for i, name in enumerate(names):
        if i not in empty:
            is_number = name in ("rank", "pid", "step", "step time", "ended", "memory")
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    awaited = {stall["rank"] for stall in job.get("stalls", ())}
    for process, row in zip(shown, rows):
        is_bad = process["state"] in _BAD_STATES or process["rank"] in awaited
        style = "red" if is_bad else "yellow" if process.get("why") else ""
        table.add_row(*(Text(word) for i, word in enumerate(row) if i not in empty), style=style)
    hidden = len(processes) - len(shown)
    return Group(table, Text(f"... and {hidden} more", "dim")) if hidden else table


def _memory(size: int | None) -> str:
    if not size:
        return "-"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
