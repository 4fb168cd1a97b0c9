"""One reduction a step on the device and a resize every second one. Sums are right at every size, in every version.

device_resizes.py TARGET ENGINE SIZE...
"""

from __future__ import annotations

import sys

import device_api as api
import numpy as np
from device_api import Array

import ms_kungfu as kf
from ms_kungfu import _device, comm, membership

target, engine = sys.argv[1:3]
plan = [int(size) for size in sys.argv[3:]]
kf.init(device=target)
# One device for each worker for as long as it lives, as the launcher gives them.
api.use_device(kf.uid() % (1 << 16) % api.count_devices())
stream = api.Stream()
step = 0
if membership.is_joining():
    step = int(comm.broadcast(np.zeros(1, np.int64), root=membership.sync_root(), name="step")[0])
    membership.state_received()
index = np.arange(3000, dtype=np.float32)
parameter = Array(3000, "float32")
out = Array(3000, "float32")
while step < 2 * len(plan):
    rank, size = kf.current_rank(), kf.current_cluster_size()
    parameter.write(index * (rank + 1) + step, stream)
    # A broadcast of parameters, in place, and a reduction.
    api.all_reduce("gradients", [parameter], [out], "mean", stream)
    assert np.allclose(out.read(stream), index * (size + 1) / 2 + step, rtol=1e-6), (rank, size, step)
    api.broadcast("parameters", [parameter], [parameter], size - 1, stream)
    assert (parameter.read(stream) == index * size + step).all(), (rank, size, step)
    if size > 1:
        assert _device.engine_in_use().startswith(engine), _device.engine_in_use()
    step += 1
    if step % 2:
        continue
    changed, detached = kf.resize(plan[step // 2 - 1])
    if detached:
        print(f"left at step {step}")
        break
    if changed:
        comm.broadcast(np.array([step]), root=membership.sync_root(), name="step")
else:
    print(f"finished as rank {kf.current_rank()} of {kf.current_cluster_size()}")
parameter.free()
out.free()
stream.destroy()
kf.finalize()
