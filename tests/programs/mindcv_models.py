"""DATA SEED MODEL EPOCHS: a model of mindcv 0.3.0 with its loader, loss, cosine rates and optimizer, by Model.train."""

import sys

import mindspore as ms
from mindcv.data import create_dataset, create_loader
from mindcv.loss import create_loss
from mindcv.models import create_model
from mindcv.optim import create_optimizer
from mindcv.scheduler import create_scheduler
from mindspore.dataset import vision
from mindspore.train import LossMonitor, Model

import ms_kungfu as kf  # elastic

data, seed, name, epochs = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
ms.set_seed(seed)
ms.set_context(mode=ms.GRAPH_MODE)


def loader(split):
    dataset = create_dataset("mnist", data, split, shuffle=split == "train", num_parallel_workers=1)
    transform = [vision.Rescale(1 / 127.5, -1), vision.HWC2CHW()]
    training = split == "train"
    return create_loader(dataset, 32, is_training=training, transform=transform, num_parallel_workers=1)


train, test = loader("train"), loader("test")
steps = train.get_dataset_size()
train = kf.dataset.ElasticDataset(train)  # elastic
network = create_model(name, num_classes=10, in_channels=1)
loss = create_loss("CE")
schedule = {"lr": 0.05, "min_lr": 1e-4, "warmup_epochs": 0, "decay_epochs": epochs, "num_epochs": epochs}
rates = create_scheduler(steps, "cosine_decay", **schedule)
optimizer = create_optimizer(network.trainable_params(), "momentum", rates, weight_decay=1e-4)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic
model = Model(network, loss, optimizer, metrics={"accuracy"})
callbacks = [LossMonitor(steps)]
callbacks.append(kf.callbacks.KungFuElasticCallback())  # elastic
model.train(epochs, train, callbacks=callbacks, dataset_sink_mode=False)
print(f"accuracy: {model.eval(test, dataset_sink_mode=False)['accuracy']:.4f}")
