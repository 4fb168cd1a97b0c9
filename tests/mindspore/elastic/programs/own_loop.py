"""OUT SCHEDULE EPOCHS BATCH MODE [STEP:RANK:PLACE ...]: a loop of one's own, in the style of MindSpore's comm-fusion
tutorial. A worker kills itself where it has that rank in that step: "taken" is when it has its batch and nobody has its
gradients, "trained" when the step is done and it has not been counted."""

import os
import signal
import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from reporting import Loss, digest, numbered, numbers, report

import ms_kungfu as kf
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import KungFuAdam

schedule = None if sys.argv[2] == "none" else sys.argv[2]
epochs, batch = int(sys.argv[3]), int(sys.argv[4])
deaths = sys.argv[6:]
ms.set_context(mode=ms.GRAPH_MODE if sys.argv[5] == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)

net = nn.SequentialCell(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 2))
optimizer = KungFuAdam(net.trainable_params(), 0.2, eps=1.0)  # no whole step of what is rounding only
loss_fn = Loss()


def forward(x, y):
    return loss_fn(net(x), y)


grad_fn = ms.value_and_grad(forward, None, net.trainable_params())


@ms.jit
def train_step(x, y):
    loss, grads = grad_fn(x, y)
    optimizer(grads)
    return loss


def die_at(place):
    if f"{elastic.step + 1}:{kf.current_rank()}:{place}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


data = ElasticDataset(numbered(240), global_batch_size=batch, seed=5)
elastic = ElasticTraining(net, optimizer, schedule=schedule, wait=True, dataset=data)
for epoch in elastic.epochs(epochs):
    for x, y in data:
        die_at("taken")
        loss = train_step(x, y)
        samples = numbers(y)[: data.weight]  # none where they repeat another worker's
        total = np.array([float(loss.asnumpy()) * len(samples), len(samples)])
        total = kf.comm.all_reduce(total, op="sum", name="loss")
        report("step", step=elastic.step + 1, epoch=epoch, loss=total[0] / total[1], samples=samples)
        die_at("trained")
        elastic.step_end()
        if not elastic.should_stop:
            report("after", step=elastic.step, parameters=digest(elastic.parameters))
if not kf.detached():
    report("end", step=elastic.step, epoch=elastic.epoch)
