"""MIB: trains one number beside a frozen weight of that size.

After each change it prints a line as `recovery.py` does, which goes on with the seconds that the change took, and what
the frozen weight adds up to.
"""

from __future__ import annotations

import os
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import nn

import ms_kungfu as kf
from ms_kungfu.elastic import ElasticTraining


class Heavy(nn.Cell):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.frozen = ms.Parameter(ms.Tensor(np.zeros(count, np.float32)), name="frozen", requires_grad=False)
        self.weight = ms.Parameter(ms.Tensor([1.0]), name="weight")

    def construct(self, x):
        return self.weight * x


kf.init()
net = Heavy(int(sys.argv[1]) << 18)
optimizer = kf.optimizers.KungFuMomentum([net.weight], learning_rate=0.0, momentum=0.9)
grad = ms.grad(net, None, [net.weight])
if kf.cluster_version() == 0:
    net.frozen.set_data(ms.Tensor(np.arange(net.frozen.size) % 8, ms.float32))
elastic = ElasticTraining(net, optimizer)
elastic.begin()
told, began = None, time.monotonic()
while not elastic.should_stop:
    if kf.cluster_version() != told:
        told, now = kf.cluster_version(), time.monotonic()
        rank, size, total = kf.current_rank(), kf.current_cluster_size(), net.frozen.asnumpy().sum(dtype=np.float64)
        print(
            f"in version {told} rank {rank} of {size} pid {os.getpid()} step {elastic.step} uid {kf.uid()} "
            f"after {now - began:.3f} s with {total:.0f}",
            flush=True,
        )
    began = time.monotonic()
    time.sleep(0.05)
    optimizer(grad(ms.Tensor([1.0])))
    elastic.step_end()
