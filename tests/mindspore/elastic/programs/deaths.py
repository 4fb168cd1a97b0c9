"""OUT PLACE FOLDER: a worker dies while the workers share their parameters by hand, where PLACE is "sync" (the root, as
it is about to give its own) or "half" (the root, when it has given a part of them), in a step of model averaging
("average"), between the updates of two optimizers ("between", or "loop" without ElasticTraining), or in a checkpoint:
"texts" (the last rank, between the two meetings in which the workers' own states are gathered), "first" (the lowest
rank, likewise), "write" (the lowest rank, in the thread that writes, and so the lowest of the others when training is
over) or "end" (the lowest rank, when training is over)."""

import signal
import sys

import mindspore as ms
from mindspore import nn
from reporting import Loss, die, digest, end, numbered, numbers, report

import ms_kungfu as kf
from ms_kungfu import agreement
from ms_kungfu.callbacks import sync_net_parameters
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, checkpoint
from ms_kungfu.ops import _sync
from ms_kungfu.optimizers import KungFuMomentum, SynchronousAveragingOptimizer

place, folder = sys.argv[2], sys.argv[3]
ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(1)
net = nn.Dense(2, 1)
optimizer = KungFuMomentum(net.trainable_params(), 0.1, 0.9)
elastic = ElasticTraining(net, optimizer, checkpoint_dir=folder)


def gather_living(row, name):
    found = gather(row, name)
    if name == "kungfu/checkpoint/lengths":
        die()
    return found


if place == "half":
    # What a large broadcast leaves at the ranks that have received a part of it when its root dies.
    own = [ms.Parameter(ms.Tensor([1.5 * kf.current_rank()] * 3, ms.float32), name="float")]
    own.append(ms.Parameter(ms.Tensor([kf.current_rank()] * 3, ms.int32), name="integer"))
    broadcast_parameters = _sync.broadcast_parameters

    def broadcast_half(params, root, *arguments):
        if kf.current_rank() == 2:
            die()
        if root == 2:
            params[0].set_data(ms.Tensor([3.0] * 3, ms.float32))
        broadcast_parameters(params, root, *arguments)

    _sync.broadcast_parameters = broadcast_half
    sync_net_parameters(own, root=2)
    report("shared", step=0, values=[p.asnumpy().tolist() for p in own])
    end()

if place == "sync":
    ms.set_seed(kf.current_rank())
    own = nn.Dense(2, 1)
    report("before", step=0, parameters=digest(own.get_parameters()))
    if kf.current_rank() == 2:
        _sync.broadcast_parameters = die
    sync_net_parameters(own, root=2)
    report("shared", step=0, parameters=digest(own.get_parameters()))
    end()

if place in ("between", "loop"):
    # Two optimizers, as a GAN has them; the last rank dies when the first one's update is done: of step 3, and of step
    # 11, before which the program has set a rate, as programs do when an epoch begins.
    nets = nn.Dense(4, 2), nn.Dense(4, 2)
    optimizers = [KungFuMomentum(each.trainable_params(), 0.1, 0.9) for each in nets]
    loss_fn = Loss()
    grads = [ms.grad(lambda x, y, each=each: loss_fn(each(x), y), None, each.trainable_params()) for each in nets]
    data = ElasticDataset(numbered(60), global_batch_size=6)
    if place == "loop":
        sync_net_parameters(nets[0])
        sync_net_parameters(nets[1])
        for step, (x, y) in enumerate(data):
            optimizers[0](grads[0](x, y))
            if (kf.current_rank(), step) == (2, 2):
                die()
            optimizers[1](grads[1](x, y))
            report("step", step=step + 1)
        end()
    elastic = ElasticTraining(*nets, *optimizers, dataset=data)
    others = iter(ElasticDataset(numbered(600), global_batch_size=6).create_tuple_iterator())
    for epoch in elastic.epochs(2):
        optimizers[0].learning_rate.set_data(ms.Tensor(0.1 / (epoch + 1), ms.float32))
        for x, y in data:
            step, before = elastic.step, digest(elastic.parameters)
            optimizers[0](grads[0](x, y))
            if (kf.current_rank(), elastic.step) in ((2, 2), (1, 10)):
                die()
            next(others)
            optimizers[1](grads[1](x, y))
            elastic.step_end()
            kind = "step" if elastic.step > step else "undone"
            rate = round(float(optimizers[0].learning_rate.asnumpy()), 6)
            told = {"samples": numbers(y), "before": before, "after": digest(elastic.parameters), "rate": rate}
            report(kind, step=step + 1, epoch=epoch, **told)
    report("end", step=elastic.step, parameters=digest(elastic.parameters))
    end()

if place == "average":
    # No worker changes over: the others train on in the cluster that the last rank has died in.
    ms.set_seed(kf.current_rank())
    parameters = nn.Dense(2, 1).trainable_params()
    averaging = SynchronousAveragingOptimizer(nn.SGD(parameters, 0.1), 0.5, momentum=0.7)
    for step in range(1, 9):
        if (kf.current_rank(), step) == (2, 5):
            die()
        averaging(tuple(ms.ops.ones_like(p) for p in parameters))
        moving = any(velocity.asnumpy().any() for velocity in averaging.center.velocity)
        report("step", step=step, moving=moving, version=kf.cluster_version())
    end()

gather = agreement.gather_living
if place == "write" and kf.current_rank() == 0:
    checkpoint.CheckpointFolder._write = die
elif (place, kf.current_rank()) in (("texts", 2), ("first", 0)):
    agreement.gather_living = gather_living

elastic.begin()
while place != "end" and (elastic.step < 8 or kf.current_cluster_size() == 3):  # until the survivors have changed over
    optimizer(tuple(ms.ops.ones_like(p) for p in net.trainable_params()))
    elastic.step_end()
    report("step", step=elastic.step, parameters=digest(elastic.parameters))
    if elastic.step == 4:
        elastic.checkpoint()
if place in ("write", "end"):
    if kf.current_rank() == 0:
        checkpoint.CheckpointFolder._write = die
    optimizer(tuple(ms.ops.ones_like(p) for p in net.trainable_params()))
    elastic.step_end()
    elastic.checkpoint()
    if kf.current_rank() == 0:
        signal.pause()
    elastic.end()
end()
