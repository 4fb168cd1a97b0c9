"""NETWORK STEPS: the CPU time that monitoring takes of a step, with everything on.

NETWORK is lenet (batches of 32) or resnet-50 (of 32 images of 32x32, the least work for so many gradients).
Prints "CPU milliseconds of the monitor, of a step" and "milliseconds of the fastest step".
"""

import statistics
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

import ms_kungfu as kf
from ms_kungfu.elastic import ElasticTraining, NoiseScalePolicy, StragglerPolicy, ThroughputPolicy
from ms_kungfu.monitoring import Monitor
from ms_kungfu.optimizers import KungFuMomentum

EXAMPLES = Path(__file__).parents[3] / "examples"
name, steps = sys.argv[1], int(sys.argv[2])
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
if name == "lenet":
    sys.path.insert(0, str(EXAMPLES / "lenet-elastic"))
    from model import LeNet5

    net, shape = LeNet5(), (32, 1, 28, 28)
else:
    sys.path.insert(0, str(EXAMPLES / "resnet-cifar10"))
    from resnet import ResNet

    net, shape = ResNet(50), (32, 3, 32, 32)
optimizer = KungFuMomentum(net.trainable_params(), 0.001, 0.9)
loss_fn = nn.CrossEntropyLoss()


def forward(image, label):
    return loss_fn(net(image), label)


grad_fn = ms.value_and_grad(forward, None, net.trainable_params())


@ms.jit
def train_step(image, label):
    loss, grads = grad_fn(image, label)
    optimizer(grads)
    return loss


random = np.random.default_rng(1)
image = ms.Tensor(random.standard_normal(shape).astype(np.float32))
label = ms.Tensor(random.integers(0, 10, shape[0]).astype(np.int32))


def run(update_ratio_interval):
    """(CPU seconds of the monitor, of the process, wall seconds) of each step."""
    monitor = Monitor(f"{kf.uid()}.jsonl", update_ratio_interval=update_ratio_interval)
    # Policies that look at everything and, with one size to choose from, change nothing.
    here = kf.current_cluster_size()
    policy = [NoiseScalePolicy(here, here), StragglerPolicy(1e9), ThroughputPolicy(here, here)]
    elastic = ElasticTraining(net, optimizer, monitor=monitor, policy=policy)
    elastic.begin()
    rows = []
    for step in range(steps + 2):
        before = monitor.cpu_seconds + monitor._cpu_s, time.process_time(), time.perf_counter()
        loss = train_step(image, label)
        elastic.step_end(loss, shape[0])
        after = monitor.cpu_seconds + monitor._cpu_s, time.process_time(), time.perf_counter()
        if step >= 2:
            rows.append([new - old for new, old in zip(after, before)])
    elastic.end()
    return np.array(rows)


plain, with_ratio = run(0), run(1)
own = statistics.median(plain[:, 0])
ratio = max(0.0, statistics.median(with_ratio[:, 0]) - own)
step = statistics.median(plain[:, 1]) - own
fastest = plain[:, 2].min()
spent = own + ratio / 100  # by default it is measured every 100 steps
print(
    f"{name}, {kf.current_cluster_size()} workers: monitor {spent * 1e3:.3f} ms of CPU (each step {own * 1e3:.3f}, "
    f"an update ratio {ratio * 1e3:.3f}), step {step * 1e3:.1f} ms of CPU, fastest {fastest * 1e3:.1f} ms; "
    f"share {spent / step:.5f} {spent / fastest:.5f}",
    flush=True,
)
