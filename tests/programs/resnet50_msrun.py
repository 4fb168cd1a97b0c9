"""DATA SEED: ResNet-50 on CIFAR-10, written for msrun, as MindSpore's tutorial of data parallel training does it:
init(), set_auto_parallel_context, a dataset that is sharded by rank, Model.train. It knows nothing of ms_kungfu."""

import sys

import mindspore as ms
import mindspore.dataset as ds
from mindspore import Model, nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import transforms, vision
from mindspore.train import LossMonitor

data, seed = sys.argv[1], int(sys.argv[2])
EPOCHS, BATCH = 3, 8
# stock: BATCH = 24
ms.set_context(mode=ms.GRAPH_MODE)
init()  # msrun
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)  # msrun
ms.set_seed(seed)


def loader(training):
    part = {"num_samples": 1280 if training else 320}  # the files have 10,000
    if training:
        part = {"num_shards": get_group_size(), "shard_id": get_rank()}  # msrun
        part["num_samples"] = 1280 // get_group_size()  # msrun
        # stock: pass
    dataset = ds.Cifar10Dataset(data, "train" if training else "test", shuffle=training, **part)
    augmentation = [vision.RandomCrop((32, 32), (2, 2, 2, 2))] if training else []
    normalized = [vision.Rescale(1 / 255, 0), vision.Normalize((0.3,) * 3, (0.35,) * 3), vision.HWC2CHW()]
    dataset = dataset.map(transforms.TypeCast(ms.int32), "label").map([*augmentation, *normalized], "image")
    return dataset.batch(BATCH, drop_remainder=training)


def convolution(incoming, outgoing, size, stride=1):
    return [nn.Conv2d(incoming, outgoing, size, stride, pad_mode="same"), nn.BatchNorm2d(outgoing, momentum=0.9)]


class Bottleneck(nn.Cell):
    def __init__(self, incoming, width, stride):
        super().__init__()
        self.main = nn.SequentialCell(
            *convolution(incoming, width, 1), nn.ReLU(),
            *convolution(width, width, 3, stride), nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )  # fmt: skip
        self.straight = incoming == 4 * width
        self.shortcut = nn.SequentialCell(*convolution(incoming, 4 * width, 1, stride))
        self.relu = nn.ReLU()

    def construct(self, x):
        return self.relu(self.main(x) + (x if self.straight else self.shortcut(x)))


class ResNet50(nn.Cell):
    def __init__(self, classes=10, base=16):
        super().__init__()
        layers, incoming = [*convolution(3, base, 3, 2), nn.ReLU()], base
        for number, blocks in enumerate((3, 4, 6, 3)):
            width = base << number
            for block in range(blocks):
                layers.append(Bottleneck(incoming, width, 2 if number and not block else 1))
                incoming = 4 * width
        self.features = nn.SequentialCell(layers)
        self.head = nn.Dense(incoming, classes)

    def construct(self, x):
        return self.head(self.features(x).mean((2, 3)))


network = ResNet50()
loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.005, 0.9)
model = Model(network, loss, optimizer, metrics={"accuracy"})
train = loader(True)
model.train(EPOCHS, train, callbacks=[LossMonitor(20)], dataset_sink_mode=False)
print(f"accuracy: {model.eval(loader(False), dataset_sink_mode=False)['accuracy']:.4f}")
