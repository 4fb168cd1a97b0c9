"""[ROUNDS]: how long LeNet takes from kungfu-run to its first step, and from `kungfu-run resize` to the larger cluster.

Each round runs the jobs of `SIZES` twice, without and with forked workers. Prints the medians of the rounds in seconds.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore.train import Callback, Model

import ms_kungfu as kf
from ms_kungfu._processes import end_launcher
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks
SIZES = ((1, 2), (2, 4))  # before and after the growth


class FirstStep(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 1 and kf.current_rank() == 0:
            print("first step", flush=True)


def train():
    from benchmarks import networks

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    random = np.random.default_rng(1)
    images, labels = random.random((2048, 1, 28, 28), np.float32), random.integers(0, 10, 2048, np.int32)
    data = ElasticDataset(ds.NumpySlicesDataset((images, labels), ["x", "y"], shuffle=False), global_batch_size=32)
    net = networks.lenet()
    model = Model(net, networks.Loss(), KungFuMomentum(net.trainable_params(), 0.01, 0.9))
    model.train(1_000_000, data, callbacks=[KungFuElasticCallback(), FirstStep()])


def measured(before, after, preload):
    """Return the seconds until the first step of `before` workers, and until the growth to `after` workers."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "KUNGFU_PRELOAD": preload}
        launcher = [sys.executable, "-m", "ms_kungfu.launcher"]
        began = time.monotonic()
        job = subprocess.Popen(
            [*launcher, "-np", str(before), "-w", sys.executable, __file__, "train"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            started = until(job, "first step", began)
            time.sleep(3)  # the workers compile in advance
            began = time.monotonic()
            subprocess.run([*launcher, "resize", str(after)], env=environment, check=True, stdout=subprocess.DEVNULL)
            return started, until(job, f"cluster committed: version=1 workers={after}", began)
        finally:
            end_launcher(job)


def until(job, pattern, began):
    """Return the seconds since `began` when the job prints a line like `pattern`."""
    for line in job.stdout:
        if re.search(pattern, line):
            return time.monotonic() - began
    raise RuntimeError("the job has ended")


def main(rounds):
    found = {}
    for _ in range(rounds):
        for sizes in SIZES:
            for preload in "01":
                found.setdefault((sizes, preload), []).append(measured(*sizes, preload))
    print("| workers | forked | first step, s | growth, s |\n|---|---|---|---|")
    for ((before, after), preload), times in found.items():
        first, growth = (statistics.median(each) for each in zip(*times))
        print(f"| {before}, then {after} | {'yes' if preload == '1' else 'no'} | {first:.2f} | {growth:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
