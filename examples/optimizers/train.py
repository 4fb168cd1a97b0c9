"""Train a small network on the digits with each optimizer in turn, and print a JSON line per training run.

Start it with kungfu-run -np 4 python train.py, or let compare.py do so.
"""

import argparse
import json
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from sklearn.datasets import load_digits

import ms_kungfu as kf
from ms_kungfu.optimizers import PairAveragingOptimizer, SynchronousAveragingOptimizer, SynchronousSGDOptimizer

TRAINED_ON = 1200


def digits():
    """Return 1200 samples to train on and 597 to test on, the same on each worker."""
    data = load_digits()
    x, y = (data.data / 16 - 0.3).astype(np.float32), data.target.astype(np.int32)
    order = np.random.RandomState(0).permutation(len(x))
    x, y = x[order], y[order]
    return (x[:TRAINED_ON], y[:TRAINED_ON]), (x[TRAINED_ON:], y[TRAINED_ON:])


def weights(seed, hidden=32):
    random = np.random.RandomState(seed)
    first, second = random.randn(hidden, 64) / 8, random.randn(10, hidden) / hidden**0.5
    return [w.astype(np.float32) for w in (first, np.zeros(hidden), second, np.zeros(10))]


class Contender:
    """An optimizer with its own network and step, compiled once and used for every seed."""

    def __init__(self, around, args):
        self.net = nn.SequentialCell(nn.Dense(64, 32), nn.ReLU(), nn.Dense(32, 10))
        self.inner = nn.Momentum(self.net.trainable_params(), args.learning_rate, args.momentum)
        self.optimizer = around(self.inner)
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        self.step = nn.TrainOneStepCell(nn.WithLossCell(self.net, loss), self.optimizer).set_train()
        self.begin = {p: p.asnumpy().copy() for p in self.optimizer.get_parameters()}

    def reset(self, seed, learning_rate):
        for parameter, value in self.begin.items():
            parameter.set_data(Tensor(value))
        for parameter, value in zip(self.net.trainable_params(), weights(seed)):
            parameter.set_data(Tensor(value))
        self.inner.learning_rate.set_data(Tensor(learning_rate, ms.float32))
        if isinstance(self.optimizer, PairAveragingOptimizer):
            kf.run_barrier()  # now no worker is still training with the last seed,
            self.optimizer.publish()
            kf.run_barrier()  # and now none can receive a model of the last seed

    def accuracy(self, x, y):
        """Return the accuracy of the mean of all workers' models, without changing the models."""
        model = [kf.comm.all_reduce(p.asnumpy(), op="mean", name="mean") for p in self.net.trainable_params()]
        hidden = np.maximum(x @ model[0].T + model[1], 0)
        return float(((hidden @ model[2].T + model[3]).argmax(1) == y).mean())


def train(contender, seed, args, train_data, test_data):
    """Return (samples seen by all workers, accuracy) at the end of each epoch."""
    rank, size = kf.current_rank(), kf.current_cluster_size()
    x, y = train_data
    random = np.random.RandomState(1000 + seed)
    batch = size * args.batch_size
    curve = []
    for epoch in range(args.epochs):
        order = random.permutation(len(x))  # the same on all workers; each uses its part of each global batch
        for first in range(0, len(x) - batch + 1, batch):
            mine = order[first + rank * args.batch_size : first + (rank + 1) * args.batch_size]
            contender.step(Tensor(x[mine]), Tensor(y[mine]))
        curve.append(((epoch + 1) * (len(x) // batch) * batch, contender.accuracy(*test_data)))
    return curve


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "trainings.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4, help="of each worker")
    parser.add_argument("--learning-rate", type=float, default=0.07, help="of one worker")
    parser.add_argument("--momentum", type=float, default=0.9)
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    kf.init()
    size = kf.current_cluster_size()
    train_data, test_data = digits()
    ssgd = Contender(SynchronousSGDOptimizer, args)
    contenders = {
        # The usual rule for large batches: a learning rate proportional to the batch.
        "S-SGD, learning rate x workers": (ssgd, size * args.learning_rate),
        "S-SGD, same learning rate": (ssgd, args.learning_rate),
        "SMA": (Contender(SynchronousAveragingOptimizer, args), args.learning_rate),
        # Without prefetch: the model prefetched for the first step of a seed would be from the last seed.
        "pair averaging": (Contender(lambda o: PairAveragingOptimizer(o, prefetch=False), args), args.learning_rate),
    }
    for name, (contender, learning_rate) in contenders.items():
        for seed in range(args.seeds):
            contender.reset(seed, learning_rate)
            curve = train(contender, seed, args, train_data, test_data)
            if kf.current_rank() == 0:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    row = {"optimizer": name, "workers": size, "seed": seed, "curve": curve}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
