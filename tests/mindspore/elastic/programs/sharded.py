"""OUT MODE NET SHARDS SCHEDULE EPOCHS [STEP:RANK:N ...]: training on a dataset that deals shards. The worker that has
this rank in this step kills itself before it computes its N-th shard of it, from 0; STEP:RANK:wide: it takes two
cores there; STEP:RANK:flip: a bit of its first weight flips when the step is made; narrow: newcomers have AVX only;
warn: what depends on more than the seed is told and no error.
NET, in a loop of one's own: plain | norm | dropout | both | searching (with kernels that search for a division of their
work, of odd sizes); stock: with MindSpore's Dropout; slow: plain, and rank 1 takes three times as long; augment: plain,
of samples that are augmented by key; steered: plain, with policies that change the rate, the shards and their shape.
model: plain in Model.fit; saved: the same, with checkpoints of every kind in OUT; auto: like model, with
shards="auto", and one more worker after step 2 if unplanned is given."""

import contextlib
import os
import signal
import sys
import time

if "narrow" in sys.argv and os.environ.get("KUNGFU_PARKED"):
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX"

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint, metrics
from reporting import Loss, digest, end, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, NoiseScaleLearningRate, SchedulePolicy, ShardedStep
from ms_kungfu.optimizers import KungFuMomentum
from ms_kungfu.trained.inventory import assign

two_cores = sorted(os.sched_getaffinity(os.getppid()))[:2]  # this process may have one already
mode, kind, shards = sys.argv[2], sys.argv[3], int(sys.argv[4])
schedule, epochs = None if sys.argv[5] == "none" else sys.argv[5], int(sys.argv[6])
deaths = sys.argv[7:]
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)


class Searching(nn.Cell):
    """Of the kernels that give other bits where their work is divided elsewhere."""

    def construct(self, x):
        return ms.ops.softplus(ms.ops.log(1 + x * x))


middle = {
    "searching": [nn.Dense(8, 13), Searching(), nn.Dense(13, 8)],
    "norm": [nn.BatchNorm1d(8)],
    "stock": [nn.Dropout(p=0.5)],
    "dropout": [kf.nn.Dropout(p=0.25) for _ in "ab"],
    "both": [nn.BatchNorm1d(8), *(kf.nn.Dropout(p=0.25) for _ in "ab")],
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


class Grow(Callback):
    """Requests a third worker, which no schedule contains, and ends training a few steps after it has joined."""

    steps_left = 8

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 2 and kf.current_rank() == 0:
            kf.propose_new_size(3)
        if kf.current_cluster_size() < 3:
            time.sleep(0.05)  # there are enough steps until the worker is ready
            return
        self.steps_left -= 1
        if self.steps_left == 0:
            run_context.request_stop()


def train_with_model():
    options, files = {}, []
    if kind == "saved":
        options = {"checkpoint_dir": f"{sys.argv[1]}/checkpoints", "checkpoint_every": 2, "resume": True}
        files = [ModelCheckpoint("net", f"{sys.argv[1]}/models", CheckpointConfig(save_checkpoint_steps=1))]
    elastic = KungFuElasticCallback(schedule, wait=True, **options)
    model = Model(net, loss_fn, optimizer, {"loss": metrics.Loss()})
    callbacks = [elastic, *files, Watch(), *([Grow()] if "unplanned" in sys.argv else [])]
    model.fit(epochs, data, numbered(26).batch(4), callbacks=callbacks, dataset_sink_mode=False)


def flip_a_bit():
    weight = net.trainable_params()[0]
    values = weight.asnumpy().copy()
    values.view(np.uint32).flat[3] ^= 1
    assign(weight, values)


def masks():
    """Return the numbers of cores that the threads may run on."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # this thread has ended
            found.add(len(os.sched_getaffinity(int(task))))
    return sorted(found)


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


samples = numbered(90)
if kind == "augment":
    samples = samples.map(lambda x, key: x + np.random.default_rng(key).random(4, np.float32), ["x", "key"], ["x"])
data = ElasticDataset(
    samples,
    global_batch_size=4 * shards,
    shards="auto" if kind == "auto" else shards,
    seed=5,
    key_column="key" if kind == "augment" else None,
    shards_check="warn" if "warn" in sys.argv else "raise",
    ledger_fingerprints=2,
)
if kind in ("model", "saved", "auto"):
    train_with_model()
    end()
step.cell = counted
policies = []
if kind == "steered":
    # First more shards of the same shape, then as many of another one.
    resharding = SchedulePolicy(global_batch_size={2: 48, 4: 24}, shards={2: 12})
    policies = [NoiseScaleLearningRate(0.05, tolerance=0, min_measurements=1), resharding]
elastic = ElasticTraining(net, optimizer, schedule=schedule, wait=True, dataset=data, policy=policies)
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
        if f"{elastic.step + 1}:{kf.current_rank()}:flip" in deaths:
            flip_a_bit()
        elastic.step_end(loss)
        if policies:
            noise, rate = elastic.monitor.noise_scale.noise_scale, float(optimizer.learning_rate.asnumpy())
            report("told", step=elastic.step, told=[data.global_batch_size, data.shards, noise, rate])
        if not elastic.should_stop:
            report("after", step=elastic.step, parameters=digest(elastic.parameters), size=kf.current_cluster_size())
if not kf.detached():
    report("end", step=elastic.step, epoch=elastic.epoch)
end()
