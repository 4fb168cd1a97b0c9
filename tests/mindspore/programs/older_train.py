"""A program as they were written for KungFu's source-tree integration, by the calls of its README.

`older_train.py graph|pynative STEPS [SIZE SIZE ...]`: trains STEPS steps and resizes between them, to the sizes in
turn (to the present one without sizes).
"""

import sys

import mindspore as ms
import mindspore.ops.operations.kungfu_comm_ops as kfops
import numpy as np
from mindspore.ops import composite as C


class KungFuMomentum(ms.nn.Momentum):
    def __init__(self, *args, **kwargs):
        super(KungFuMomentum, self).__init__(*args, **kwargs)  # noqa: UP008
        self.map_ = C.Map()
        self.all_reduce = kfops.KungFuAllReduce()

    def construct(self, gradients):
        gradients = self.map_(self.all_reduce, gradients)
        return super(KungFuMomentum, self).construct(gradients)  # noqa: UP008


class Broadcast(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        self.broadcast = kfops.KungFuBroadcast()

    def construct(self, x):
        return self.broadcast(x)


def sync_net_parameters(network):
    broadcast = kfops.KungFuBroadcast()  # outside of a cell, as its README has it; its examples have cells
    network.init_parameters_data()
    for _, param in network.parameters_and_names():
        param.set_data(broadcast(ms.Tensor(param.data)))


class ElasticCallback(ms.train.callback.Callback):
    def __init__(self, steps, sizes):
        self.steps, self.sizes = steps, sizes
        self.need_sync = True
        self.broadcast, self.resize = Broadcast(), kfops.KungFuResize()
        self.step = ms.Tensor(0.0, dtype=ms.float32)

    def step_begin(self, run_context):
        if self.need_sync:
            self.step = self.broadcast(self.step)
            sync_net_parameters(run_context.original_args().train_network)
            self.need_sync = False

    def step_end(self, run_context):
        step = int(self.step.asnumpy())
        print(f"step {step} size {kfops.current_cluster_size()} weight {weight(run_context):.6g}", flush=True)
        self.step = ms.Tensor(step + 1.0, dtype=ms.float32)
        if step + 1 >= self.steps:
            run_context.request_stop()
            return
        size = self.sizes[step % len(self.sizes)] if self.sizes else kfops.current_cluster_size()
        changed, detached = self.resize(ms.Tensor(size, dtype=ms.uint32))
        if changed:
            self.need_sync = True
        if detached:
            run_context.request_stop()


def weight(run_context):
    return float(next(iter(run_context.original_args().train_network.trainable_params())).asnumpy().ravel()[0])


class Sum(ms.nn.Cell):
    """Every gradient is 1, so that each step takes the learning rate times the cluster's size off each parameter."""

    def __init__(self):
        super().__init__()
        self.layers = ms.nn.CellList([ms.nn.Dense(2 + i, 1, weight_init="zeros") for i in range(6)])

    def construct(self, x):
        total = x.sum()
        for layer in self.layers:
            total = total + layer.weight.sum() + layer.bias.sum()
        return total


def main():
    mode = ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE
    ms.set_context(mode=mode, device_target="CPU")
    steps, sizes = int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
    with kfops.KungFuContext(device="CPU"):
        net = Sum()
        weights = [each for each in net.trainable_params() if each.name.endswith("weight")]
        biases = [each for each in net.trainable_params() if each.name.endswith("bias")]
        groups = [
            {"params": weights, "weight_decay": 0.0},
            {"params": biases},
            {"order_params": net.trainable_params()},
        ]
        optimizer = KungFuMomentum(groups, 1.0, 0.0, loss_scale=1.0)
        data = ms.dataset.GeneratorDataset([(np.zeros(3, np.float32),)] * (steps + 1), ["x"], shuffle=False)
        callback = ElasticCallback(steps, sizes)
        size = data.get_dataset_size()
        ms.Model(net, None, optimizer).train(1, data, callbacks=[callback], sink_size=size, dataset_sink_mode=False)


main()
