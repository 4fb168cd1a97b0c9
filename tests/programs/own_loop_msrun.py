"""SEED: a loop of one's own, written for msrun: a compiled step with a nn.DistributedGradReducer, and an evaluation
whose counts all ranks add up. It knows nothing of ms_kungfu."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from sklearn.datasets import load_digits

EPOCHS, BATCH = 5, 8
# stock: BATCH = 24
ms.set_context(mode=ms.GRAPH_MODE)
init()  # msrun
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)  # msrun
ms.set_seed(int(sys.argv[1]))


def digits(chosen, shuffle):
    x, y = load_digits(return_X_y=True)
    columns = (x[chosen].astype(np.float32) / 16, y[chosen].astype(np.int32))
    shards = {"num_shards": get_group_size(), "shard_id": get_rank()}  # msrun
    # stock: shards = {}
    return ds.NumpySlicesDataset(columns, ["image", "label"], shuffle=shuffle, **shards).batch(BATCH)


train, test = digits(slice(0, 1280), True), digits(slice(1280, None), False)
network = nn.SequentialCell(nn.Dense(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dense(48, 10))
criterion = nn.CrossEntropyLoss()
optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
reducer, all_reduce = ops.identity, ops.identity
reducer = nn.DistributedGradReducer(optimizer.parameters)  # msrun
all_reduce = ops.AllReduce(ops.ReduceOp.SUM)  # msrun


def forward(image, label):
    logits = network(image)
    return criterion(logits, label), logits


gradient = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)


@ms.jit
def train_step(image, label):
    (loss, _), gradients = gradient(image, label)
    gradients = reducer(gradients)
    return ops.depend(loss, optimizer(gradients))


for epoch in range(EPOCHS):
    network.set_train(True)
    for step, (image, label) in enumerate(train):
        loss = train_step(image, label)
        if step % 20 == 0:
            print(f"epoch {epoch}, step {step}: loss {loss}")
    network.set_train(False)
    right = total = 0
    for image, label in test.create_tuple_iterator(num_epochs=1):
        right += int((network(image).asnumpy().argmax(1) == label.asnumpy()).sum())
        total += len(label)
    right, total = (all_reduce(ms.Tensor(each, ms.float32)) for each in (right, total))
    print(f"epoch {epoch}: accuracy: {float(right / total):.4f}", flush=True)
