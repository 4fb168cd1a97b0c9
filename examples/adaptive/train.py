"""Train until a target loss is reached. A policy decides the number of workers; compare.py runs each policy.

    kungfu-run -np 2 -w python train.py --policy noise-scale

Sleeping simulates computation and network, so the policies are compared independently of the number of cores. A worker
computes `--compute-ms` per step. The network, which gets congested, needs `--network-ms` times (n - 1)^2.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import problem
from mindspore import nn

import ms_kungfu as kf
from ms_kungfu.elastic import Decision, ElasticTraining, NoiseScaleLearningRate, NoiseScalePolicy, Policy
from ms_kungfu.monitoring import Monitor
from ms_kungfu.optimizers import KungFuSGD

HERE = Path(__file__).parent


class RandomPolicy(Policy):
    """Change to a random size at a fixed interval of steps."""

    def __init__(self, sizes, every, seed):
        self.sizes, self.every, self.seed = sizes, every, seed

    def after_step(self, q):
        if q.step % self.every:
            return None
        size = int(np.random.default_rng((self.seed, q.step)).choice(self.sizes))
        return Decision("drawn at random", size=size) if size != q.cluster_size else None


class Log:
    """Rank 0's record of each step, with the time since training began and the total seconds of all workers."""

    def __init__(self, path):
        self.path = path
        self.file = None
        self.began = self.last = time.monotonic()
        self.worker_seconds = 0.0

    def write(self, size, wanted, **values):
        now = time.monotonic()
        # Requested workers also count while they are starting.
        self.worker_seconds += (now - self.last) * max(size, wanted)
        self.last = now
        if kf.current_rank() == 0 and not kf.detached():
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("w", buffering=1)
            row = {"seconds": now - self.began, "worker_seconds": self.worker_seconds, "cluster_size": size}
            self.file.write(json.dumps({**row, **values}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=["noise-scale", "random", "fixed"], default="noise-scale")
    parser.add_argument("--sizes", default="2,4,8", help="sizes that a policy may choose from (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per worker in a step")
    parser.add_argument("--compute-ms", type=float, default=500)
    parser.add_argument("--network-ms", type=float, default=24)
    parser.add_argument(
        "--target-noise-scale", type=float, default=4800, help="train until the noise scale is this large"
    )
    parser.add_argument("--budget", type=int, default=10_000, help="the most samples to train")
    parser.add_argument("--wait", action="store_true", help="stop training while new workers start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "out" / "adaptive.jsonl")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    ms.set_context(mode=ms.GRAPH_MODE)
    sizes = [int(size) for size in args.sizes.split(",")]

    net = problem.Quadratic()
    optimizer = KungFuSGD(net.trainable_params(), 0.03)
    train_step = nn.TrainOneStepCell(net, optimizer)
    # Do this before the other workers wait for this worker and before the clock starts.
    train_step.compile(problem.batch_mean(np.random.default_rng(), args.batch_size))

    policy = [NoiseScaleLearningRate(0.3)]  # the same for all runs, so that only the sizes differ
    if args.policy == "noise-scale":
        policy.append(NoiseScalePolicy(max(sizes), min(sizes), sizes))
    elif args.policy == "random":
        policy.append(RandomPolicy(sizes, every=40, seed=args.seed))
    monitor = Monitor(half_life=15)
    elastic = ElasticTraining(net, optimizer, policy=policy, monitor=monitor, total_samples=args.budget, wait=args.wait)
    target = problem.target_loss(args.target_noise_scale)

    elastic.begin()
    log = Log(args.out)
    while not elastic.should_stop:
        size, wanted = kf.current_cluster_size(), elastic.wanted_size
        random = np.random.default_rng((args.seed, elastic.step, kf.current_rank()))
        time.sleep(args.compute_ms / 1e3)
        train_step(problem.batch_mean(random, args.batch_size))
        network = args.network_ms / 1e3 * (size - 1) ** 2
        time.sleep(network)
        monitor.communicated(network)
        loss = problem.loss(net)
        elastic.step_end(loss, args.batch_size)
        log.write(
            size,
            wanted,
            step=elastic.step,
            loss=loss,
            noise_scale=monitor.noise_scale.noise_scale,
            true_noise_scale=problem.noise_scale(loss),
        )
        if loss <= target or monitor.trained_samples >= args.budget:
            break
    elastic.end()
    if kf.current_rank() == 0 and not kf.detached():
        reached = "reached" if loss <= target else "not reached"
        print(
            f"{reached}: {elastic.step} steps, {log.last - log.began:.1f} s, {log.worker_seconds:.1f} worker-seconds",
            flush=True,
        )


if __name__ == "__main__":
    main()
