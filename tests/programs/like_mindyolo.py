"""SEED [EPOCHS]: the calls of mindyolo's train.py under msrun: all epochs are one pass over a dataset with repeat(),
which the loop counts. Accumulated gradients, a loss scale, momentum that warms up, an average of the weights."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.amp import StaticLossScaler, all_finite
from mindspore.communication import get_group_size, get_rank, init

PER_BATCH, EPOCHS, ACCUMULATE, WARMUP = 8, 3, 2, 20
# stock: PER_BATCH = 16
ms.set_context(mode=ms.GRAPH_MODE)
np.random.seed(int(sys.argv[1]))
ms.set_seed(int(sys.argv[1]))
rank, rank_size = 0, 1
reducer = ops.functional.identity
init()  # msrun
rank, rank_size = get_rank(), get_group_size()  # msrun
ms.set_auto_parallel_context(device_num=rank_size, parallel_mode="data_parallel", gradients_mean=True)  # msrun


class Boxes:
    """Pictures with a bright rectangle, and where it is."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.labels = np.concatenate([draw.integers(0, 8, (320, 2)), draw.integers(2, 8, (320, 2))], axis=1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        x, y, width, height = self.labels[index]
        image = np.zeros((1, 16, 16), np.float32)
        image[0, y : y + height, x : x + width] = 1
        return image, (self.labels[index] / 16).astype(np.float32)

    def train_collate_fn(self, images, labels, batch_info):
        return np.stack(images), np.stack(labels)


def create_loader(dataset):
    shards = {"num_shards": rank_size, "shard_id": rank} if rank_size > 1 else {}
    loader = ds.GeneratorDataset(dataset, ["image", "label"], shuffle=False, num_parallel_workers=1, **shards)
    loader = loader.batch(
        PER_BATCH, per_batch_map=dataset.train_collate_fn, input_columns=["image", "label"],
        output_columns=["images", "labels"], drop_remainder=True,
    )  # fmt: skip
    return loader.repeat(EPOCHS)


def create_model():
    return nn.SequentialCell(
        nn.Conv2d(1, 4, 3, 2, has_bias=True), nn.ReLU(), nn.Flatten(), nn.Dense(256, 16), nn.ReLU(), nn.Dense(16, 4)
    )


class EMA(nn.Cell):
    def __init__(self, model, ema_model):
        super().__init__()
        self.ema = ema_model
        self.ema.set_train(False)
        self.weight = ms.ParameterTuple(list(model.get_parameters()))
        self.ema_weight = ms.ParameterTuple(list(ema_model.get_parameters()))
        self.updates = ms.Parameter(Tensor(0, ms.float32), requires_grad=False)
        self.map = ops.HyperMap()

    @ms.jit
    def update(self):
        def update_parameter(decay, mean, weight):
            return ops.assign(mean, weight * (1.0 - decay) + mean * decay)

        ops.assign_add(self.updates, 1)
        decay = 0.95 * (1 - ops.exp(-self.updates / 5))
        return self.map(ops.partial(update_parameter, decay), self.ema_weight, self.weight)


dataloader = create_loader(Boxes())
steps_per_epoch = dataloader.get_dataset_size() // EPOCHS
network, ema_network = create_model(), create_model()
ema = EMA(network, ema_network)
criterion = nn.MSELoss()
rates = [0.05 * min(1, (step + 1) / 10) for step in range(steps_per_epoch * EPOCHS)]
biases = [each for each in network.trainable_params() if each.ndim == 1]
weights = [each for each in network.trainable_params() if each.ndim > 1]
groups = [{"params": weights, "weight_decay": 5e-4, "lr": rates}, {"params": biases, "lr": rates}]
optimizer = nn.Momentum(groups, rates, 0.9, use_nesterov=True)
warmup_momentum = [float(np.interp(i, [0, WARMUP], [0.6, 0.9])) for i in range(WARMUP)]
scaler = StaticLossScaler(scale_value=1024)
reducer = nn.DistributedGradReducer(optimizer.parameters, True, rank_size)  # msrun


def forward(images, labels):
    loss = criterion(network(images), labels)
    return scaler.scale(loss), ops.stop_gradient(loss)


gradient = ops.value_and_grad(forward, None, optimizer.parameters, has_aux=True)


@ms.jit
def train_step_fn(images, labels):
    (_, loss), gradients = gradient(images, labels)
    gradients = scaler.unscale(reducer(gradients))
    return loss, gradients, all_finite(gradients)


network.set_train(True)
optimizer.set_train(True)
accumulated, plus = None, ops.HyperMap()
for i, data in enumerate(dataloader.create_dict_iterator(output_numpy=False, num_epochs=1, do_copy=False)):
    if i < WARMUP:
        optimizer.momentum = Tensor(warmup_momentum[i], optimizer.momentum.dtype)
    loss, gradients, finite = train_step_fn(data["images"], data["labels"])
    scaler.adjust(finite)
    accumulated = gradients if accumulated is None else plus(ops.add, accumulated, gradients)
    if (i + 1) % ACCUMULATE == 0:
        optimizer(accumulated)
        ema.update()
        accumulated = None
    if (i + 1) % steps_per_epoch == 0:
        print(f"epoch {(i + 1) // steps_per_epoch}: loss {loss}")
        if rank % rank_size == 0:
            ms.save_checkpoint(ema.ema, f"EMA-{(i + 1) // steps_per_epoch}.ckpt")

images, labels = (Tensor(each) for each in map(np.stack, zip(*(Boxes()[index] for index in range(64)))))
print(f"figure: {float(criterion(network(images), labels) + criterion(ema.ema(images), labels)):.8f}")
