"""How fast the other workers are beside one that is slowed down 5 times, and whether they go on when it has ended.

Compute is modelled by sleeping, so that cores don't decide. The last line is {algorithm: speed beside the straggler,
as a part of the speed without it}, of the slowest of the others.
"""

import json
import time

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import ms_kungfu as kf
from ms_kungfu import comm
from ms_kungfu.optimizers import PairAveragingOptimizer, SynchronousSGDOptimizer

ms.set_context(mode=ms.GRAPH_MODE)
kf.init()
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
STRAGGLER = SIZE - 1
STEP_S, SLOWED, STEPS = 0.2, 5, 10


def make(name, around):
    return around(nn.Momentum([Parameter(Tensor(np.ones(1000, np.float32)), name=name)], 0.1, 0.9))


optimizers = {
    "pair": make("pair", lambda inner: PairAveragingOptimizer(inner, seed=RANK)),
    "ssgd": make("ssgd", SynchronousSGDOptimizer),
}


def step(optimizer, compute_s=0.0):
    time.sleep(compute_s)
    optimizer((Tensor(np.full(1000, RANK + 1, np.float32)),))


def seconds_per_step(optimizer, steps, compute_s):
    kf.run_barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step(optimizer, compute_s)
    return (time.perf_counter() - begin) / steps


def relative_speed(name):
    optimizer = optimizers[name]
    step(optimizer)  # compiles
    fast = seconds_per_step(optimizer, STEPS, STEP_S)
    slow = RANK == STRAGGLER
    # Asynchronous workers make as many steps as they can in the same time; synchronous ones must make the same number.
    steps = STEPS // SLOWED if slow and name == "pair" else STEPS
    beside = seconds_per_step(optimizer, steps, STEP_S * (SLOWED if slow else 1))
    others = comm.all_gather(np.array([fast / beside]), name="speed").ravel()[:STRAGGLER]
    return float(others.min())


speeds = {name: relative_speed(name) for name in optimizers}
pair = optimizers["pair"]
comm.save("here", np.zeros(1))
kf.run_barrier()
if RANK != STRAGGLER:
    while comm.request(STRAGGLER, "here") is not None:
        step(pair)
    step(pair)  # may take what was fetched ahead, before the end
    for _ in range(20):
        step(pair)
        assert pair.last_exchange()[0] in set(range(STRAGGLER)) - {RANK}, pair.last_exchange()
    if RANK == 0:
        print(json.dumps(speeds))
