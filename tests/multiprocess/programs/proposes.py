"""One worker proposes sizes, and all follow at a later step: `proposes.py SIZE ...`."""

import sys
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

plan = [int(size) for size in sys.argv[1:]]
if not kf.using_kungfu():
    try:
        kf.propose_new_size(2)
    except kf.ResizeError as error:
        assert "kungfu-run -w" in str(error)
        print("refused")
    sys.exit()
kf.init()
done = 0
if membership.is_joining():
    done = int(comm.broadcast(np.zeros(1, np.int64), root=membership.sync_root(), name="done")[0])
    membership.state_received()
proposed = -1
while done < len(plan):
    if kf.current_rank() == kf.current_cluster_size() - 1 and proposed != done:  # not the one that speaks for all
        kf.propose_new_size(kf.current_cluster_size())  # changes nothing
        kf.propose_new_size(plan[done])
        proposed = done
    change = membership.step()
    time.sleep(0.01)  # a step's work
    if change.detached:
        print("left")
        break
    if change.changed:
        done += 1
        assert kf.current_cluster_size() == plan[done - 1]
        comm.broadcast(np.array([done]), root=membership.sync_root(), name="done")
else:
    try:
        kf.propose_new_size(0)
    except ValueError as error:
        assert "at least 1 rank" in str(error)
    print("finished")
