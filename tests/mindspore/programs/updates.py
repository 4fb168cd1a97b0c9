"""OUT SCHEDULE MODE [DEATH]: each optimizer trains parameters of its own; every worker reports its models after each
step. The last worker kills itself when step DEATH begins.

The gradients are given, not differentiated: 0.3 * w + noise(rank, step), which tests/mindspore/test_updates.py knows.
"""

import json
import os
import signal
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from ending import end
from mindspore import Parameter, Tensor, nn

import ms_kungfu as kf
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import (
    AdaptiveSGDOptimizer,
    PairAveragingOptimizer,
    SynchronousAveragingOptimizer,
    SynchronousSGDOptimizer,
)

OUT, SCHEDULE, MODE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
ms.set_context(mode=ms.GRAPH_MODE if MODE == "graph" else ms.PYNATIVE_MODE)
STEPS, SHAPES = 12, ((3, 5), (7,))


def noise(rank, step):
    return [np.random.RandomState(1000 * step + 10 * rank + i).randn(*shape) for i, shape in enumerate(SHAPES)]


def make(name):
    start = np.random.RandomState(1)
    return [Parameter(Tensor(start.randn(*s).astype(np.float32)), name=f"{name}.{i}") for i, s in enumerate(SHAPES)]


MAKERS = {
    "ssgd": lambda p: SynchronousSGDOptimizer(nn.Momentum(p, 0.1, 0.9)),
    "sma": lambda p: SynchronousAveragingOptimizer(nn.Momentum(p, 0.1, 0.9), name="sma"),
    "sma momentum": lambda p: SynchronousAveragingOptimizer(nn.SGD(p, 0.1), 0.5, momentum=0.7, name="sma momentum"),
    "pair": lambda p: PairAveragingOptimizer(nn.Momentum(p, 0.1, 0.9), seed=kf.uid(), name="random"),
    "pair in turn": lambda p: PairAveragingOptimizer(nn.SGD(p, 0.1), "round-robin", prefetch=False, name="in turn"),
    "adaptive": lambda p: AdaptiveSGDOptimizer(nn.Momentum(p, 0.1, 0.9), 3, prefetch=False),
}
SWITCHES = {5: "pair", 8: "sma", 10: "ssgd"}  # of "adaptive", after these steps
ALGORITHMS = ["sma"] * 3 + ["ssgd"] * 3 + ["pair"] * 3 + ["sma"] * 2 + ["ssgd"]
models = {name: make(name) for name in MAKERS}
optimizers = {name: maker(models[name]) for name, maker in MAKERS.items()}
# What one worker must agree with, bit for bit.
plain = {
    name: nn.SGD(make("plain." + name), 0.1)
    if isinstance(optimizer.optimizer, nn.SGD)
    else nn.Momentum(make("plain." + name), 0.1, 0.9)
    for name, optimizer in optimizers.items()
}
report = (OUT / f"{kf.uid()}.jsonl").open("a")


def gradients(parameters, rank, step):
    return tuple(Tensor((0.3 * p.asnumpy() + n).astype(np.float32)) for p, n in zip(parameters, noise(rank, step)))


elastic = ElasticTraining(*optimizers.values(), schedule=None if SCHEDULE == "none" else SCHEDULE, wait=True)
elastic.begin()
while elastic.step < STEPS and not elastic.should_stop:
    rank, size = kf.current_rank(), kf.current_cluster_size()
    row = {"step": elastic.step, "rank": rank, "size": size, "uid": kf.uid(), "models": {}, "sources": {}}
    if sys.argv[4:] == [str(elastic.step)] and rank == size - 1 > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert optimizers["adaptive"].algorithm == ALGORITHMS[elastic.step]
    for name, optimizer in optimizers.items():
        optimizer(gradients(models[name], rank, elastic.step))
        row["models"][name] = np.concatenate([p.asnumpy().ravel() for p in models[name]]).tolist()
        if "pair" in name or name == "adaptive":
            row["sources"][name] = optimizer.last_exchange()
        if SCHEDULE == "none" and size == 1:
            plain[name](gradients(plain[name].parameters, rank, elastic.step))
            for mine, theirs in zip(models[name], plain[name].parameters):
                assert mine.asnumpy().tobytes() == theirs.asnumpy().tobytes(), f"{name} is not the inner one"
    report.write(json.dumps(row) + "\n")
    report.flush()
    if elastic.step in SWITCHES:
        optimizers["adaptive"].switch_to(SWITCHES[elastic.step])
    elastic.step_end()
if not kf.detached():
    rank, size = kf.current_rank(), kf.current_cluster_size()
    if size > 1:
        try:
            optimizers["adaptive"].switch_to("pair" if rank == 1 else "sma")
        except kf.CollectiveMismatchError as error:
            assert "rank 0: sma, rank 1: pair" in str(error), error
        else:
            raise AssertionError("the ranks may not switch to different algorithms")
        assert optimizers["adaptive"].algorithm == "ssgd"
    before = optimizers["sma"].parameters[0].asnumpy().copy()
    optimizers["sma"].merge()
    merged = optimizers["sma"].parameters[0].asnumpy()
    expected = kf.comm.all_reduce(before, op="mean", name="expected")
    # A sum of `size` terms and a division, in two orders.
    largest = float(kf.comm.all_reduce(np.abs(before).max(keepdims=True), op="max", name="largest").max())
    np.testing.assert_allclose(merged, expected, rtol=0, atol=2 * (size + 1) * 2.0**-24 * largest)
    everyones = kf.comm.all_gather(merged, name="merged").reshape(kf.current_cluster_size(), -1)
    assert (everyones == everyones[0]).all()
end()
