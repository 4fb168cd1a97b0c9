"""comm|graph|pynative FILE: rank 1 comes to the collective when FILE is there; rank 0 waits for it."""

import sys
import time
from pathlib import Path

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm

manner, told = sys.argv[1], Path(sys.argv[2])
rank = kf.current_rank()


def all_reduce(name):
    if manner == "comm":
        return comm.all_reduce(np.float32([rank]), name=name)
    import mindspore as ms

    from ms_kungfu.ops import KungFuAllReduce

    ms.set_context(mode=ms.GRAPH_MODE if manner == "graph" else ms.PYNATIVE_MODE)

    class Reduces(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            self.reduce = KungFuAllReduce()

        def construct(self, x):
            return self.reduce(x)

    net = Reduces()
    net(ms.Tensor(np.float32([rank]))).asnumpy()  # compiled, if it is to be
    comm.barrier()
    while rank == 1 and not told.exists():
        time.sleep(0.01)
    return net(ms.Tensor(np.float32([rank]))).asnumpy()


comm.barrier()
while manner == "comm" and rank == 1 and not told.exists():
    time.sleep(0.01)
print("the sum is", all_reduce("slow"), flush=True)
