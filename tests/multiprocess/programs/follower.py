"""Steps until the cluster has been resized from outside to the size given, then a few more."""

import sys
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

kf.init()
print(f"rank {kf.current_rank()} of {kf.current_cluster_size()} began", flush=True)
deadline = time.monotonic() + 60
while kf.current_cluster_size() != int(sys.argv[1]):
    assert time.monotonic() < deadline, "nobody resized the job"
    comm.all_reduce(np.ones(10, np.float32), name="work")
    time.sleep(0.01)  # a training step
    if membership.step().detached:
        sys.exit()
for _ in range(3):
    assert comm.all_reduce(np.ones(1, np.float32), name="work")[0] == kf.current_cluster_size()
print(f"rank {kf.current_rank()} of {kf.current_cluster_size()} finished")
