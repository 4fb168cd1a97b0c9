"""MODEL STEPS: LeNet, or a model of mindcv's, on random images, written for msrun; prints the samples a second of all
ranks, but for the first steps. It knows nothing of ms_kungfu."""

import sys
import time

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Model, nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import Callback

name, steps = sys.argv[1], int(sys.argv[2])
BATCH, FIRST = 32, 10
ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
ms.set_seed(1)


def lenet():
    return nn.SequentialCell(
        nn.Conv2d(1, 6, 5, pad_mode="valid"), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5, pad_mode="valid"), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(),
        nn.Dense(400, 120), nn.ReLU(), nn.Dense(120, 84), nn.ReLU(), nn.Dense(84, 10),
    )  # fmt: skip


def other():
    from mindcv.models import create_model

    return create_model(name, num_classes=10)


class Rate(Callback):
    def on_train_step_end(self, run_context):
        run_context.original_args().net_outputs.asnumpy()
        step = run_context.original_args().cur_step_num
        if step == FIRST:
            self.began = time.monotonic()
        if step == steps and get_rank() == 0:
            rate = (steps - FIRST) * BATCH * get_group_size() / (time.monotonic() - self.began)
            print(f"rate: {rate:.1f}", flush=True)


channels = 1 if name == "lenet" else 3
draw = np.random.default_rng(0)
count = BATCH * get_group_size() * steps
images = draw.normal(size=(256, channels, 32, 32)).astype(np.float32)
labels = draw.integers(0, 10, 256).astype(np.int32)


class Samples:
    def __len__(self):
        return count

    def __getitem__(self, index):
        return images[index % 256], labels[index % 256]


data = ds.GeneratorDataset(Samples(), ["image", "label"], num_shards=get_group_size(), shard_id=get_rank())
data = data.batch(BATCH, drop_remainder=True)
network = lenet() if name == "lenet" else other()
optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
Model(network, nn.CrossEntropyLoss(), optimizer).train(1, data, callbacks=[Rate()], dataset_sink_mode=False)
