"""OUT SCHEDULE EPOCHS CALLS [plain | fresh | STEP:RANK ...]: an unmodified Model.train; each worker reports every step
and its state after. A worker that has this rank kills itself in this step. `fresh`: each call has its own objects."""

import random
import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, die, digest, numbered, numbers, report

import ms_kungfu as kf
from ms_kungfu import membership
from ms_kungfu.callbacks import BroadcastCallback, KungFuElasticCallback, sync_net_parameters
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

schedule, epochs, calls = None if sys.argv[2] == "none" else sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ms.set_context(mode=ms.GRAPH_MODE)


class Watch(Callback):
    """Comes after the elastic callback: sees the state that the next step begins with."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def state(self, params):
        return {
            "step": params.cur_step_num,
            "call": self.call,
            "parameters": digest(params.train_network.get_parameters()),
            "global_step": int(params.optimizer.global_step.asnumpy()[0]),
            "random": [random.random(), np.random.rand()],
        }

    def on_train_begin(self, run_context):
        params = run_context.original_args()
        report("begin", **self.state(params))

    def on_train_step_begin(self, run_context):
        if f"{run_context.original_args().cur_step_num}:{kf.current_rank()}" in deaths:
            die()  # with its batch in its hands

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        report(
            "step",
            detached=kf.detached(),
            epoch=params.cur_epoch_num,
            samples=numbers(params.train_dataset_element[1]),
            batch_num=params.batch_num,
            **self.state(params),
        )

    def on_train_epoch_end(self, run_context):
        params = run_context.original_args()
        if not kf.detached():
            report("epoch", step=params.cur_step_num, epoch=params.cur_epoch_num, call=self.call)


ms.set_seed(7 + kf.current_rank())  # what differs at first, the state makes the same
random.seed(kf.current_rank())
plain, fresh = "plain" in sys.argv[5:], "fresh" in sys.argv[5:]
deaths = sys.argv[5:]


def make():
    net = nn.Dense(4, 2)
    # A mask, as samplers and quantizers keep one; a joiner's own is another.
    mask = ms.Tensor([not membership.is_joining(), False, True])
    net.insert_param_to_cell("mask", ms.Parameter(mask, name="mask", requires_grad=False))
    rates = [0.05 / (1 + i / 10) for i in range(1000)]
    model = Model(net, Loss(), KungFuMomentum(net.trainable_params(), rates, 0.9))
    data = numbered(40).batch(4) if plain else ElasticDataset(numbered(90), batch_size=4, seed=3)
    return net, model, data


net, model, data = make()
for call in range(calls):
    if fresh:
        net, model, data = make()
    sync_net_parameters(net)  # a joiner passes by: the whole state is on its way
    elastic = KungFuElasticCallback(schedule if call == calls - 1 else None, wait=True)
    model.train(
        epochs,
        data,
        callbacks=[BroadcastCallback(), elastic, BroadcastCallback(), Watch(call)],
        dataset_sink_mode=False,
    )
if not kf.detached():
    report("end", parameters=digest(net.get_parameters()))
