"""OUT MODE: pair averaging whose cluster changes, beside a worker that takes five times as long for a step.

Compute is modelled by sleeping, so that cores don't decide. First a training call without a slow worker; then one
that the fast one of two workers ends for both; then one in which 2 workers become 4, one of them dies, and 3 become 1.
"graph" goes through ``Model.train``, "pynative" is a loop of one's own. Each worker reports its steps and what they
took.
"""

import os
import sys
import time
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, die, digest, numbered, numbers, report, training_step

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import PairAveragingOptimizer

MODE = sys.argv[2]
STEP_S, SLOWED = 0.2, 5
ms.set_context(mode=ms.GRAPH_MODE if MODE == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)
joined = os.environ.get("KUNGFU_PARKED") == "1"
straggler = not joined and kf.current_rank() == 1
REFERENCE, TO_THE_END, CHANGES = range(3)
net = nn.Dense(4, 2)
optimizer = PairAveragingOptimizer(nn.Momentum(net.trainable_params(), 0.05, 0.9), seed=kf.uid())
data = ElasticDataset(numbered(96), batch_size=4, seed=3)


class StragglerWeights:
    """What this worker does around each step, and what it knows of the current training call."""

    def __init__(self, call):
        self.call, self.elastic, self.met = call, None, False
        self.slow = straggler and call != REFERENCE
        self.size = self.steps_at_size = 0

    def schedule(self, step):
        if self.call != CHANGES:
            return None
        if step == 8:
            return 4
        return 1 if kf.current_cluster_size() == 3 and self.steps_at_size >= 20 else None

    def driving(self, elastic):
        self.elastic, meet = elastic, elastic._asynchronous.come_together

        def told(*args, **kwargs):
            self.met = True
            return meet(*args, **kwargs)

        elastic._asynchronous.come_together = told
        self.size = kf.current_cluster_size()
        report("begin", call=self.call, step=elastic.step, parameters=digest(net.trainable_params()), joined=joined)
        self.ended = time.perf_counter()

    def before(self):
        if kf.current_cluster_size() == 4 and kf.current_rank() == 3 and self.steps_at_size == 12:
            die()  # with its batch in its hands
        self.at = {"epoch": data.epoch, "step": self.elastic.step, "size": kf.current_cluster_size()}
        self.steps_at_size += 1
        compute_ends = self.ended + STEP_S * (SLOWED if self.slow else 1)
        time.sleep(max(0.0, compute_ends - time.perf_counter()))

    def after(self, samples):
        now = time.perf_counter()
        seconds, self.ended = now - self.ended, now
        size = kf.current_cluster_size()
        more = {
            "call": self.call,
            "slow": self.slow,
            "uid": kf.uid(),
            "met": self.met,
            "to": size,
            "detached": kf.detached(),
        }
        more |= {"now": self.elastic.step, "source": optimizer.last_exchange()[0], "seconds": seconds}
        report("step", **{**self.at, **more}, samples=samples, parameters=digest(net.trainable_params()))
        self.met = False
        if size != self.size:
            self.size, self.steps_at_size = size, 0
        return self.call == CHANGES and size == 1 and self.steps_at_size == 5


class Watch(Callback):
    """Comes after the elastic callback."""

    def __init__(self, pace, elastic):
        super().__init__()
        self.pace, self.elastic = pace, elastic

    def on_train_begin(self, run_context):
        self.pace.driving(self.elastic.training)

    def on_train_step_begin(self, run_context):
        self.pace.before()

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        assert kf.detached() or params.cur_step_num == self.pace.elastic.step, (
            params.cur_step_num,
            self.pace.elastic.step,
        )
        if self.pace.after(numbers(params.train_dataset_element[1])):
            run_context.request_stop()


model = Model(net, Loss(), optimizer)  # MindSpore lets each dataset be trained by one
train_step = training_step(net, optimizer, jit=True)


def train_by_callback(pace, epochs, options):
    pace.elastic = elastic = KungFuElasticCallback(pace.schedule, **options)
    model.train(epochs, data, callbacks=[elastic, Watch(pace, elastic)], dataset_sink_mode=False)
    return elastic.training


def train_in_loop(pace, epochs, options):
    pace.elastic = elastic = ElasticTraining(net, optimizer, schedule=pace.schedule, dataset=data, **options)
    elastic.begin()
    pace.driving(elastic)
    while elastic.epoch < epochs and not elastic.should_stop:
        for x, y in data:
            pace.before()
            train_step(x, y)
            elastic.step_end()
            if pace.after(numbers(y)):
                elastic.end()
                return elastic
        elastic.epoch_end()
    elastic.end()
    return elastic


train = train_by_callback if MODE == "graph" else train_in_loop
checkpoints = {"checkpoint_dir": Path(sys.argv[1]) / "checkpoints", "checkpoint_every": 10}
for call, epochs, options in ((REFERENCE, 1, {}), (TO_THE_END, 2, checkpoints), (CHANGES, 10_000, {})):
    elastic = train(StragglerWeights(call), epochs, options)
    if kf.detached():
        break
    if joined and call != CHANGES:
        continue  # the others are in that one
    optimizer.merge()
    parameters = digest(net.trainable_params())
    report("merged", call=call, step=elastic.step, parameters=parameters, epoch=data.epoch, uid=kf.uid())
