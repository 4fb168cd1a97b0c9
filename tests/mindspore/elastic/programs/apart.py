"""OUT WHAT:WHEN:EPOCHS ...: trainings one after the other. In each one worker alone does WHAT, in a callback that comes
WHEN, "before" or "after" the elastic one: "stop" (asks for a stop in step 7), "epoch-stop" (at the end of epoch 2),
"rate" or "weight" (changes it in step 3), or "nothing", or "sma", in which the models differ by design. 5 steps are an
epoch. The last one's error ends the program; an earlier one's is reported."""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, digest, end, layers, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum, SynchronousAveragingOptimizer

ms.set_context(mode=ms.GRAPH_MODE)


class Alone(Callback):
    def __init__(self, what, net):
        super().__init__()
        self.what, self.net = what, net

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        if kf.current_rank() != 1:
            return
        if params.cur_step_num == 7 and self.what == "stop":
            run_context.request_stop()
        if params.cur_step_num == 3 and self.what == "rate":
            params.optimizer.learning_rate.copy_(ms.Tensor(np.float32(0.5)))
        if params.cur_step_num == 3 and self.what == "weight":
            weight = self.net[0].weight
            weight.copy_(weight + 1e-3)

    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == 2 and self.what == "epoch-stop" and kf.current_rank() == 1:
            run_context.request_stop()


def train(what, when, epochs):
    ms.set_seed(1)
    net = layers(nn.BatchNorm1d(8))
    if what == "sma":
        optimizer = SynchronousAveragingOptimizer(nn.Momentum(net.trainable_params(), 0.02, 0.9))
    else:
        optimizer = KungFuMomentum(net.trainable_params(), 0.02, 0.9)
    data = ElasticDataset(numbered(60), global_batch_size=12)
    elastic = KungFuElasticCallback()
    callbacks = [Alone(what, net), elastic] if when == "before" else [elastic, Alone(what, net)]
    model = Model(net, Loss(), optimizer)
    model.train(int(epochs), data, callbacks=callbacks, dataset_sink_mode=False)
    report("end", what=what, step=elastic.training.step, weights=digest(net.trainable_params()))
    if "stop" in what:
        model.train(1, data, callbacks=[elastic], dataset_sink_mode=False)
        report("again", what=what, step=elastic.training.step)


*others, last = sys.argv[2:]
for case in others:
    try:
        train(*case.split(":"))
    except Exception as error:
        report("error", what=case.partition(":")[0], said=f"{type(error).__name__}: {error}")
train(*last.split(":"))
end()
