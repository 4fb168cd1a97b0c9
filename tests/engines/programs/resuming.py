"""Counts steps until there is a file FINISH, and goes on from the count in CHECKPOINT: its two arguments."""

import os
import sys
import time
from pathlib import Path

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

checkpoint, finish = map(Path, sys.argv[1:])
kf.init()
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
step = int(comm.broadcast(np.array([step]), root=0, name="step")[0])
rank, size = kf.current_rank(), kf.current_cluster_size()
print(f"begins at step {step} rank {rank} of {size} at {os.environ['KUNGFU_SELF']}", flush=True)
while not comm.all_reduce(np.array([finish.exists()]).astype(np.int64), name="flags")[0]:
    step += 1
    membership.step_ended(step)
    if rank == 0:
        Path(f"{checkpoint}.new").write_text(str(step))
        os.replace(f"{checkpoint}.new", checkpoint)
    time.sleep(0.02)
    membership.note_step(step)
    if membership.step(None).detached:
        sys.exit()
print(f"finished at step {step}", flush=True)
