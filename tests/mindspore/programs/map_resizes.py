"""Per-tensor all-reduces through a Map, as in programs for KungFu's source-tree integration, over many resizes.

MindSpore launches independent operators in one order at a process's first step and in another at its later ones. Here a
joiner's first step meets a veteran's later one again and again.
"""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.ops import composite as C

import ms_kungfu  # noqa: F401  the next import exists from here on

import mindspore.ops.operations.kungfu_comm_ops as kfops  # isort: skip

plan = [int(size) for size in sys.argv[1:]]
ms.set_context(mode=ms.GRAPH_MODE)
SHAPES = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,), (3,), ()]


class Reduce(nn.Cell):
    def __init__(self):
        super().__init__()
        self.map_ = C.Map()
        self.all_reduce = kfops.KungFuAllReduce()

    def construct(self, *gradients):
        return self.map_(self.all_reduce, gradients)


class Resize(nn.Cell):
    def __init__(self):
        super().__init__()
        self.resize = kfops.KungFuResize()

    def construct(self, size):
        return self.resize(size)


def step_of_the_others(step):
    """A joining worker learns the step by summing: the members bring it, the joining workers 0 of 0."""
    known = reduce_(ms.Tensor(np.array([step, 1] if step >= 0 else [0, 0], np.float32)))[0].asnumpy()
    return int(known[0] / known[1]) if known[1] else 0


with kfops.KungFuContext(device="CPU"):
    reduce_, resize = Reduce(), Resize()
    first = kfops.cluster_version() == 0
    step = step_of_the_others(0 if first else -1)
    while step < 2 * len(plan):
        rank, size = kfops.current_rank(), kfops.current_cluster_size()
        gradients = tuple(
            ms.Tensor(np.full(shape, (rank + 1) * (i + 1) + step, np.float32)) for i, shape in enumerate(SHAPES)
        )
        for i, out in enumerate(reduce_(*gradients)):
            expected = (i + 1) * size * (size + 1) / 2 + step * size
            assert out.shape == SHAPES[i]
            assert (out.asnumpy() == expected).all(), (step, rank, size, i, out.asnumpy().ravel()[0], expected)
        step += 1
        if step % 2 == 0:
            changed, detached = (bool(x) for x in resize(ms.Tensor(plan[step // 2 - 1], ms.uint32)))
            assert changed == (plan[step // 2 - 1] != size)
            if detached:
                print("left")
                break
            if changed:
                assert step_of_the_others(step) == step
    else:
        print("finished")
