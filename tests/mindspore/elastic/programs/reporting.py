"""What the programs of this folder share: a report for each worker, data whose samples are their own numbers, networks
and steps for them, and a worker's death."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn

import ms_kungfu as kf

sys.path.append(str(Path(__file__).parents[2] / "programs"))
from ending import end  # noqa: F401  for the programs beside this file

_path = Path(sys.argv[1]) / f"{kf.uid()}.jsonl"


def report(kind, **values):
    """Appends one line to this worker's report."""
    with _path.open("a") as file:
        row = {"kind": kind, "rank": kf.current_rank(), "size": kf.current_cluster_size(), **values}
        file.write(json.dumps(row) + "\n")


def digest(parameters):
    """Differs where one bit of one parameter does."""
    total = hashlib.sha256()
    for p in parameters:
        total.update(p.name.encode() + p.asnumpy().tobytes())
    return total.hexdigest()[:16]


class Numbered:
    """Sample i: features that depend on i, a target that depends on them, and i itself in the target's last place."""

    def __init__(self, total):
        random = np.random.RandomState(0)
        self.x = random.randn(total, 4).astype(np.float32)
        self.y = np.concatenate([self.x[:, :2] * 2 + 1, np.arange(total)[:, None]], axis=1).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def numbered(total):
    return ds.GeneratorDataset(Numbered(total), ["x", "y"], shuffle=False)


def numbers(y):
    """The samples' numbers in a batch of targets."""
    return y.asnumpy()[:, -1].astype(int).tolist()


class Loss(nn.Cell):
    """Mean squared error without the sample's number."""

    def construct(self, output, y):
        return ((output - y[:, :2]) ** 2).mean()


def layers(*between):
    """A network for them with a hidden layer of eight, and `between` before the last one."""
    return nn.SequentialCell(nn.Dense(4, 8), *between, nn.Dense(8, 2))


def training_step(net, optimizer, jit=False):
    """A step of a loop of one's own: takes a batch, updates, gives the loss. With `jit` all of it is compiled, in the
    style of MindSpore's comm-fusion tutorial."""
    loss_fn = Loss()

    def forward(x, y):
        return loss_fn(net(x), y)

    grad_fn = ms.value_and_grad(forward, None, net.trainable_params())

    def step(x, y):
        loss, gradients = grad_fn(x, y)
        optimizer(gradients)
        return loss

    return ms.jit(step) if jit else step


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
