"""Rank 0 comes two seconds late; the others say how much of a core they have used meanwhile."""

from __future__ import annotations

import time

import numpy as np

from ms_kungfu import comm, runtime

_LATE_S = 2.0
_MOST = 0.02

runtime.init()
rank = runtime.current_rank()
for count in (1, 1 << 20):
    tensor = np.full(count, rank + 1.0, np.float32)
    comm.barrier()
    if rank == 0:
        time.sleep(_LATE_S)
    begin, used = time.monotonic(), time.process_time()
    result = comm.all_reduce(tensor)
    waited, used = time.monotonic() - begin, time.process_time() - used
    assert result[-1] == sum(range(1, runtime.current_cluster_size() + 1))
    if rank != 0:
        assert waited > 0.9 * _LATE_S
        assert used < _MOST * waited, f"rank {rank} used {used:.3f} s of a core in {waited:.3f} s"
print(f"rank {rank} fine")
