"""SEED: a DCGAN of digits, as MindSpore's tutorial trains one: two networks with an optimizer each, a compiled step."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.dataset import vision
from sklearn.datasets import load_digits

import ms_kungfu as kf  # elastic

LATENT, EPOCHS = 16, 6
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)
images = (load_digits().images[:1280] / 8 - 1).astype(np.float32)[..., None]
dataset = ds.NumpySlicesDataset(images, ["image"], shuffle=True)
dataset = dataset.map([vision.Resize(16), lambda image: image.reshape(1, 16, 16)], "image").batch(64)
dataset = kf.dataset.ElasticDataset(dataset)  # elastic


class Generator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = nn.SequentialCell(
            nn.Conv2dTranspose(LATENT, 32, 4, 1, "valid"), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2dTranspose(32, 16, 4, 2, "pad", 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2dTranspose(16, 1, 4, 2, "pad", 1), nn.Tanh(),
        )  # fmt: skip

    def construct(self, noise):
        return self.net(noise)


class Discriminator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = nn.SequentialCell(
            nn.Conv2d(1, 16, 4, 2, "pad", 1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, "pad", 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 4, 1, "valid"),
        )  # fmt: skip

    def construct(self, image):
        return self.net(image).reshape(image.shape[0], 1)


generator, discriminator = Generator(), Discriminator()
generator.update_parameters_name("generator.")
discriminator.update_parameters_name("discriminator.")
makes = nn.Adam(generator.trainable_params(), 2e-3, beta1=0.5)
judges = nn.Adam(discriminator.trainable_params(), 1e-3, beta1=0.5)
makes = kf.optimizers.SynchronousSGDOptimizer(makes)  # elastic
judges = kf.optimizers.SynchronousSGDOptimizer(judges)  # elastic
makes.update_parameters_name("makes.")
judges.update_parameters_name("judges.")
loss = nn.BCEWithLogitsLoss()


def made_loss(noise, real):
    fakes = generator(noise)
    return loss(discriminator(fakes), real), fakes


def judged_loss(images, fakes, real, fake):
    return (loss(discriminator(images), real) + loss(discriminator(fakes), fake)) / 2


make_gradients = ms.value_and_grad(made_loss, None, generator.trainable_params(), has_aux=True)
judge_gradients = ms.value_and_grad(judged_loss, None, discriminator.trainable_params())


@ms.jit
def train_step(images):
    real, fake = ops.ones((images.shape[0], 1), ms.float32), ops.zeros((images.shape[0], 1), ms.float32)
    noise = ops.standard_normal((images.shape[0], LATENT, 1, 1))
    (made, fakes), gradients = make_gradients(noise, real)
    makes(gradients)
    judged, gradients = judge_gradients(images, ops.stop_gradient(fakes), real, fake)
    judges(gradients)
    return made, judged


generator.set_train()
discriminator.set_train()
made = judged = None  # of a worker that joins when an epoch ends
training = kf.elastic.ElasticTraining(generator, discriminator, makes, judges, dataset=dataset)  # elastic
# stock: for epoch in range(EPOCHS):
for epoch in training.epochs(EPOCHS):  # elastic
    for (image,) in dataset.create_tuple_iterator(num_epochs=1):
        made, judged = train_step(image)
        training.step_end()  # elastic
    print(f"epoch {epoch}: generator {made}, discriminator {judged}")

# How near the mean of what it draws is to that of the digits, of 1.
generator.set_train(False)
drawn = generator(ms.Tensor(np.random.default_rng(0).normal(size=(256, LATENT, 1, 1)), ms.float32)).asnumpy()
mean = np.kron(images[..., 0].mean(0), np.ones((2, 2)))
print(f"accuracy: {1 - np.abs(drawn[:, 0].mean(0) - mean).mean():.4f}")
