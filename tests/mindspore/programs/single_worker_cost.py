"""A LeNet step with KungFuMomentum on one worker against one with nn.Momentum, interleaved: `... graph|pynative PAIRS`.

Prints the medians in milliseconds and the ratio of the two.
"""

from __future__ import annotations

import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_kungfu.optimizers import KungFuMomentum

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)


def lenet():
    return nn.SequentialCell(
        nn.Conv2d(1, 6, 5, pad_mode="valid"),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5, pad_mode="valid"),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Dense(16 * 4 * 4, 120),
        nn.ReLU(),
        nn.Dense(120, 84),
        nn.ReLU(),
        nn.Dense(84, 10),
    )


def make_step(optimizer_class):
    net = lenet()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    optimizer = optimizer_class(net.trainable_params(), 0.02, 0.9)
    return nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer).set_train()


images = Tensor(np.random.RandomState(0).rand(32, 1, 28, 28).astype(np.float32))
labels = Tensor(np.arange(32, dtype=np.int32) % 10)
steps = {cls: make_step(cls) for cls in (nn.Momentum, KungFuMomentum)}
times: dict[type, list[float]] = {cls: [] for cls in steps}
for pair in range(int(sys.argv[2]) + 5):
    order = list(steps) if pair % 2 else list(steps)[::-1]
    for cls in order:
        start = time.perf_counter()
        steps[cls](images, labels).asnumpy()
        if pair >= 5:
            times[cls].append(time.perf_counter() - start)
plain, ours = (float(np.median(times[cls])) * 1e3 for cls in steps)
print(f"plain {plain:.3f} ms, ours {ours:.3f} ms, ratio {ours / plain:.4f}")
