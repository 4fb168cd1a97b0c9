"""OUT: a static cluster under BroadcastCallback, then resizes and sharing by hand, as older programs do."""

import mindspore as ms
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, digest, numbered, numbers, report

import ms_kungfu as kf
from ms_kungfu import membership
from ms_kungfu.callbacks import BroadcastCallback, sync_net_parameters
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(kf.current_rank())
joined_later = membership.is_joining()
net = nn.Dense(4, 2)
optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)


class Watch(Callback):
    def on_train_begin(self, run_context):
        report("begin", step=0, parameters=digest(run_context.original_args().train_network.get_parameters()))

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        report("step", step=params.cur_step_num, samples=numbers(params.train_dataset_element[1]))


if not joined_later:
    report("before", step=0, parameters=digest(net.get_parameters()))
    data = ElasticDataset(numbered(31), global_batch_size=8)
    model = Model(net, Loss(), optimizer)
    model.train(1, data, callbacks=[BroadcastCallback(root=1), Watch()], dataset_sink_mode=False)
    report("trained", step=0, parameters=digest(net.get_parameters()))

sizes = [1, 2]
while sizes:
    if not joined_later:
        size = sizes.pop(0)
        _, detached = kf.resize(size)
        if detached:
            break
    sync_net_parameters(net)
    if joined_later:
        sizes, joined_later = [], False
    report("shared", step=len(sizes), parameters=digest(net.get_parameters()))
