"""Measure the time of a training step for different sizes of fusion groups, and draw it.

Start it with kungfu-run -np 2 python sweep.py
"""

import argparse
import json
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from data import images
from mindspore import Tensor, nn
from network import DeepNetwork

import ms_kungfu as kf

HERE = Path(__file__).parent


def make_step(args, fusion):
    """Return a training step, its reduction alone, and the number of groups."""
    net = DeepNetwork(args.blocks, args.width, args.hidden)
    optimizer = kf.optimizers.KungFuSGD(net.trainable_params(), 1e-4, fusion=fusion)
    reducer = kf.optimizers.KungFuGradReducer(net.trainable_params(), name="alone", fusion=fusion)
    loss_fn = nn.CrossEntropyLoss()

    def forward(image, label):
        return loss_fn(net(image), label)

    grad_fn = ms.value_and_grad(forward, None, net.trainable_params())

    @ms.jit
    def train_step(image, label):
        loss, grads = grad_fn(image, label)
        optimizer(grads)
        return loss

    gradients = tuple(Tensor(np.zeros(p.shape, np.float32)) for p in net.trainable_params())
    return train_step, lambda: reducer(gradients)[-1], len(optimizer.fusion_plan().groups)


def seconds(call, repeats):
    """Return the seconds per call on the slowest worker."""
    call().asnumpy()
    kf.run_barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call().asnumpy()
    mine = np.array([(time.perf_counter() - start) / repeats])
    return float(kf.comm.all_reduce(mine, op="max", name="slowest")[0])


def measure(args):
    """Yield one object per group size. Sizes take turns, so that a busy moment of the machine affects all sizes."""
    image, label = (Tensor(array[: args.batch_size]) for array in images())
    cases = {"none": "none", **{mb: {"mode": "size", "config": mb} for mb in args.sizes}}
    made = {size: make_step(args, fusion) for size, fusion in cases.items()}
    rows = {size: {"size_mb": size, "groups": made[size][2], "step": [], "reduction": []} for size in made}
    for round_number in range(args.rounds + 1):
        for size, (step, reduce, _) in made.items():
            times = seconds(lambda step=step: step(image, label), args.repeats), seconds(reduce, args.repeats)
            if round_number:  # the first round compiles
                rows[size]["step"].append(times[0])
                rows[size]["reduction"].append(times[1])
    return list(rows.values())


def draw(rows, png, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "axes.edgecolor": "#7b8794"})
    figure, panels = plt.subplots(2, 1, figsize=(8, 5.5), sharex=True, layout="constrained", dpi=150)
    x = range(len(rows))
    what = (("step", "#d64545", "training step"), ("reduction", "#2b6cb0", "its reduction alone"))
    for axes, (key, colour, label) in zip(panels, what):
        times = np.array([row[key] for row in rows]) * 1e3
        axes.plot(x, np.median(times, axis=1), "o-", color=colour, lw=2)
        low, high = np.percentile(times, [25, 75], axis=1)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        axes.set_ylim(0, 1.1 * high.max())
        axes.set_ylabel(f"{label}, ms")
        axes.spines[["top", "right"]].set_visible(False)
    names = ["not fused" if row["size_mb"] == "none" else f"{row['size_mb']} MB" for row in rows]
    groups = [f"{row['groups']} group{'s' if row['groups'] > 1 else ''}" for row in rows]
    panels[1].set_xticks(x, [f"{name}\n{count}" for name, count in zip(names, groups)])
    panels[1].set_xlabel("size of a fusion group")
    panels[0].set_title(title, loc="left", fontweight="bold")
    panels[0].set_title("median, and the middle half of the rounds", loc="right", fontsize=9, color="#7b8794")
    figure.savefig(png)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64], help="MB (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5, help="steps in a round")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for the results")
    args = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)  # all workers begin with the same weights
    kf.init()
    rows = measure(args)
    if kf.current_rank() != 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step-time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows, args.out / "step-time.png", f"{kf.current_cluster_size()} workers, {2 + 4 * args.blocks} gradients")
    for row in rows:
        step, reduction = (1e3 * float(np.median(row[what])) for what in ("step", "reduction"))
        print(f"{row['size_mb']:>5}  {row['groups']:4} groups  step {step:8.2f} ms  reduction {reduction:8.2f} ms")


if __name__ == "__main__":
    main()
