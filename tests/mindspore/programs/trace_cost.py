"""BLOCKS STEPS: what a trace takes of a step of LeNet, of 32 samples per worker.

Blocks of STEPS steps with and without a trace take turns, in one process. Prints the median over the blocks of the
CPU time of the process and of the shortest step, with and without, and the CPU time of the thread that writes.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

import ms_kungfu as kf
from ms_kungfu import _core
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import KungFuMomentum

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "lenet-elastic"))
from model import LeNet5

blocks, steps = map(int, sys.argv[1:])
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
net = LeNet5()
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
image = ms.Tensor(random.standard_normal((32, 1, 28, 28)).astype(np.float32))
label = ms.Tensor(random.integers(0, 10, 32).astype(np.int32))


def writer_s():
    """CPU seconds of the thread that writes the trace; it lives as long as the trace."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "kungfu-trace\n":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


elastic = ElasticTraining(net, optimizer)
elastic.begin()
found = {True: [], False: []}  # traced -> (CPU seconds of a step, seconds of the shortest, the writer's of a step)
size = 0
for block in range(2 * blocks + 2):
    traced = block % 2 == 0
    if traced:
        fd, path = tempfile.mkstemp()
        _core.trace_start(fd, path, 1 << 30)
    cpu, times = time.process_time(), []
    for _ in range(steps):
        began = time.perf_counter()
        elastic.step_end(train_step(image, label), 32)
        times.append(time.perf_counter() - began)
    cpu, writer = time.process_time() - cpu, writer_s() if traced else 0.0
    if traced:
        _core.trace_stop()
        size = os.path.getsize(path)
        os.unlink(path)
    if block >= 2:  # the first ones compile
        found[traced].append((cpu / steps, min(times), writer / steps))
elastic.end()
on, off = (np.median(found[traced], axis=0) * 1e6 for traced in (True, False))
print(
    f"rank {kf.current_rank()}: CPU of a step {off[0]:.0f} us, traced {on[0]:.0f} us; shortest step {off[1]:.0f} us, "
    f"traced {on[1]:.0f} us; writer {on[2]:.1f} us of CPU a step; {size / steps:.0f} bytes a step",
    flush=True,
)
