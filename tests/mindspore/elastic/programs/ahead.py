"""OUT LAUNCHER_LOG KIND SCHEDULE: training by a schedule with wait=True, which waits at the step of an entry until as
many standbys are ready as it takes. KIND: parts: Model.train; shards: the same with shards; loop: these in a loop of
one's own."""

import re
import sys
import time
from pathlib import Path

import mindspore as ms
from mindspore.train import Callback, Model
from reporting import Loss, digest, end, layers, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, ShardedStep
from ms_kungfu.elastic.schedule import entries
from ms_kungfu.elastic.sharded_step import Shard
from ms_kungfu.optimizers import KungFuMomentum

launcher_log, kind, schedule = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)

needed, started, size = {}, 0, 1
for at, wanted in entries(schedule):
    started += max(0, wanted - size)
    needed[at], size = started, wanted


def wait(step):
    """Before the end of `step`."""
    while kf.current_rank() == 0 and len(
        re.findall(r"worker ready: standby \d+", launcher_log.read_text())
    ) < needed.get(step, 0):
        time.sleep(0.05)


def tell(step, cell):
    """Behind it: how many graphs of this cell have been compiled, and the state."""
    report("step", step=step, graphs=cell.graphs if isinstance(cell, Shard) else len(cell.compile_cache))
    if not kf.detached():
        report("after", step=step, parameters=digest(net.get_parameters()))


class Wait(Callback):
    """Comes before the elastic callback."""

    def on_train_step_end(self, run_context):
        wait(run_context.original_args().cur_step_num)


class Watch(Callback):
    """Comes after it."""

    def on_train_step_end(self, run_context):
        params, sharded = run_context.original_args(), elastic._sharded
        tell(params.cur_step_num, params.train_network if sharded is None else sharded.step.cell)


net, loss_fn = layers(), Loss()
net.set_train()
optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
shards = None if kind == "parts" else 4
data = ElasticDataset(numbered(96), global_batch_size=12, shards=shards, seed=3)
if kind == "loop":

    def forward(x, y):
        return loss_fn(net(x), y)

    step = ShardedStep(ms.value_and_grad(forward, None, net.trainable_params()), optimizer, trained=net)
    elastic = ElasticTraining(
        net, optimizer, schedule=schedule, wait=True, dataset=data, prepare=lambda: step.compile(data)
    )
    for _ in elastic.epochs(2):
        for x, y in data:
            step(x, y)
            wait(elastic.step + 1)
            elastic.step_end()
            tell(elastic.step, step.cell)
else:
    elastic = KungFuElasticCallback(schedule, wait=True)
    Model(net, loss_fn, optimizer).train(2, data, callbacks=[Wait(), elastic, Watch()], dataset_sink_mode=False)
end()
