"""A primitive a step in MindSpore with device_target="GPU", a resize every second step, and at last a death.

device_mindspore_elastic.py GPU ENGINE SIZE...: what the collectives have to go through until then; the last size is the
one in which rank 1 dies.
"""

from __future__ import annotations

import os
import signal
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import ms_kungfu as kf
from ms_kungfu import _device, comm, membership
from ms_kungfu.ops import KungFuAllReduce, KungFuResize
from ms_kungfu.ops._sync import broadcast_parameters

target, engine = sys.argv[1:3]
plan = [int(size) for size in sys.argv[3:]]
kf.init(device=target)
# One device for each worker for as long as it lives, as the launcher gives them.
ms.set_device(target, kf.uid() % (1 << 16) % 8)


class Reduce(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sum = KungFuAllReduce(name="gradients")

    def construct(self, x):
        return self.sum(x)


def bring(step: int) -> list[int]:
    """The sum of all ranks' powers of ten, with the step."""
    x = np.array([10 ** kf.current_rank(), step], np.int64)
    total = reduce(Tensor(x)).asnumpy().tolist()
    assert total == reduce.sum(Tensor(x)).asnumpy().tolist()  # outside of a graph
    return total


reduce, resize = Reduce(), KungFuResize()
parameter = Parameter(Tensor(np.zeros(5, np.int64)), name="parameter")
step = 0
if membership.is_joining():
    step = int(comm.broadcast(np.zeros(1, np.int64), root=membership.sync_root(), name="step")[0])
    broadcast_parameters([parameter], membership.sync_root())
    membership.state_received()
while step < 2 * len(plan):
    size = kf.current_cluster_size()
    assert bring(step) == [(10**size - 1) // 9, size * step], (size, step)
    assert parameter.asnumpy().tolist() == [step // 2] * 5, (parameter, step)
    if size > 1:
        assert _device.engine_in_use().startswith(engine), _device.engine_in_use()
    step += 1
    if step % 2:
        continue
    parameter.set_data(Tensor(np.full(5, step // 2)))
    changed, detached = (flag.asnumpy() for flag in resize(Tensor(plan[step // 2 - 1], ms.uint32)))
    if detached:
        print(f"left at step {step}")
        break
    if changed:
        comm.broadcast(np.array([step]), root=membership.sync_root(), name="step")
        broadcast_parameters([parameter], membership.sync_root())
else:
    rank, size = kf.current_rank(), kf.current_cluster_size()
    if rank == 1:
        print("dies", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    everybody = [sum(10**r for r in range(size)), size * step]
    survivors = [everybody[0] - 10, (size - 1) * step]
    assert bring(step) == survivors
    print(f"finished as rank {rank} of {size}")
kf.finalize()
