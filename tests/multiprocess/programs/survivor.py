"""Reduces in a loop over hosts, checks the numbers, and tells how long it ever waited. SIGUSR1 ends it.

Each rank brings (1, its step, whether it has been told to end), so all that is known of the result is that the same
came to all: how many brought something, and that these were at the same step.

With SURVIVOR_MODEL=N each saves N numbers a step, and reads those of some other rank: whole ones, that never go back.
It says when it has read the first from another host in a version.

With SURVIVOR_LOOPS=RANK this rank of the first version loops for ever behind step 5.
"""

import os
import random
import signal
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

stop = False
model_size = int(os.environ.get("SURVIVOR_MODEL", "0"))
versions_read = {}  # process ID -> the last version of its model
read_far_in = -1


def exchange_models():
    """Its numbers are all the same and say whose model it is, and which version: process ID * 2**32 + version."""
    global read_far_in, saves
    saves += 1
    assert comm.save("model", np.full(model_size, os.getpid() << 32 | saves)) == saves
    other = random.randrange(kf.current_cluster_size())
    saved = comm.request(other, "model")
    if saved is None:
        return
    assert (saved.value == saved.value[0]).all(), "a torn model"
    pid, version = divmod(int(saved.value[0]), 1 << 32)
    assert version == saved.version >= versions_read.get(pid, 1), (version, saved.version, versions_read)
    versions_read[pid] = version
    workers = membership.current().cluster.workers
    if workers[other].host != workers[kf.current_rank()].host and read_far_in < kf.cluster_version():
        read_far_in = kf.cluster_version()
        print(f"read in version {read_far_in} the model of rank {other} pid {pid}", flush=True)


def note_stop(*_):
    global stop
    stop = True


def share_step():
    global step, digest
    while True:
        try:
            root = comm.broadcast(np.array([step, digest]), root=membership.sync_root(), name="step")
        except kf.PeerLostError:
            continue
        if membership.is_joining():
            step, digest = map(int, root)
            membership.state_received()
        assert [step, digest] == root.tolist(), (step, digest, root)
        return


def tell():
    print(f"in version {kf.cluster_version()} rank {kf.current_rank()} of {kf.current_cluster_size()} "
          f"pid {os.getpid()} step {step} uid {kf.uid()}", flush=True)  # fmt: skip


signal.signal(signal.SIGUSR1, note_stop)
kf.init()
step, digest, longest, saves = 0, 0, 0.0, 0
if membership.is_deferred():
    membership.join()
if membership.is_joining():
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
    while step == 5 and kf.cluster_version() == 0 and str(kf.current_rank()) == os.environ.get("SURVIVOR_LOOPS"):
        time.sleep(0.01)
    if total[2]:
        break
    if model_size:
        exchange_models()
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
