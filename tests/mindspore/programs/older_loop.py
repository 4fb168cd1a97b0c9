"""A hand-written loop over KungFu's primitives as programs for its source-tree integration have it."""

import sys

import mindspore as ms
import mindspore.ops.operations.kungfu_comm_ops as kfops
import numpy as np
from mindspore.ops.operations.comm_ops import ReduceOp
from mindspore.ops.operations.kungfu_comm_ops import KungFuAllReduce, KungFuBroadcast, KungFuResize

ms.context.set_context(mode=ms.context.GRAPH_MODE if sys.argv[1] == "graph" else ms.context.PYNATIVE_MODE)
kfops.init("CPU")
rank, size = kfops.kungfu_current_rank(), kfops.kungfu_current_cluster_size()

all_reduce, all_reduce_max, broadcast, resize = (
    KungFuAllReduce(),
    KungFuAllReduce(op=ReduceOp.MAX),
    KungFuBroadcast(),
    KungFuResize(),
)
xs = [ms.Tensor(np.full(n, rank + 1.0).astype(np.float32)) for n in (1, 3, 100)]
assert int(all_reduce_max(ms.Tensor(rank * 10, dtype=ms.float32)).asnumpy()) == (size - 1) * 10
for _ in range(3):
    for y in [all_reduce(x) for x in xs]:
        assert (y.asnumpy() == size * (size + 1) / 2).all()
    changed, detached = resize(ms.Tensor(size, dtype=ms.uint32))
    assert not changed
    assert not detached
assert float(broadcast(ms.Tensor(rank + 5.0, dtype=ms.float32)).asnumpy()) == 5.0
kfops.run_barrier()
kfops.finalize("CPU")
