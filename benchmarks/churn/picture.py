"""Draw goodput and the time to the next step over the interval between two kills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend that needs no display

from benchmarks.churn.systems import OWN, PLAIN
from benchmarks.churn.table import Cell

_COLOURS = {OWN: "#d64545", PLAIN: "#e8a0a0", "ms_kungfu+standby": "#e88080", "torchft": "#2f9e76",
            "torchrun": "#2b6cb0",
            "Ray Train": "#8e5bb5", "msrun": "#9aa5b1"}  # fmt: skip


def draw(found: Sequence[Cell], path: Path, about: str) -> None:
    """Write a PNG with a row of panels for each workload with several intervals.

    If no workload has several intervals, each workload has a row. Raise ValueError if no run has kills.
    """
    kills = [cell for cell in found if cell.scenario == "kill"]
    intervals = {cell.workload: {each.every for each in kills if each.workload == cell.workload} for cell in kills}
    most = max(map(len, intervals.values()), default=0)
    workloads = [workload for workload, own in intervals.items() if len(own) > 1 or most == 1]
    if not workloads:
        raise ValueError("no run with kills to draw")
    figure, axes = plt.subplots(
        len(workloads), 2, figsize=(10, 3.4 * len(workloads) + 0.4), squeeze=False, layout="constrained", dpi=150
    )
    for (left, right), workload in zip(axes, workloads):
        for system in dict.fromkeys(cell.system for cell in kills):
            own = sorted((c for c in kills if (c.system, c.workload) == (system, workload)), key=lambda c: c.every)
            style = {"color": _COLOURS.get(system, "#52606d"), "marker": "o", "ms": 4, "label": system}
            goodput = [(cell.every, cell.goodput) for cell in own if cell.goodput is not None]
            pause = [(cell.every, cell.next_step_p50_s) for cell in own if cell.next_step_p50_s is not None]
            for at, points in ((left, goodput), (right, pause)):
                if points:
                    at.plot([x for x, _ in points], [y for _, y in points], **style)
        for at, title in ((left, f"{workload}: goodput"), (right, "seconds from a kill to the next committed step")):
            at.set_title(title, loc="left", fontsize=10, fontweight="bold")
            at.set_xscale("log")
            ticks = sorted({cell.every for cell in kills})
            at.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            at.minorticks_off()
            at.set_xlabel("seconds between two kills")
            at.spines[["top", "right"]].set_visible(False)
        left.set_ylim(0, 1.1 * max(1.0, *(cell.goodput or 0.0 for cell in kills)))
        right.set_yscale("log")
    handles = {line.get_label(): line for row in axes for panel in row for line in panel.lines}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    figure.supxlabel(about, fontsize=8, color="#7b8794", x=0.995, ha="right")
    temporary = path.with_suffix(".new.png")
    figure.savefig(temporary)
    plt.close(figure)
    temporary.replace(path)
