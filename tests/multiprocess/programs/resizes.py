"""Follows a plan of sizes, given as arguments: one resize every three steps. Sums are right at every step."""

import sys

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

plan = [int(size) for size in sys.argv[1:]]
kf.init()
step = 0
if membership.is_joining():
    step = int(comm.broadcast(np.zeros(1, np.int64), root=membership.sync_root(), name="step")[0])
    membership.state_received()
while step < 3 * len(plan):
    size = kf.current_cluster_size()
    ranks = comm.all_reduce(np.full(7, kf.current_rank(), np.int64), name="ranks")
    assert (ranks == sum(range(size))).all(), (ranks, size)
    step += 1
    if step % 3:
        continue
    want = plan[step // 3 - 1]
    stale = kf.cluster_version()
    changed, detached = kf.resize(want)
    assert changed == (want != size), (changed, want, size)
    if detached:
        assert kf.detached()
        try:
            comm.barrier()
        except kf.StaleClusterError as error:
            assert "has been detached from the cluster" in str(error), error
        else:
            raise AssertionError("a detached worker took part in a barrier")
        print(f"left at step {step}")
        break
    if changed:
        assert kf.current_cluster_size() == want
        assert kf.cluster_version() == stale + 1
        comm.broadcast(np.array([step]), root=membership.sync_root(), name="step")
else:
    local = f"{kf.current_local_rank()}/{kf.current_local_size()}"
    print(f"finished as rank {kf.current_rank()} of {kf.current_cluster_size()}, {local}")
