"""Train with fixed sizes, with the noise-scale policy and with random sizes, and draw the results.

python compare.py            # about 20 minutes, mostly asleep; results in out/
python compare.py --plot     # only the table and the picture of the results in out/
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

HERE = Path(__file__).parent
COLOURS = {"noise-scale": "#d64545", "random": "#9b7fc7"}
GREYS = ["#b8c4d0", "#2b6cb0", "#5f6b7a", "#93c1ea"]


def run(name, sizes, arguments, out):
    if name.startswith("fixed"):
        workers, policy = int(name.split()[1]), "fixed"
    else:
        workers, policy = min(sizes), name
    path = out / f"{name.replace(' ', '-')}.jsonl"
    command = ["kungfu-run", "-q", "-np", str(workers), "-w", "-affinity", "none"]
    command += [sys.executable, str(HERE / "train.py"), "--policy", policy, "--out", str(path)]
    command += ["--sizes", ",".join(map(str, sizes)), *arguments]
    print(f"{name} ...", flush=True)
    # Use a separate folder, because MindSpore writes files to the current folder.
    with tempfile.TemporaryDirectory() as folder, (out / f"{name.replace(' ', '-')}.log").open("w") as log:
        done = subprocess.run(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{name}: kungfu-run exited with {done.returncode}; see {log.name}")


def read(out, name):
    return [json.loads(line) for line in (out / f"{name.replace(' ', '-')}.jsonl").read_text().splitlines()]


def table(runs, target):
    """Return one line per run. The best fixed size has the smallest product of time and worker-seconds."""
    ends = {name: rows[-1] for name, rows in runs.items()}
    fixed = {name: end for name, end in ends.items() if name.startswith("fixed") and end["true_noise_scale"] >= target}
    lines = [f"{'':14}{'steps':>7}{'time':>10}{'worker-seconds':>17}{'sizes':>7}"]
    for name, end in ends.items():
        sizes = [row["cluster_size"] for row in runs[name]]
        path = [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
        shown = " ".join(map(str, path[:6])) + (" ..." if len(path) > 6 else "")
        reached = "" if end["true_noise_scale"] >= target else "  (target not reached)"
        lines.append(
            f"{name:14}{end['step']:7d}{end['seconds']:8.1f} s{end['worker_seconds']:17.1f}  {shown:>5}{reached}"
        )
    if fixed and "noise-scale" in ends:
        ours = ends["noise-scale"]
        for what, cost in (
            ("with the least time x worker-seconds", lambda end: end["seconds"] * end["worker_seconds"]),
            ("with the least time", lambda end: end["seconds"]),
        ):
            best = min(fixed, key=lambda name: cost(fixed[name]))
            lines.append(
                f"noise-scale against the fixed size {what} ({best.split()[1]}): "
                f"{ours['seconds'] / fixed[best]['seconds']:.2f} of its time, "
                f"{ours['worker_seconds'] / fixed[best]['worker_seconds']:.2f} of its worker-seconds"
            )
    return "\n".join(lines)


def draw(runs, target, png):
    ours = runs["noise-scale"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), dpi=150, layout="constrained")
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors="#7b8794", labelcolor="#1f2933")
    noise, size, loss, cost = axes[0, 0], axes[1, 0], axes[0, 1], axes[1, 1]

    steps = [row["step"] for row in ours]
    known = [(row["step"], row["noise_scale"]) for row in ours if row["noise_scale"]]
    noise.plot(steps, [row["true_noise_scale"] for row in ours], color="#7b8794", lw=1.5, label="true")
    noise.plot(*zip(*known), color=COLOURS["noise-scale"], lw=1.5, label="estimated")
    noise.set(yscale="log", ylabel="noise scale (samples)", xlabel="step")
    noise.set_title("The noise-scale policy", loc="left", fontweight="bold")
    noise.legend(frameon=False)

    sizes = [row["cluster_size"] for row in ours]
    size.step(steps, sizes, where="mid", color=COLOURS["noise-scale"], lw=1.8)
    size.fill_between(steps, 0, sizes, step="mid", color=COLOURS["noise-scale"], alpha=0.12, lw=0)
    size.set(ylabel="workers", xlabel="step", ylim=(0, 1.2 * max(max(r["cluster_size"] for r in rows)
                                                                 for rows in runs.values())))  # fmt: skip
    size.yaxis.set_major_locator(MaxNLocator(integer=True))

    grey = iter(GREYS)
    for name, rows in runs.items():
        colour = COLOURS.get(name) or next(grey)
        width = 2.2 if name == "noise-scale" else 1.3
        loss.plot([r["seconds"] for r in rows], [r["loss"] for r in rows], color=colour, lw=width, label=name)
        end = rows[-1]
        if end["true_noise_scale"] < target:
            continue
        chosen = name == "noise-scale"
        cost.plot(end["worker_seconds"], end["seconds"], "o", color=colour, ms=9 if chosen else 7)
        cost.annotate(
            name, (end["worker_seconds"], end["seconds"]), (-7, -13) if chosen else (7, 4), textcoords="offset points",
            ha="right" if chosen else "left", fontsize=9,
        )  # fmt: skip
    loss.set(yscale="log", ylabel="loss", xlabel="seconds")
    loss.set_title("Beside fixed and random sizes", loc="left", fontweight="bold")
    loss.legend(frameon=False, fontsize=9)
    cost.set(xlabel="worker-seconds to the target", ylabel="seconds to the target")
    cost.set_xlim(0, 1.2 * max(rows[-1]["worker_seconds"] for rows in runs.values()))
    cost.set_ylim(0, 1.15 * max(rows[-1]["seconds"] for rows in runs.values()))
    figure.savefig(png)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="2,4,8", help="numbers of workers (default: %(default)s); the largest is the maximum"
    )
    parser.add_argument("--target-noise-scale", type=float, default=4800)
    parser.add_argument("--plot", action="store_true", help="run nothing")
    parser.add_argument("--only", help="comma-separated runs to do, e.g. 'noise-scale,fixed 4'")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args, more = parser.parse_known_args()  # train.py gets the remaining arguments
    sizes = [int(size) for size in args.sizes.split(",")]
    names = [*(f"fixed {size}" for size in sizes), "noise-scale", "random"]
    if args.only:
        names = [name for name in names if name in args.only.split(",")]
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.plot:
        for name in names:
            run(name, sizes, ["--target-noise-scale", str(args.target_noise_scale), *more], args.out)
    runs = {name: read(args.out, name) for name in names if (args.out / f"{name.replace(' ', '-')}.jsonl").exists()}
    text = table(runs, args.target_noise_scale)
    (args.out / "table.txt").write_text(text + "\n")
    print(text)
    if "noise-scale" in runs:
        draw(runs, args.target_noise_scale, args.out / "adaptive.png")


if __name__ == "__main__":
    main()
