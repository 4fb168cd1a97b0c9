"""OUT PLACE FOLDER: a worker dies while the workers share their parameters by hand, where PLACE is "sync" (the root, as
it is about to give its own), or in a checkpoint: "texts" (the last rank, between the two meetings in which
the workers' own states are gathered), "first" (the lowest rank, likewise) or "write" (the lowest rank, in the thread
that writes)."""

import os
import signal
import sys

import mindspore as ms
from mindspore import nn
from reporting import digest, report

import ms_kungfu as kf
from ms_kungfu.callbacks import sync_net_parameters
from ms_kungfu.elastic import ElasticTraining, checkpoint, gathering
from ms_kungfu.ops import _sync
from ms_kungfu.optimizers import KungFuMomentum

place, folder = sys.argv[2], sys.argv[3]
ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(1)
net = nn.Dense(2, 1)
optimizer = KungFuMomentum(net.trainable_params(), 0.1, 0.9)
elastic = ElasticTraining(net, optimizer, checkpoint_dir=folder)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def gather_living(row, name):
    found = gather(row, name)
    if name == "kungfu/checkpoint/lengths":
        die()
    return found


if place == "sync":
    ms.set_seed(kf.current_rank())
    own = nn.Dense(2, 1)
    report("before", step=0, parameters=digest(own.get_parameters()))
    if kf.current_rank() == 2:
        _sync.broadcast_parameters = die
    sync_net_parameters(own, root=2)
    report("shared", step=0, parameters=digest(own.get_parameters()))
    sys.exit()

gather = gathering.gather_living
if place == "write" and kf.current_rank() == 0:
    checkpoint.CheckpointFolder._write = die
elif (place, kf.current_rank()) in (("texts", 2), ("first", 0)):
    gathering.gather_living = gather_living

elastic.begin()
while elastic.step < 8 or kf.current_cluster_size() == 3:  # until the survivors have changed over
    optimizer(tuple(ms.ops.ones_like(p) for p in net.trainable_params()))
    elastic.step_end()
    report("step", step=elastic.step, parameters=digest(elastic.parameters))
    if elastic.step == 4:
        elastic.checkpoint()
