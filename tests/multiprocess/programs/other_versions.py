"""Two workers wish for a third, which finds another MindSpore than theirs: `other_versions.py FILE`. It writes what it
is told into the file, and the two train on until they are in a version without it."""

import sys
import time
from pathlib import Path

import numpy as np

import ms_kungfu as kf
from ms_kungfu import broker_protocol, comm, env, membership

told = Path(sys.argv[1])
joining_worker = env.INCARNATION.get() > 0
broker_protocol.mindspore_version = lambda: "2.9.0" if joining_worker else "2.10.0"
kf.init()
if joining_worker:
    try:
        membership.join()
    except kf.KungFuError as error:
        told.write_text(str(error))
        raise
if kf.current_rank() == 0:
    kf.propose_new_size(3)
while kf.cluster_version() < 2:  # 1 has the newcomer, and never comes true
    comm.all_reduce(np.zeros(1), name="step")
    assert not membership.step().detached
    time.sleep(0.01)
print("finished")
