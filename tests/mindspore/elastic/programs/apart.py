"""OUT WHAT WHEN [EPOCHS]: one worker alone does WHAT, in a callback that comes WHEN, "before" or "after" the elastic
one: "stop" (asks for a stop in step 7), "epoch-stop" (at the end of epoch 2), "rate" or "weight" (changes it in step
3), or "nothing", or "sma", in which the models differ by design. 5 steps are an epoch."""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, digest, layers, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum, SynchronousAveragingOptimizer

what, when = sys.argv[2:4]
epochs = int(sys.argv[4]) if len(sys.argv) > 4 else 25
ms.set_context(mode=ms.GRAPH_MODE)


class Alone(Callback):
    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        if kf.current_rank() != 1:
            return
        if params.cur_step_num == 7 and what == "stop":
            run_context.request_stop()
        if params.cur_step_num == 3 and what == "rate":
            params.optimizer.learning_rate.copy_(ms.Tensor(np.float32(0.5)))
        if params.cur_step_num == 3 and what == "weight":
            weight = net[0].weight
            weight.copy_(weight + 1e-3)

    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == 2 and what == "epoch-stop" and kf.current_rank() == 1:
            run_context.request_stop()


class Last(Callback):
    def on_train_step_end(self, run_context):
        report("step", step=run_context.original_args().cur_step_num)


net = layers(nn.BatchNorm1d(8))
if what == "sma":
    optimizer = SynchronousAveragingOptimizer(nn.Momentum(net.trainable_params(), 0.02, 0.9))
else:
    optimizer = KungFuMomentum(net.trainable_params(), 0.02, 0.9)
data = ElasticDataset(numbered(60), global_batch_size=12)
elastic = KungFuElasticCallback()
callbacks = [Alone(), elastic, Last()] if when == "before" else [elastic, Alone(), Last()]
model = Model(net, Loss(), optimizer)
model.train(epochs, data, callbacks=callbacks, dataset_sink_mode=False)
report("end", step=elastic.training.step, weights=digest(net.trainable_params()))
if "stop" in what:
    model.train(1, data, callbacks=[elastic], dataset_sink_mode=False)
    report("again", step=elastic.training.step)
