"""MIB ROUNDS: how long a step of a network with so much weight takes, its gradients reduced in the background or not.

Rank 0 prints the median of each way, in rounds of steps that take turns in one process: the default, `overlap=True`,
`overlap=False`, and how much of the communication was hidden.
"""

from __future__ import annotations

import statistics
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_kungfu as kf
from ms_kungfu import _core

WIDTH, BATCH, STEPS = 1024, 256, 4  # a layer has 4 MiB


def a_step(overlap: bool | None):
    layers = [nn.Dense(WIDTH, WIDTH, has_bias=False, activation="relu") for _ in range(int(sys.argv[1]) // 4)]
    net = nn.SequentialCell(*layers)
    optimizer = kf.optimizers.KungFuMomentum(net.trainable_params(), 1e-3, 0.9, overlap=overlap)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
    return step, optimizer.grad_reducer


ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
kf.init()
data = np.random.default_rng(kf.current_rank()).standard_normal((2, BATCH, WIDTH), np.float32)
x, y = Tensor(data[0]), Tensor(data[1])
ways = {str(overlap): a_step(overlap) for overlap in (None, True, False)}
for step, _ in ways.values():
    step(x, y).asnumpy()
seconds: dict[str, list[float]] = {way: [] for way in ways}
traffic = {way: np.zeros(2) for way in ways}
for _ in range(int(sys.argv[2])):
    for way, (step, _) in ways.items():
        before = np.array(_core.traffic()[2:4])
        for _ in range(STEPS):
            kf.run_barrier()
            begin = time.perf_counter()
            step(x, y).asnumpy()
            seconds[way].append(time.perf_counter() - begin)
        traffic[way] += np.array(_core.traffic()[2:4]) - before
if kf.current_rank() == 0:
    for way, (_, reducer) in ways.items():
        busy, exposed = traffic[way]
        print(
            f"overlap {way}: {statistics.median(seconds[way]) * 1e3:.1f} ms a step, {1 - exposed / busy:.2f} hidden, "
            f"{len(reducer.plan.groups)} groups, overlapped {reducer.overlapped}",
            flush=True,
        )
