"""SEED: a trainer of a diffusion model: one loop over a dataset with repeat() that counts its steps and breaks off,
accumulated gradients, and an average of the weights that begins late."""

import copy
import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from sklearn.datasets import load_digits

import ms_kungfu as kf  # elastic

TIMES, STEPS, ACCUMULATE, EMA_AFTER, EMA_DECAY = 50, 25, 2, 10, 0.9
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.PYNATIVE_MODE)
betas = np.linspace(1e-4, 0.05, TIMES)
kept = np.cumprod(1 - betas)
DIGITS = (load_digits().data[:240] / 8 - 1).astype(np.float32)


class Digits:
    """A digit, a time, and the noise that it has been mixed with by then."""

    def __len__(self):
        return len(DIGITS)

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        time, noise = draw.integers(TIMES), draw.normal(size=64).astype(np.float32)
        return DIGITS[index], np.array([time / TIMES], np.float32), np.float32(kept[time]).reshape(1), noise


class Denoiser(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = nn.SequentialCell(nn.Dense(65, 48), nn.SiLU(), nn.Dense(48, 64))

    def construct(self, image, time):
        return self.net(ops.cat((image, time), axis=1))


class EMA:
    """A copy of the network, which follows it once EMA_AFTER steps are done."""

    def __init__(self, network):
        self.network = copy.deepcopy(network)
        for parameter in self.network.get_parameters():
            parameter.name = f"ema.{parameter.name}"

    def update(self, network, step):
        decay = EMA_DECAY if step >= EMA_AFTER else 0.0
        for mean, new in zip(self.network.get_parameters(), network.get_parameters()):
            mean.set_data(decay * mean + (1 - decay) * new)


loader = ds.GeneratorDataset(Digits(), ["image", "time", "kept", "noise"], shuffle=False).batch(12).repeat(10)
loader = kf.dataset.ElasticDataset(loader, shuffle=False)  # elastic
network = Denoiser()
ema = EMA(network)
optimizer = nn.Adam(network.trainable_params(), 2e-3, beta2=0.99)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic


def loss_of(image, time, kept, noise):
    mixed = ops.sqrt(kept) * image + ops.sqrt(1 - kept) * noise
    return ops.smooth_l1_loss(network(mixed, time), noise).mean() / ACCUMULATE


gradient = ms.value_and_grad(loss_of, None, network.trainable_params())
accumulated, step = [], 0
training = kf.elastic.ElasticTraining(network, optimizer, ema.network, dataset=loader)  # elastic
training.begin()  # elastic
for image, time, part, noise in loader.create_tuple_iterator(num_epochs=1):
    loss, gradients = gradient(image, time, part, noise)
    accumulated.append(gradients)
    if len(accumulated) == ACCUMULATE:
        optimizer(tuple(sum(each) for each in zip(*accumulated)))
        accumulated = []
        step = training.step  # elastic
        ema.update(network, step)
        step += 1
        training.step_end()  # elastic
        if step % 10 == 0:
            print(f"step {step}: loss {loss}")
    if step >= STEPS:
        break
training.end()  # elastic

columns = [ms.Tensor(np.stack(each)) for each in zip(*(Digits()[index] for index in range(64)))]
figures = [float(loss_of(*columns))]
network = ema.network
print(f"figure: {figures[0] + float(loss_of(*columns)):.8f}")
