"""Train with 1 to 16 workers and each optimizer, then print a table and draw the accuracy.

python compare.py                 # trains (5 minutes on 2 idle cores), then shows the results
python compare.py --show          # only shows the results of the last training
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def show(out):
    rows = [json.loads(line) for line in (out / "trainings.jsonl").read_text().splitlines()]
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    workers = sorted({row["workers"] for row in rows})

    def curves(optimizer, size):
        """Return samples seen, and accuracy in percent by (seed, epoch)."""
        of = [row["curve"] for row in rows if (row["optimizer"], row["workers"]) == (optimizer, size)]
        found = np.array(of)
        return found[0, :, 0], 100 * found[:, :, 1]

    lines = ["| accuracy, % | " + " | ".join(map(str, workers)) + " |", "|---|" + "---|" * len(workers)]
    for optimizer in optimizers:
        last = [curves(optimizer, size)[1][:, -1] for size in workers]
        cells = [f"{a.mean():.1f} ({a.min():.1f} to {a.max():.1f})" for a in last]
        lines.append(f"| {optimizer} | " + " | ".join(cells) + " |")
    table = "\n".join(lines)
    print(table)
    (out / "accuracy.md").write_text(table + "\n")
    draw(out, optimizers, workers, curves)


def draw(out, optimizers, workers, curves):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = workers[-1]
    figure, (over_workers, over_samples) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for i, optimizer in enumerate(optimizers):
        last = [curves(optimizer, size)[1][:, -1] for size in workers]
        mean = np.array([a.mean() for a in last])
        spread = [mean - [a.min() for a in last], [a.max() for a in last] - mean]
        x = np.array(workers) * (1 + 0.03 * (i - 1.5))  # side by side, so that each optimizer's spread is visible
        over_workers.errorbar(x, mean, spread, marker="o", capsize=3, label=optimizer)
        samples, accuracy = curves(optimizer, shown)
        over_samples.plot(samples, accuracy.mean(0), marker=".", label=optimizer)
        over_samples.fill_between(samples, accuracy.min(0), accuracy.max(0), alpha=0.2)
    over_workers.set_xscale("log", base=2)
    over_workers.set_xticks(workers, [str(w) for w in workers])
    over_workers.set(xlabel="workers", ylabel="test accuracy, %", title="at the end: mean and range of the seeds")
    over_samples.set(xlabel="samples seen by all workers", title=f"{shown} workers")
    over_samples.set_ylim(bottom=70)
    over_workers.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(out / "accuracy.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--show", action="store_true")
    args, rest = parser.parse_known_args()
    if not args.show:
        (args.out / "trainings.jsonl").unlink(missing_ok=True)
        for size in args.workers:
            command = ["kungfu-run", "-q", "-np", str(size), sys.executable, str(HERE / "train.py")]
            subprocess.run([*command, "--out", str(args.out / "trainings.jsonl"), *rest], check=True)
    show(args.out)


if __name__ == "__main__":
    main()
