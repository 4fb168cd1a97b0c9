"""Draw results: time and ratio over size, or bars if the size is fixed. Each number of ranks has a panel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend that needs no display
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from benchmarks.report import Record, size_text, time_text

_INK, _GREY, _FAINT = "#1f2933", "#7b8794", "#e4e7eb"
_COLOURS = {
    "kungfu": "#d64545", "kungfu-python": "#e88080", "kungfu-primitive": "#f0b429",
    "kungfu-kernel": "#c2571a", "KungFuMomentum": "#d64545",
    "mpi": "#2b6cb0", "gloo": "#2f9e76", "mindspore": "#8e5bb5", "memcpy": "#9aa5b1", "nn.Momentum": "#9aa5b1",
}  # fmt: skip
_OTHER = "#52606d"
_STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.edgecolor": _GREY, "axes.labelcolor": _INK,
    "text.color": _INK, "xtick.color": _GREY, "ytick.color": _GREY, "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": _FAINT, "grid.linewidth": 0.8, "axes.titlepad": 10, "legend.frameon": False,
}  # fmt: skip
_BY_SIZE = ("all_reduce", "broadcast")


def draw(records: Sequence[Record], path: str) -> None:
    """Write a PNG. `records` may be results of several benchmarks."""
    panels: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        bench = r["bench"]
        own = (r["ranks"], r["dtype"], r["op"]) if bench in _BY_SIZE else (r.get("model"), r["ranks"], r.get("mode"))
        panels.setdefault((bench, *own) if bench != "resize" else (bench,), []).append(r)
    if not panels:
        raise ValueError("no results to draw")
    sized, others = ([p for p in panels.values() if (p[0]["bench"] in _BY_SIZE) is yes] for yes in (True, False))
    layout = [row[i : i + 3] for row in (sized, others) for i in range(0, len(row), 3)]
    heights = [5.2 if row[0] in sized else 1.0 + 0.34 * max(map(len, row)) for row in layout]
    with plt.rc_context(_STYLE):
        width = 6.4 * max(map(len, layout))
        figure = plt.figure(figsize=(max(width, 6.5), sum(heights) + 0.5), layout="constrained", dpi=150)
        layout_engine: Any = figure.get_layout_engine()
        layout_engine.set(w_pad=0.12, h_pad=0.08)
        subfigures = figure.subfigures(len(layout), 1, height_ratios=heights, squeeze=False)[:, 0]
        for subfigure, row in zip(subfigures, layout):
            if row[0][0]["bench"] in _BY_SIZE:
                axes = subfigure.subplots(2, len(row), sharex="col", height_ratios=(2.2, 1), squeeze=False)
                for column, panel in enumerate(row):
                    _over_size(axes[0][column], axes[1][column], panel)
            else:
                for at, panel in zip(subfigure.subplots(1, len(row), squeeze=False)[0], row):
                    _bars(at, panel, max(map(len, row)))
        first = records[0]
        about = f"{first['machine']['cores']} cores of {first['machine']['cpu']}, commit {first['commit']}; medians"
        figure.supxlabel(about, fontsize=8, color=_GREY, x=0.995, ha="right")
        temporary = f"{path}.{os.getpid()}.png"
        figure.savefig(temporary)
        plt.close(figure)
    Path(temporary).replace(path)


def _colour(record: Record) -> str:
    return _COLOURS.get(record["contender"].partition(",")[0], _OTHER)


def _ranks(record: Record) -> str:
    return f"{record['ranks']} rank{'s' if record['ranks'] > 1 else ''}"


def _titles(axes: Any, left: str, right: str) -> None:
    axes.set_title(left, loc="left", fontsize=12, fontweight="bold")
    axes.set_title(right, loc="right", fontsize=9, color=_GREY)


def _over_size(top: Any, bottom: Any, panel: Sequence[Record]) -> None:
    first = panel[0]
    lines: dict[str, list[Record]] = {}
    for r in panel:
        lines.setdefault(r["contender"], []).append(r)
    for label, line in lines.items():
        sizes = [r["bytes"] for r in line]
        style = {"color": _colour(line[0]), "marker": "o", "ms": 4, "lw": 2.2 if label == first["ratio_to"] else 1.5}
        if label == "memcpy":
            style.update(ls=(0, (3, 2)), marker="")
        top.plot(sizes, [r["p50_us"] for r in line], label=label, **style)
        top.fill_between(
            sizes, [r["min_us"] for r in line], [r["p90_us"] for r in line], color=style["color"], alpha=0.12, lw=0
        )
        if first["ratio_to"]:
            bottom.plot(sizes, [r["ratio"] for r in line], **style)
    _titles(top, f"{first['bench']}, {_ranks(first)}", " ".join(filter(None, (first["dtype"], first["op"]))))
    top.set_ylabel("time of the slowest rank")
    bottom.set_ylabel(f"times {first['ratio_to']}")
    for axes in (top, bottom):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    bottom.axhline(1, color=_GREY, lw=0.8)
    top.yaxis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us)))
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    ticks = sorted({r["bytes"] for r in panel})
    bottom.set_xticks(ticks, [size_text(b) for b in ticks], rotation=30, ha="right")
    bottom.xaxis.set_minor_locator(NullLocator())
    top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    # The time axis would spend half of the picture on a memcpy of four bytes.
    collectives = [r for r in panel if r["contender"] != "memcpy"]
    if collectives:
        top.set_ylim(bottom=0.4 * min(r["min_us"] for r in collectives))
        if first["ratio_to"]:
            bottom.set_ylim(0.4 * min(r["ratio"] for r in collectives), 2.5 * max(r["ratio"] for r in collectives))


def _bars(axes: Any, panel: Sequence[Record], slots: int) -> None:
    first = panel[0]
    positions = [slots - 1 - i for i in range(len(panel))]
    axes.set_ylim(-0.6, slots - 0.4)  # bars as thick as those of the other panels in the row
    longest = max(r["p50_us"] for r in panel)
    phases = [k for k in ("resize_p50_us", "sync_p50_us", "step_p50_us") if k in first]
    if phases:
        for i, (phase, shade) in enumerate(zip(phases, ("#2b6cb0", "#6aa9e0", "#bcd9f2"))):
            before = [sum(r[p] for p in phases[:i]) for r in panel]
            axes.barh(positions, [r[phase] for r in panel], 0.62, before, color=shade, label=phase.split("_")[0])
        axes.legend(loc="lower right", fontsize=8)
    else:
        axes.barh(positions, [r["p50_us"] for r in panel], 0.62, color=[_colour(r) for r in panel])
    for y, r in zip(positions, panel):
        other = r["ratio"] and r["contender"] != r["ratio_to"]
        ratio = f"  ({r['ratio']:.{2 if r['ratio'] < 10 else 0}f}x)" if other else ""
        text = time_text(r["p50_us"]) + ratio
        axes.annotate(text, (r["p50_us"], y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(positions, [r["contender"] for r in panel])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.35 * longest)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us)))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(False, axis="y")
    about = [] if first["bench"] == "resize" else [_ranks(first)]
    about += [f"{first['mode']} mode"] if first.get("mode") else []
    title = first["bench"] if not first.get("model") else f"{first['bench']}, {first['model']}"
    _titles(axes, title, ", ".join(about))
