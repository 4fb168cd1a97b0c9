"""Two workers that come to operations in another order; or that only seem to, given "late" or "thread".

late: one computes for 3 s before it comes. thread: a user's thread is to bring what the other worker awaits.
"""

import sys
import threading
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm

manner = sys.argv[1]
rank = kf.current_rank()
comm.all_reduce(np.ones(1), name="begin")
if manner == "mismatch":
    for name in ("first", "second") if rank == 0 else ("second", "first"):
        comm.all_reduce(np.ones(1), name=name)
elif manner == "late":
    if rank == 0:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
    comm.all_reduce(np.ones(1), name="first")
else:

    def other():
        if rank == 0:
            time.sleep(3)
        comm.all_reduce(np.ones(1), name="by a thread")

    thread = threading.Thread(target=other)
    thread.start()
    if rank == 0:
        comm.all_reduce(np.ones(1), name="by main threads")
    thread.join()
    if rank == 1:
        comm.all_reduce(np.ones(1), name="by main threads")
print(f"rank {rank} fine", flush=True)
