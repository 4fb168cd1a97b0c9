"""SEED: a graph convolution over a whole graph, without a dataset: each step is an epoch of its own."""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import ms_kungfu as kf  # elastic

NODES, FEATURES, CLASSES, EPOCHS = 120, 16, 3, 30
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)
draw = np.random.default_rng(0)
labels = draw.integers(0, CLASSES, NODES)
near = (draw.random((NODES, NODES)) < np.where(labels[:, None] == labels, 0.15, 0.02)) | np.eye(NODES, dtype=bool)
near = (near | near.T).astype(np.float32)
degrees = near.sum(axis=1)
adjacency = ms.Tensor(near / np.sqrt(degrees[:, None] * degrees))
features = ms.Tensor(draw.normal(size=(NODES, FEATURES)) + np.eye(CLASSES, FEATURES)[labels], ms.float32)
targets, trained = ms.Tensor(labels, ms.int32), ms.Tensor(np.arange(NODES) < 60, ms.float32)


class Convolution(nn.Cell):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.dense = nn.Dense(inputs, outputs)

    def construct(self, adjacency, features):
        return ops.matmul(adjacency, self.dense(features))


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(FEATURES, 16), Convolution(16, CLASSES)

    def construct(self, adjacency, features):
        return self.second(adjacency, ops.relu(self.first(adjacency, features)))


network = Network()
criterion = nn.CrossEntropyLoss(reduction="none")
optimizer = nn.Adam(network.trainable_params(), 1e-2, weight_decay=5e-4)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic


def masked_loss():
    return (criterion(network(adjacency, features), targets) * trained).sum() / trained.sum()


gradient = ms.value_and_grad(masked_loss, None, network.trainable_params())


@ms.jit
def train_step():
    loss, gradients = gradient()
    return ops.depend(loss, optimizer(gradients))


training = kf.elastic.ElasticTraining(network, optimizer)  # elastic
# stock: for epoch in range(EPOCHS):
for epoch in training.epochs(EPOCHS):  # elastic
    loss = train_step()
    training.step_end()  # elastic
    print(f"epoch {epoch}: loss {loss}")

correct = network(adjacency, features).asnumpy().argmax(axis=1) == labels
print(f"accuracy on the other nodes {correct[60:].mean():.3f}, figure: {float(masked_loss()):.8f}")
