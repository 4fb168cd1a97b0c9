"""fail|recover|stay|quit: rank 1 gets signals while it waits for rank 0, which comes when it has been interrupted."""

import os
import signal
import sys
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm

rank, size = kf.current_rank(), kf.current_cluster_size()
recovers = sys.argv[1] != "fail"
# More than fits at once: rank 1 has not brought all of it when it waits.
mine = np.full(1 << 20, rank, np.float32)


def note(number, frame):
    if frame.f_code.co_name == "all_reduce":  # at Python's last line before the runtime
        comm.save("in the wait", np.ones(1))


def awaited(name):
    while (found := comm.request(1, name)) is None:
        time.sleep(0.01)
        if name == "in the wait":
            os.kill(pid, signal.SIGUSR1)
    return found.value


comm.barrier()
if rank == 1:
    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm.save("pid", np.array([os.getpid()]))
    try:
        comm.all_reduce(mine, name="waits")
    except KeyboardInterrupt:
        print("rank 1 interrupted", flush=True)
    else:
        raise AssertionError("not interrupted")
    try:
        comm.all_reduce([rank], name="later")
    except kf.CollectiveAbortedError as error:
        assert "interrupted by KeyboardInterrupt" in str(error), error
    else:
        raise AssertionError("the communicator should be finished")
    while sys.argv[1] == "stay":
        signal.pause()  # until the launcher ends it
    if sys.argv[1] == "quit":
        sys.exit(0)
    if recovers:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.save("done", np.ones(1))
elif rank == 0:
    pid = int(awaited("pid")[0])
    awaited("in the wait")
    os.kill(pid, signal.SIGINT)
    if not recovers:
        awaited("done")
if rank != 1:
    try:
        total = comm.all_reduce(mine, name="waits")
    except kf.CollectiveAbortedError as error:
        assert not recovers, error
        assert "gave up: the wait was interrupted by KeyboardInterrupt" in str(error), error
    else:
        assert recovers
        assert (total == sum(range(size)) - 1).all()
print(f"rank {rank} fine", flush=True)
