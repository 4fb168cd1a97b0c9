"""KungFu's calls under MindSpore, before and after resizes 2 -> 3 -> 1: `kungfus_calls.py graph|pynative`."""

from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
from ending import end
from mindspore import Parameter, Tensor, nn, ops

import ms_kungfu as kf
from ms_kungfu import comm, membership
from ms_kungfu.callbacks import sync_net_parameters
from ms_kungfu.elastic import consensus
from ms_kungfu.optimizers import Replicas, Synchronising, SynchronousAveragingOptimizer, move_toward

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)


class Where(nn.Cell):
    @ms.jit
    def construct(self, x):
        arrived = kf.ops.barrier()
        return kf.ops.rank() + x, kf.ops.cluster_size() + x, arrived


class OwnAveraging(Replicas, Synchronising):
    """docs/optimizers.md"""

    def __init__(self, optimizer, alpha=0.1):
        super().__init__(optimizer)
        self.mean, self.alpha, self.map = kf.ops.KungFuAllReduce("mean", "own"), alpha, ops.HyperMap()

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):
        center = self.mean(self.parameters)
        moved = self.map(ops.partial(move_toward, self.alpha), self.parameters, center)
        return self.optimizer(ops.depend(gradients, moved))


where, zero = Where(), Tensor(0, ms.int64)


def check_place():
    """The graph was compiled in a cluster of another size."""
    rank, size, arrived = (int(value) for value in where(zero))
    assert (rank, size, arrived) == (kf.current_rank(), kf.current_cluster_size(), kf.current_cluster_size())
    assert (int(kf.ops.rank()), int(kf.ops.cluster_size())) == (rank, size), "outside of a graph"


def check_consensus():
    rank, size = kf.current_rank(), kf.current_cluster_size()
    net = nn.Dense(3, 2)
    sync_net_parameters(net)
    found = consensus(net, np.arange(3), Tensor(2.5), [Parameter(Tensor([1]), name="p")])
    assert found and str(found) == "the same on all workers", found
    net.bias.set_data(Tensor(np.full(2, rank == size - 1, np.float32)))
    found = consensus(net, 7)
    if size == 1:
        assert found
        return
    assert not found and list(found.differing) == ["bias"], found
    assert list(found.differing["bias"].values()) == [[*range(size - 1)], [size - 1]], found
    assert str(found).startswith("'bias' differs: float32[2] "), found
    assert not consensus(np.zeros(2 + rank)), "other shapes"


def check_variables():
    rank, size = kf.current_rank(), kf.current_cluster_size()
    value = Parameter(Tensor([rank, kf.cluster_version()], ms.float32), name="value")
    assert kf.ops.save_variable(value) >= 1
    kf.ops.save_variable(Tensor([rank + 0.5], ms.bfloat16), "half")
    kf.run_barrier()
    for target in range(size):
        there = kf.ops.request_variable(target, "value")
        assert there.asnumpy().tolist() == [target, kf.cluster_version()], there
        half = kf.ops.request_variable(target, "half")
        assert half.dtype == ms.bfloat16 and half.astype(ms.float32).asnumpy().tolist() == [target + 0.5], half
        assert kf.ops.request_variable(target, "nothing") is None
    kf.run_barrier()


def check_own_algorithm():
    rng = np.random.default_rng(kf.current_rank())
    weights, gradients = (rng.normal(size=5).astype(np.float32) for _ in range(2))
    results = []
    for make in (OwnAveraging, SynchronousAveragingOptimizer):
        weight = Parameter(Tensor(weights), name="w")
        optimizer = make(nn.Momentum([weight], 0.1, 0.9))
        for _ in range(3):
            optimizer((Tensor(gradients),))
        assert optimizer.replicas_differ
        optimizer.merge()
        assert consensus(weight)
        results.append(weight.asnumpy())
    assert np.array_equal(*results), results


def check_all():
    check_place()
    check_consensus()
    check_variables()


kf.init()
if membership.is_joining():
    comm.broadcast(np.zeros(1), root=membership.sync_root(), name="step")
    membership.state_received()
    check_all()
else:
    check_all()
    check_own_algorithm()
    assert kf.resize(3) == (True, False)
    comm.broadcast(np.zeros(1), root=membership.sync_root(), name="step")
    check_all()
_, detached = kf.resize(1)
if not detached:
    check_all()
print("fine")
end()
