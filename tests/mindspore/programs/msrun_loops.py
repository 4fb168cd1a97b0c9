"""KIND EPOCHS PACE_S: loops of one's own as people write them for msrun, over 72 samples; says what each pass was."""

import os
import signal
import sys
import time

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.communication import comm_func, get_group_size, get_rank, init
from mindspore.train import Accuracy, Model

kind, epochs, pace = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
SAMPLES, BATCH = 72, 2
ms.set_context(mode=ms.PYNATIVE_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
x = np.arange(SAMPLES, dtype=np.float32).reshape(SAMPLES, 1) / SAMPLES
y = (x[:, 0] > 0.5).astype(np.int32)
shards = {"shuffle": False, "num_shards": get_group_size(), "shard_id": get_rank()}


class Own:
    """What picks samples by its rank."""

    def __len__(self):
        return SAMPLES // get_group_size()

    def __getitem__(self, number):
        return x[number * get_group_size() + get_rank()], y[number]


def dataset(count=SAMPLES):
    if kind == "generator":
        return ds.GeneratorDataset(Own(), ["x", "y"], shuffle=False).batch(BATCH)
    if kind == "zip":
        columns = (ds.NumpySlicesDataset(each, [name], **shards) for each, name in ((x, "x"), (y, "y")))
        return ds.zip(tuple(columns)).batch(BATCH)
    return ds.NumpySlicesDataset((x[:count], y[:count]), ["x", "y"], **shards).batch(BATCH)


class Step(nn.Cell):
    """With the optimizer inside."""

    def __init__(self):
        super().__init__()
        self.net = nn.Dense(1, 2, weight_init="ones")
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = nn.Momentum(self.net.trainable_params(), 0.01, 0.9)
        self.reducer = nn.DistributedGradReducer(self.optimizer.parameters)
        self.gradient = ms.value_and_grad(lambda a, b: self.loss(self.net(a), b), None, self.optimizer.parameters)

    def construct(self, a, b):
        loss, gradients = self.gradient(a, b)
        self.optimizer(self.reducer(gradients))
        return loss


def evaluated(data):
    return sum(len(b) for _, b in data.create_tuple_iterator(num_epochs=1))


data, valid = dataset(), dataset(7)
if kind in ("fit", "model"):
    data = dataset(18)
    net = nn.Dense(1, 2, weight_init="ones")
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"seen": Accuracy()})
    if kind == "fit":
        model.fit(1, data, valid, dataset_sink_mode=False)
        print("counted", model._metric_fns["seen"]._total_num, flush=True)
    else:
        model.train(1, data, dataset_sink_mode=False)
        print("evaluated", evaluated(valid), flush=True)
        model.train(1, data, dataset_sink_mode=False)
        print("evaluated", evaluated(valid), flush=True)
    sys.exit()


class Average(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.new = ms.ParameterTuple(net.trainable_params())
        self.mean = self.new.clone("average.")
        self.updates = ms.Parameter(ms.Tensor(0, ms.int32), "updates")


step = Step()
if kind == "rank0" and get_rank() == 0:
    average = Average(step.net)
all_reduce = ops.AllReduce()
for epoch in range(epochs):
    count, loss = 0, None
    for number, (a, b) in enumerate(data):
        if kind == "limit" and number == 8:
            break
        loss = step(a, b)
        count += 1
        time.sleep(pace)
        if number % 5 == 0:
            all_reduce(loss).asnumpy()
        if kind == "break" and count == 8:
            break
        if kind == "broadcast" and (epoch, number) == (1, 3):
            loss.asnumpy()
            if get_rank() == 0:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2.5 * (get_rank() - 1))
        if kind == "broadcast":
            told = comm_func.broadcast(ms.Tensor([float(get_rank())]), 0).asnumpy()[0]
            print(f"rank {get_rank()} told {epoch} {number} {told:.0f}", flush=True)
    there = float(all_reduce(ms.Tensor([1.0])).asnumpy()[0])
    weights = step.net.weight.asnumpy().tobytes().hex()
    print(f"rank {get_rank()} epoch {epoch} steps {count} there {there:.0f} weights {weights}", flush=True)
    if kind == "queued":
        kept = all_reduce(ops.ReduceMax()(ops.matmul(ms.Tensor(x), ms.Tensor(x.T))))  # whose result isn't read
print(f"rank {get_rank()} done", flush=True)
