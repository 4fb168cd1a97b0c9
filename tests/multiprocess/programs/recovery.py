"""Trains until the test sends SIGUSR1 to the job, over deaths and changes of the cluster, and tells what happens.

The weights after a step do not depend on its participants, so each survivor knows what they have to be. Arguments:
``schedule=STEP:SIZE,...``, ``evict=STEP:RANK``, ``wait`` (for a size of the schedule), ``slow=SECONDS`` (a newcomer
takes so long to get ready), ``fail=RANK`` (a newcomer that is this rank fails at once), ``ahead`` (the launcher hears
of the schedule's next entry), ``hold=STEP:FILE`` (there it waits until there is such a file), ``loop=STEP:RANK:FILE``
(there this rank loops alone, until there is such a file).
"""

import os
import signal
import sys
import time

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership
from ms_kungfu.elastic.ahead import Ahead
from ms_kungfu.elastic.schedule import parse_schedule

options = dict(word.partition("=")[::2] for word in sys.argv[1:])
size_after = parse_schedule(options.get("schedule"))
ahead = Ahead(options.get("schedule") if "ahead" in options else None)
hold_step, _, hold_file = options.get("hold", "-1:").partition(":")
loop_step, loop_rank, loop_file = options.get("loop", "-1:-1:").split(":")
evict_step, _, evict_rank = options.get("evict", "-1:0").partition(":")
step, weights, stop = 0, np.zeros(5), False


def note_stop(*_):
    global stop
    stop = True


signal.signal(signal.SIGUSR1, note_stop)


def share_state():
    """Everyone gets the step and the weights from the lowest rank that has them, or from the next if that one dies."""
    global step, weights
    while True:
        try:
            state = comm.broadcast(np.array([step, *weights]), root=membership.sync_root(), name="state")
        except kf.PeerLostError:
            continue
        if membership.is_joining():
            step, weights = int(state[0]), state[1:]
            membership.state_received()
        assert step == state[0] and (weights == state[1:]).all(), (step, weights, state)
        return


def tell():
    print(
        f"in version {kf.cluster_version()} rank {kf.current_rank()} of {kf.current_cluster_size()} "
        f"pid {os.getpid()} step {step} uid {kf.uid()}",
        flush=True,
    )


def loop_alone():
    print(f"loops pid {os.getpid()}", flush=True)
    with membership.doing("evaluation"):
        while not os.path.exists(loop_file):
            time.sleep(0.01)


kf.init()
if membership.is_deferred():
    print(f"parked pid {os.getpid()} rank {kf.current_rank()} of {kf.current_cluster_size()}", flush=True)
    if options.get("fail") == str(kf.current_rank()):
        sys.exit(5)
    time.sleep(float(options.get("slow", 0)))
    membership.join()
if kf.detached():
    sys.exit()
if membership.is_joining():
    share_state()
tell()
while True:
    flags = comm.all_reduce(np.array([1, stop]), name="flags")
    assert 1 <= flags[0] <= kf.current_cluster_size()
    if flags[1]:
        break
    weights += comm.all_reduce(np.arange(5) * step / 7, op="mean", name="work")
    step += 1
    membership.step_ended(step)
    time.sleep(0.005)
    if step == int(evict_step) and kf.current_rank() == 0:
        try:
            membership.evict(int(evict_rank))
        except kf.ResizeError as error:
            print(f"not evicted: {error}", flush=True)
    ahead.look(step)
    while step == int(hold_step) and not os.path.exists(hold_file) and not stop:
        time.sleep(0.01)
    if step == int(loop_step) and kf.current_rank() == int(loop_rank):
        loop_alone()
    membership.note_step(step)
    change = membership.step(size_after(step), wait="wait" in options)
    if change.detached:
        print(f"left pid {os.getpid()} step {step}{' evicted' if membership.was_evicted() else ''}", flush=True)
        sys.exit()
    if change.changed:
        share_state()
        tell()
expected = np.zeros(5)
for s in range(step):
    expected += np.arange(5) * s / 7
np.testing.assert_allclose(weights, expected, rtol=1e-12)
print(f"finished pid {os.getpid()} step {step} weights {weights.tobytes().hex()}", flush=True)
