"""OUT MODE WHAT: trainings that are monitored and steered. Each worker reports what its monitor and policies see."""

import json
import logging
import sys
import time
import urllib.request

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Model, SummaryCollector
from reporting import Loss, digest, end, numbered, report, training_step

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback, MonitorCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import Decision, ElasticTraining, Policy, SchedulePolicy, StragglerPolicy
from ms_kungfu.monitoring import Monitor, MonitorGradientNoiseScaleOptimizer
from ms_kungfu.optimizers import KungFuMomentum, KungFuSGD

out, mode, what = sys.argv[1:4]
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
logging.basicConfig(level=logging.INFO, stream=sys.stdout)


class Told(logging.Handler):
    """Keeps the log of the decisions."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("ms_kungfu.elastic.policy_runner").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


class Quadratic(nn.Cell):
    """Half of the squared distance to the samples: the gradient is the mean of (theta - x)."""

    def __init__(self, dimension):
        super().__init__()
        self.theta = ms.Parameter(ms.Tensor(np.full(dimension, 0.1), ms.float32), name="theta")

    def construct(self, x):
        return 0.5 * ((self.theta - x) ** 2).sum(axis=1).mean()


def noise_scale():
    """The estimate on a quadratic with known noise, by hand-written loop and wrapper; the learning rate is 0."""
    dimension, batch, sigma, steps = 2000, 8, 0.5, 150
    net = Quadratic(dimension)
    inner = KungFuSGD(net.trainable_params(), 0.0)
    optimizer = MonitorGradientNoiseScaleOptimizer(inner, batch, half_life=1000.0, log_interval=10)
    grad_fn = ms.value_and_grad(net, None, net.trainable_params())

    @ms.jit
    def train_step(x):
        loss, grads = grad_fn(x)
        optimizer(grads)
        return loss

    random = np.random.default_rng(kf.current_rank())
    optimizer.monitor.begin()
    for _ in range(steps):
        x = random.standard_normal((batch, dimension)) * sigma
        loss = train_step(ms.Tensor(x, ms.float32))
        record = optimizer.monitor.step_end(batch, loss)
    truth = sigma**2 * dimension / (0.1**2 * dimension)
    found = optimizer.gradient_noise_scale()
    report(
        "noise", step=steps, found=found, truth=truth, squared=optimizer.monitor.noise_scale.gradient_squared_norm,
        norm=record.gradient_norm, variance=record.gradient_variance, loss=record.loss, samples=record.trained_samples,
        received=record.received_from, seconds=record.seconds, monitor=record.monitor_seconds,
        brought=sum(p.size for p in net.trainable_params()) * 4,
    )  # fmt: skip
    optimizer.monitor.end()


def callback():
    """Model.train with a monitor alone: records, the file, the endpoint, the ratio of an update."""
    ms.set_seed(1)
    net = nn.Dense(4, 2)
    weights = [p.asnumpy().copy() for p in net.trainable_params()]
    seen = []
    monitor = Monitor(
        f"{out}/training.json", metrics_port=0, update_ratio_interval=1, sinks=[lambda record: seen.append(record)]
    )
    model = Model(net, Loss(), KungFuMomentum(net.trainable_params(), [0.1, 0.05, 0.05, 0.05, 0.05], 0.0))
    pages = []

    def scrape(record):
        if not pages and record.step == 3:
            pages.append(urllib.request.urlopen(monitor._endpoint.url, timeout=10).read().decode())

    monitor._sinks.append(scrape)
    losses = []

    class Outputs(ms.train.Callback):
        def on_train_step_end(self, run_context):
            losses.append(float(run_context.original_args().net_outputs.asnumpy()))

    data = numbered(40).batch(8)
    collector = SummaryCollector(f"{out}/summary{kf.current_rank()}", collect_freq=2)
    callbacks = [collector, Outputs(), MonitorCallback(monitor)]
    model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    report(
        "callback", step=5, records=[record.to_json() for record in seen], page=pages[0], losses=losses,
        first_update=seen[0].update_ratio, initial=float(np.sqrt(sum((w**2).sum() for w in weights))),
    )  # fmt: skip


class Own(Policy):
    """What differs at each worker: only the lowest rank's wish may count."""

    def after_step(self, q):
        self.seen = q
        if q.step == 4:
            return Decision(f"rank {kf.current_rank()} wants it", learning_rate=0.01 * (1 + kf.current_rank()))
        if q.step >= 16 and q.cluster_size == 1:
            return Decision("a second worker", size=2, keeps_local_batch=True)
        return None


def policies():
    """Several policies at once, through a resize: sizes, batches, rates, and the same on all workers and joiners."""
    net = nn.Dense(4, 2)
    optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
    told, own = Told(), Own()
    schedule = SchedulePolicy(
        "3:2,9:1", local_batch_size={6: 2}, global_batch_size={12: 8}, learning_rate={4: 0.5, 14: 0.002}
    )
    data = ElasticDataset(numbered(120), batch_size=4, seed=3)
    elastic = KungFuElasticCallback(policy=[own, schedule], monitor=Monitor(f"{out}/training.json"), wait=True)

    class Watch(ms.train.Callback):
        def on_train_step_end(self, run_context):
            params = run_context.original_args()
            record = elastic.training.monitor.last
            report(
                "step", step=params.cur_step_num, trained_by=record.cluster_size, batch=record.batch_size,
                rate=float(optimizer.learning_rate.asnumpy()), loss=record.loss, trained=record.trained_samples,
                parameters=digest(net.get_parameters()), total=own.seen.total_samples, detached=kf.detached(),
            )  # fmt: skip

    Model(net, Loss(), optimizer).train(2, data, callbacks=[elastic, Watch()], dataset_sink_mode=False)
    report("told", step=0, lines=told.lines, uid=kf.uid())


def straggler():
    """One of three workers computes slowly, by sleeping, and is sent away; training goes on without it."""
    net = nn.Dense(4, 2)
    optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
    told = Told()
    data = ElasticDataset(numbered(600), batch_size=2, seed=3)
    slow = kf.current_rank() == 1
    train_step = training_step(net, optimizer)
    elastic = ElasticTraining(net, optimizer, dataset=data, policy=StragglerPolicy(patience=5))
    for x, y in elastic_batches(elastic, data):
        time.sleep(0.15 if slow else 0.02)
        loss = train_step(x, y)
        elastic.step_end(loss)
        report("step", step=elastic.step, slow=slow, size_after=kf.current_cluster_size(), detached=kf.detached())
        if elastic.step >= 30:
            break
    elastic.end()
    report("told", step=0, lines=told.lines, slow=slow)


def elastic_batches(elastic, data):
    elastic.begin()
    yield from data


for each in what.split(","):
    {"noise_scale": noise_scale, "callback": callback, "policies": policies, "straggler": straggler}[each]()
print(json.dumps({"done": what}))
end()
