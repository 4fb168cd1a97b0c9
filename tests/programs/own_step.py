"""SEED: a training cell of one's own, by GradOperation, under Model.fit with MindSpore's own callbacks."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    Model,
    ModelCheckpoint,
    ReduceLROnPlateau,
    SummaryCollector,
)
from sklearn.datasets import load_digits

import ms_kungfu as kf  # elastic

ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)


class Step(nn.TrainOneStepCell):
    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, image, label):
        loss = self.network(image, label)
        gradients = self.gradient(self.network, self.weights)(image, label)
        return ops.depend(loss, self.optimizer(gradients))


class Tell(Callback):
    """ReduceLROnPlateau asks for an optimizer that a Model without one doesn't have."""

    def on_train_begin(self, run_context):
        run_context.original_args().optimizer = optimizer


def digits(chosen, shuffle):
    x, y = load_digits(return_X_y=True)
    columns = (x[chosen].astype(np.float32) / 16, y[chosen].astype(np.int32))
    return ds.NumpySlicesDataset(columns, ["image", "label"], shuffle=shuffle).batch(32)


train, valid = digits(slice(0, 1280), True), digits(slice(1280, None), False)
train = kf.dataset.ElasticDataset(train)  # elastic
network = nn.SequentialCell(nn.Dense(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dense(48, 10))
loss = nn.CrossEntropyLoss()
optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic
step = Step(nn.WithLossCell(network, loss), optimizer).set_train()
evaluation = nn.WithEvalCell(network, loss)
model = Model(step, metrics={"accuracy": nn.Accuracy()}, eval_network=evaluation, eval_indexes=[0, 1, 2])
callbacks = [
    Tell(),
    ReduceLROnPlateau("accuracy", factor=0.5, patience=1, mode="max"),
    EarlyStopping("accuracy", patience=4, mode="max"),
    ModelCheckpoint("digits", "saved", CheckpointConfig(save_checkpoint_steps=20, keep_checkpoint_max=3)),
    SummaryCollector("summary", collect_freq=10),
]
callbacks.insert(0, kf.callbacks.KungFuElasticCallback())  # elastic
model.fit(6, train, valid, callbacks=callbacks, dataset_sink_mode=False, valid_dataset_sink_mode=False)
print(f"accuracy: {model.eval(valid)['accuracy']:.4f}")
