"""[ROUNDS]: the longest step of a survivor at a planned growth (2 -> 4), a kill and a planned shrink (4 -> 2).

The program is README's with more epochs. It runs in both modes of MindSpore, without shards and with ``shards="auto"``.
Prints the medians of the rounds, and the largest value of each, in milliseconds.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model

import ms_kungfu as kf
from ms_kungfu._processes import end_launcher

GROWTH, KILL, SHRINK, EPOCHS = 1600, 2200, 3200, 250  # steps, but 250 epochs of 16 steps
SECONDS = 120


class Times(Callback):
    """Writes when each step ended."""

    def on_train_step_end(self, run_context):
        row = run_context.original_args().cur_step_num, time.monotonic(), kf.current_cluster_size()
        with open(f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


def train(mode, shards):
    ms.set_context(mode=int(mode))
    random = np.random.default_rng(0)
    x = random.normal(size=(512, 8)).astype(np.float32)
    y = (x @ random.normal(size=(8, 1))).astype(np.float32)
    samples = ds.NumpySlicesDataset((x, y), ["x", "y"], shuffle=False)
    net = nn.Dense(8, 1)
    data = kf.dataset.ElasticDataset(samples, global_batch_size=32, shards=shards if shards == "auto" else None)
    optimizer = kf.optimizers.KungFuMomentum(net.trainable_params(), 0.05, 0.9)
    elastic = kf.callbacks.KungFuElasticCallback(f"{GROWTH}:4,{SHRINK}:2", wait=True)
    Model(net, nn.MSELoss(), optimizer).train(EPOCHS, data, callbacks=[elastic, Times()], dataset_sink_mode=False)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]


def measured(mode, shards):
    """Return the longest step at the growth, the kill and the shrink, and the median steps of 2 and of 4 workers."""
    with tempfile.TemporaryDirectory() as name:
        folder, program = Path(name), [sys.executable, __file__, "train", str(mode), shards]
        job = subprocess.Popen(
            [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-np", "2", "-w", *program],
            cwd=folder, env={**os.environ, "XDG_RUNTIME_DIR": name},
        )  # fmt: skip
        try:
            killed, at = kill_one(folder)
            if job.wait(SECONDS) != 0:
                raise RuntimeError("the job failed")
        finally:
            end_launcher(job)
        stayed = max((rows_of(path) for path in folder.glob("*.jsonl") if path.stem != str(killed)), key=len)
    steps = [(number, end, end - begin, size) for (_, begin, _), (number, end, size) in zip(stayed, stayed[1:])]

    def longest(first, last):
        return max(spent for number, _, spent, _ in steps if first <= number <= last)

    around = max(spent for number, end, spent, _ in steps if at <= end <= at + 6 and number < SHRINK - 50)
    medians = [statistics.median(spent for _, _, spent, size in steps if size == n) for n in (2, 4)]
    return [longest(GROWTH, GROWTH + 100), around, longest(SHRINK - 10, SHRINK + 100), *medians]


def kill_one(folder):
    """Kill a worker of the grown cluster. Return its process ID and when it was killed."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(0.02)
        for path in folder.glob("*.jsonl"):
            rows = rows_of(path)
            if rows and rows[-1][0] >= KILL:
                os.kill(int(path.stem), signal.SIGKILL)
                return int(path.stem), time.monotonic()
    raise RuntimeError("training didn't reach the step of the kill")


def main(rounds):
    found = {}
    for _ in range(rounds):
        for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
            for shards in ("none", "auto"):
                found.setdefault((mode, shards), []).append(measured(mode, shards))
    print(
        "| mode | shards | growth | kill | shrink | step, 2 workers | step, 4 workers |\n|---|---|---|---|---|---|---|"
    )
    for (mode, shards), times in found.items():
        each = [f"{statistics.median(t) * 1e3:.1f}, at most {max(t) * 1e3:.1f}" for t in zip(*times)]
        print(f"| {'GRAPH' if mode == ms.GRAPH_MODE else 'PyNative'} | {shards} | {' | '.join(each)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
