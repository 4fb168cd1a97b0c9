"""Reduces in a loop over hosts, checks the numbers, and tells how long it ever waited. SIGUSR1 ends it.

Each rank brings (1, its step, whether it has been told to end), so all that is known of the result is that the same
came to all: how many brought something, and that these were at the same step.
"""

import os
import signal
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

stop = False


def note_stop(*_):
    global stop
    stop = True


def share_step():
    global step
    while True:
        try:
            root = comm.broadcast(np.array([step]), root=membership.sync_root(), name="step")
        except kf.PeerLostError:
            continue
        if membership.is_joiner():
            step = int(root[0])
            membership.state_received()
        assert step == root[0], (step, root)
        return


def tell():
    print(f"in version {kf.cluster_version()} rank {kf.current_rank()} of {kf.current_cluster_size()} "
          f"pid {os.getpid()} step {step} uid {kf.uid()}", flush=True)  # fmt: skip


signal.signal(signal.SIGUSR1, note_stop)
kf.init()
step, digest, longest = 0, 0, 0.0
if membership.is_deferred():
    membership.join()
if membership.is_joiner():
    share_step()
tell()
while True:
    begin = time.monotonic()
    size = int(os.environ.get("SURVIVOR_FLOATS", "3"))
    brought = np.zeros(size)
    brought[:3] = 1, step, stop
    brought[3:] = step % 97
    total = comm.all_reduce(brought, name="total")
    present = int(total[0])
    assert 1 <= present <= kf.current_cluster_size(), total[:3]
    assert total[1] == present * step, (total[:3], step)
    assert (total[3:] == present * (step % 97)).all(), (total, step)
    digest = (digest * 31 + present * (step + 1)) % (2**31)
    step += 1
    if total[2]:
        break
    membership.note_step(step)
    change = membership.step(None)
    longest = max(longest, time.monotonic() - begin)
    if change.detached:
        raise SystemExit
    if change.changed:
        share_step()
        tell()
    time.sleep(0.002)
print(f"finished pid {os.getpid()} step {step} weights {digest:x} longest {longest:.3f}", flush=True)
