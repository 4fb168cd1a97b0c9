"""All-reduces and sleeps until the test sends SIGUSR1 to the job, over deaths and changes of the cluster. Each second
it tells how many steps it has made, and how long the longest was since the last word."""

import os
import signal
import sys
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

step, stop = 0, False


def note_stop(*_):
    global stop
    stop = True


def share_state():
    """The joiner gets the step from the lowest rank that has it, or from the next if that one dies."""
    global step
    while True:
        try:
            found = int(comm.broadcast(np.array([step]), root=membership.sync_root(), name="state")[0])
        except kf.PeerLostError:
            continue
        if membership.is_joining():
            step = found
            membership.state_received()
        return


def tell():
    print(
        f"in version {kf.cluster_version()} rank {kf.current_rank()} of {kf.current_cluster_size()} pid {os.getpid()} "
        f"step {step}",
        flush=True,
    )


signal.signal(signal.SIGUSR1, note_stop)
kf.init()
if membership.is_deferred():
    membership.join()
if kf.detached():
    sys.exit()
if membership.is_joining():
    share_state()
tell()
begun = told = time.monotonic()
longest = 0.0
while True:
    if comm.all_reduce(np.array([1, stop]), name="flags")[1]:
        break
    step += 1
    membership.step_ended(step)
    time.sleep(0.02)
    membership.note_step(step)
    change = membership.step(None)
    if change.detached:
        print(f"left pid {os.getpid()} step {step}", flush=True)
        sys.exit()
    if change.changed:
        share_state()
        tell()
    now = time.monotonic()
    longest, begun = max(longest, now - begun), now
    if now - told >= 1:
        print(f"step {step} longest {longest:.3f} pid {os.getpid()}", flush=True)
        told, longest = now, 0.0
print(f"finished pid {os.getpid()} step {step}", flush=True)
