"""OUT MODE NET SHARDS SCHEDULE EPOCHS [STEP:RANK:N ...]: training on a dataset that deals shards. The worker that has
this rank in this step kills itself before it computes its N-th shard of it, from 0; STEP:RANK:wide: it takes two
cores there. NET: plain | norm | dropout, in a loop of one's own; model: plain in Model.fit; stock: with MindSpore's
Dropout; slow: plain, and rank 1 takes three times as long."""

import os
import signal
import sys
import time

import mindspore as ms
from mindspore import nn
from mindspore.train import Callback, Model, metrics
from reporting import Loss, digest, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, ShardedStep
from ms_kungfu.optimizers import KungFuMomentum

two_cores = sorted(os.sched_getaffinity(os.getppid()))[:2]  # this process may have one already
mode, kind, shards = sys.argv[2], sys.argv[3], int(sys.argv[4])
schedule, epochs = None if sys.argv[5] == "none" else sys.argv[5], int(sys.argv[6])
deaths = sys.argv[7:]
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)

middle = {
    "norm": [nn.BatchNorm1d(8)],
    "stock": [nn.Dropout(p=0.5)],
    "dropout": [kf.nn.Dropout(p=0.25) for _ in "ab"],
}.get(kind, [])
net = nn.SequentialCell(nn.Dense(4, 8), *middle, nn.Tanh(), nn.Dense(8, 2))
optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
loss_fn = Loss()
net.set_train()


def forward(x, y):
    return loss_fn(net(x), y)


class Watch(Callback):
    """Comes after the elastic callback: sees what the next step begins with."""

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        report("step", step=params.cur_step_num, loss=params.net_outputs.asnumpy().tobytes().hex())
        if not kf.detached():
            state = digest(params.train_network.get_parameters())
            report("after", step=params.cur_step_num, parameters=state, size=kf.current_cluster_size())


def train_with_model():
    model = Model(net, loss_fn, optimizer, {"loss": metrics.Loss()})
    callbacks = [KungFuElasticCallback(schedule, wait=True), Watch()]
    model.fit(epochs, data, numbered(26).batch(4), callbacks=callbacks, dataset_sink_mode=False)


def masks():
    """Over how many cores each thread may run."""
    return sorted({len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")})


step = ShardedStep(ms.value_and_grad(forward, None, net.trainable_params()), optimizer, trained=net)
compute, computed = step.cell, 0


def counted(*columns):
    global computed
    if f"{elastic.step + 1}:{kf.current_rank()}:{computed}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    computed += 1
    if kind == "slow":
        # So long that what a busy machine adds to both leaves six and two the best deal: less than 50 ms a shard.
        time.sleep(0.15 if kf.current_rank() == 1 else 0.05)
    return compute(*columns)


data = ElasticDataset(numbered(90), global_batch_size=4 * shards, shards=shards, seed=5)
if kind == "model":
    train_with_model()
    sys.exit()
step.cell = counted
elastic = ElasticTraining(net, optimizer, schedule=schedule, wait=True, dataset=data)
for epoch in elastic.epochs(epochs):
    for x, y in data:
        computed = 0
        if f"{elastic.step + 1}:{kf.current_rank()}:wide" in deaths:
            os.sched_setaffinity(0, two_cores)
        loss = step(x, y)
        report(
            "step",
            step=elastic.step + 1,
            epoch=epoch,
            loss=loss.asnumpy().tobytes().hex(),
            computed=computed,
            cores=masks(),
        )
        elastic.step_end()
        if not elastic.should_stop:
            report("after", step=elastic.step, parameters=digest(elastic.parameters), size=kf.current_cluster_size())
if not kf.detached():
    report("end", step=elastic.step, epoch=elastic.epoch)
