"""OUT NET SCHEDULE OPTIONS: an unmodified Model.train under all that KungFuElasticCallback does, with OPTIONS, a JSON
object of its arguments. Each worker reports every step with the cluster that trained it, and its state after it."""

import json
import random
import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, digest, layers, numbered, numbers, report

import ms_kungfu as kf
from ms_kungfu.callbacks import BroadcastCallback, KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

network, schedule, options = sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
EPOCHS, SAMPLES = 6, 240
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
random.seed(100 + kf.current_rank())  # differs between workers, as the moving averages do
np.random.seed(100 + kf.current_rank())


def statistics(params):
    return [p.asnumpy().tolist() for p in params.train_network.get_parameters() if ".moving_" in p.name]


class Before(Callback):
    """Comes before the elastic callback."""

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        samples = numbers(params.train_dataset_element[1])
        mine = np.array([float(params.net_outputs) * len(samples), len(samples)])
        total, count = kf.comm.all_reduce(mine, name="loss")
        report(
            "step",
            step=params.cur_step_num,
            epoch=params.cur_epoch_num,
            loss=total / count,
            samples=samples,
            statistics=statistics(params),
            random=[random.random(), np.random.rand()],
        )


class After(Callback):
    def on_train_begin(self, run_context):
        self.report("begin", run_context)

    def on_train_step_end(self, run_context):
        if not kf.detached():
            self.report("after", run_context)

    @staticmethod
    def report(kind, run_context):
        params = run_context.original_args()
        report(
            kind,
            step=params.cur_step_num,
            parameters=digest(params.train_network.get_parameters()),
            statistics=statistics(params),
            learning_rate=float(params.optimizer.learning_rate.asnumpy()),
            compiled=len(params.train_network.compile_cache),
        )


norm = [nn.BatchNorm1d(8)] if network == "norm" else []
net = layers(*norm, nn.Tanh())
optimizer = KungFuMomentum(net.trainable_params(), 0.02, 0.9)
data = ElasticDataset(numbered(SAMPLES), batch_size=5, seed=5)  # the callback says what it really is
elastic = KungFuElasticCallback(None if schedule == "none" else schedule, wait=True, **options)
callbacks = [Before(), elastic, BroadcastCallback(), After()]
Model(net, Loss(), optimizer).train(EPOCHS, data, callbacks=callbacks, dataset_sink_mode=False)
