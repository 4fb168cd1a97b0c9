"""How long a step takes with and without overlap: `overlap_time.py NAP.so`.

The backward pass has four kernels that sleep for 20 ms; KUNGFU_TEST_COMM_DELAY_MS makes communication take as long. A
sleep needs no core, so the times hold on a busy machine.
"""

from __future__ import annotations

import statistics
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import ms_kungfu as kf
from ms_kungfu.optimizers import KungFuMomentum

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
LAYERS, STEPS, WARM_UP = 4, 12, 2


class Nap(nn.Cell):
    def __init__(self):
        super().__init__()
        self.nap = ops.Custom(f"{sys.argv[1]}:Nap", lambda x: x, lambda x: x, func_type="aot")

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (self.nap(dout),)


def times_ms(overlap):
    cells = [cell for _ in range(LAYERS) for cell in (nn.Dense(8, 8, has_bias=False), Nap())]
    net = nn.SequentialCell(*cells)
    optimizer = KungFuMomentum(net.trainable_params(), 0.01, 0.9, fusion="none", overlap=overlap)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
    x, y = Tensor(np.ones((3, 8), np.float32)), Tensor(np.zeros((3, 8), np.float32))
    times = []
    for _ in range(WARM_UP + STEPS):
        kf.run_barrier()
        begin = time.perf_counter()
        step(x, y).asnumpy()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[WARM_UP:]


kf.init()
for overlap in (True, False):
    print(f"overlap {overlap}: {statistics.median(times_ms(overlap)):.1f} ms")
