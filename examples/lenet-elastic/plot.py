"""Draw a training run: loss and cluster size by step. Also a program: plot.py out/training.jsonl training.png"""

import json
import os
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

INK, GREY, LINE = "#1f2933", "#7b8794", "#d64545"
SHADES = {1: "#e6f0fa", 2: "#bcd9f2", 3: "#93c1ea", 4: "#6aa9e0"}  # by cluster size; larger sizes use the last colour


def phases(sizes):
    """Return (first index, index after the last, size) for each sequence of steps with the same size."""
    starts = [i for i in range(len(sizes)) if i == 0 or sizes[i] != sizes[i - 1]]
    return [(start, stop, sizes[start]) for start, stop in zip(starts, [*starts[1:], len(sizes)])]


def smooth(values, span=15):
    """Return a moving mean over `span` values, fewer at both ends."""
    sums = np.cumsum(np.insert(np.asarray(values, dtype=float), 0, 0.0))
    here = np.arange(len(values))
    start, stop = np.maximum(here - span // 2, 0), np.minimum(here + span // 2 + 1, len(values))
    return (sums[stop] - sums[start]) / (stop - start)


def draw(jsonl, png, accuracy=None):
    """Read one object per step from `jsonl`, and write `png` atomically."""
    rows = [json.loads(line) for line in Path(jsonl).read_text().splitlines()]
    step = [row["step"] for row in rows]
    loss = [row["loss"] for row in rows]
    stretches = phases([row["cluster_size"] for row in rows])

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "axes.edgecolor": GREY, "text.color": INK})
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.4), sharex=True, height_ratios=(3, 1), layout="constrained", dpi=150
    )
    figure.get_layout_engine().set(hspace=0.04)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=GREY, labelcolor=INK)

    edges = [step[start] - 0.5 for start, _, _ in stretches] + [step[-1] + 0.5]
    for (_, _, size), left, right in zip(stretches, edges, edges[1:]):
        colour = SHADES.get(size, SHADES[4])
        top.axvspan(left, right, color=colour, alpha=0.45, lw=0)
        bottom.fill_between([left, right], 0, size, color=colour, lw=0)
        bottom.annotate(
            f"{size} worker{'s' if size > 1 else ''}", ((left + right) / 2, size), (0, 4), textcoords="offset points",
            ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
    sizes = [size for _, _, size in stretches]
    bottom.stairs(sizes, edges, color="#2b6cb0", lw=1.6, baseline=None)

    top.plot(step, loss, color=LINE, lw=0.8, alpha=0.3, label="each step")
    top.plot(step, smooth(loss), color=LINE, lw=2, label="mean of 15 steps")
    top.set_ylim(0, 1.05 * max(loss))
    top.set_ylabel("training loss")
    top.legend(frameon=False, loc="upper right")
    top.set_title("LeNet on a cluster that resizes while it trains", loc="left", fontsize=13, fontweight="bold", pad=12)
    if accuracy is not None:
        top.set_title(f"test accuracy {accuracy:.2%}", loc="right", fontsize=11, color=GREY, pad=12)

    bottom.set_ylim(0, 1.45 * max(sizes))
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    bottom.set_ylabel("cluster size")
    bottom.set_xlabel("step")
    bottom.set_xlim(edges[0], edges[-1])

    png = Path(png)
    handle, temporary = tempfile.mkstemp(dir=png.parent, suffix=".png")
    os.close(handle)
    figure.savefig(temporary)
    plt.close(figure)
    os.chmod(temporary, 0o644)
    os.replace(temporary, png)


if __name__ == "__main__":
    draw(*sys.argv[1:3])
