"""SEED: Wide&Deep: one cell with two optimizers, FTRL for the wide part and LazyAdam for the deep one, and tables whose
gradients are sparse."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops

import ms_kungfu as kf  # elastic

WORDS, FIELDS, BATCH, BATCHES, EPOCHS = 120, 4, 24, 20, 2
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)
draw = np.random.default_rng(0)
# A batch reads no row twice: MindSpore's LazyAdam on CPUs, alone, updates a row once for each time that it is read.
ids = np.concatenate([draw.permutation(WORDS)[: BATCH * FIELDS].reshape(BATCH, FIELDS) for _ in range(BATCHES)])
ids = ids.astype(np.int32)
clicked = (np.sin(ids).sum(axis=1, keepdims=True) > 0).astype(np.float32)


class WideDeep(nn.Cell):
    def __init__(self):
        super().__init__()
        self.wide = nn.EmbeddingLookup(WORDS, 1, sparse=True)
        self.deep = nn.EmbeddingLookup(WORDS, 4, sparse=True)
        self.dense = nn.SequentialCell(nn.Dense(FIELDS * 4, 16), nn.ReLU(), nn.Dense(16, 1))

    def construct(self, ids):
        return self.wide(ids).sum(axis=1) + self.dense(self.deep(ids).reshape(ids.shape[0], -1))


class Loss(nn.Cell):
    """Of both parts together."""

    def __init__(self, network):
        super().__init__()
        self.network, self.loss = network, nn.BCEWithLogitsLoss()

    def construct(self, ids, clicked):
        return self.loss(self.network(ids), clicked)


class TrainStep(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network = network
        wide = [each for each in network.trainable_params() if "wide" in each.name]
        deep = [each for each in network.trainable_params() if "wide" not in each.name]
        self.wide, self.deep = ms.ParameterTuple(wide), ms.ParameterTuple(deep)
        wide_optimizer = nn.FTRL(wide, learning_rate=5e-2, l1=1e-8, l2=1e-8, initial_accum=1.0)
        deep_optimizer = nn.LazyAdam(deep, learning_rate=5e-3)
        wide_optimizer = kf.optimizers.SynchronousSGDOptimizer(wide_optimizer)  # elastic
        deep_optimizer = kf.optimizers.SynchronousSGDOptimizer(deep_optimizer)  # elastic
        self.wide_optimizer, self.deep_optimizer = wide_optimizer, deep_optimizer
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, ids, clicked):
        loss = self.network(ids, clicked)
        wide = self.gradient(self.network, self.wide)(ids, clicked)
        deep = self.gradient(self.network, self.deep)(ids, clicked)
        return ops.depend(loss, (self.wide_optimizer(wide), self.deep_optimizer(deep)))


dataset = ds.NumpySlicesDataset((ids, clicked), ["ids", "clicked"], shuffle=False).batch(BATCH)
dataset = kf.dataset.ElasticDataset(dataset, shuffle=False)  # elastic
network = WideDeep()
model = ms.Model(TrainStep(Loss(network)))
callbacks = []
callbacks = [kf.callbacks.KungFuElasticCallback()]  # elastic
model.train(EPOCHS, dataset, callbacks=callbacks, dataset_sink_mode=False)
print(f"figure: {float(Loss(network)(ms.Tensor(ids), ms.Tensor(clicked))):.8f}")
