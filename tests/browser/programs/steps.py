"""Makes steps without MindSpore until it gets a SIGUSR1, and reports them as a training does.

Files in the folder of the first argument control it: while there is `slow`, rank 2 takes 0.3 s more for the data of
each step; while there is `stands`, rank 1 evaluates.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership
from ms_kungfu.elastic.statistics import StepStatistics

folder = Path(sys.argv[1])
dataset = SimpleNamespace(global_batch_size=32)
training = SimpleNamespace(optimizers=[], dataset=dataset, step=0)
statistics = StepStatistics(training, SimpleNamespace(monitor=None))
step, stop = 0, False


def note_stop(*_):
    global stop
    stop = True


def share_step():
    global step
    while True:
        try:
            step = int(comm.broadcast(np.array([step]), root=membership.sync_root(), name="step")[0])
        except kf.PeerLostError:
            continue
        if membership.is_joining():
            membership.state_received()
        print(f"in version {kf.cluster_version()} rank {kf.current_rank()} pid {os.getpid()}", flush=True)
        return


signal.signal(signal.SIGUSR1, note_stop)
kf.init()
if membership.is_deferred():
    membership.join()
share_step()
statistics.resume()
while True:
    with membership.spending("data"):
        time.sleep(0.3 if kf.current_rank() == 2 and (folder / "slow").exists() else 0.001)
    time.sleep(0.02)
    if comm.all_reduce(np.array([stop], np.int64), name="stop")[0]:
        break
    step += 1
    training.step = step
    if kf.current_rank() == 1 and (folder / "stands").exists():
        with membership.doing("evaluation"):
            while (folder / "stands").exists():
                time.sleep(0.01)
    statistics.mark()
    membership.step_ended(step)
    statistics.committed(step, 8, 32, 1.0 / step)
    membership.note_step(step)
    change = membership.step(None)
    if change.detached:
        sys.exit()
    if change.changed:
        share_step()
    statistics.resume()
statistics.end()
