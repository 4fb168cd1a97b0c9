"""SEED: a WGAN-GP of digits: the critic is updated in each step, the generator in every fifth one."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from sklearn.datasets import load_digits

import ms_kungfu as kf  # elastic

LATENT, EPOCHS, CRITIC_STEPS, PENALTY = 8, 2, 5, 10.0
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)
DIGITS = (load_digits().data[:480] / 8 - 1).astype(np.float32)


class Digits:
    """A digit, noise for its fake, and where between both the gradient's norm is penalized."""

    def __len__(self):
        return len(DIGITS)

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        return DIGITS[index], draw.normal(size=LATENT).astype(np.float32), draw.random(1, np.float32)


dataset = ds.GeneratorDataset(Digits(), ["real", "noise", "mix"], shuffle=False).batch(24)
dataset = kf.dataset.ElasticDataset(dataset, shuffle=False)  # elastic
generator = nn.SequentialCell(nn.Dense(LATENT, 32), nn.LeakyReLU(0.2), nn.Dense(32, 64), nn.Tanh())
critic = nn.SequentialCell(nn.Dense(64, 32), nn.LeakyReLU(0.2), nn.Dense(32, 1))
generator.update_parameters_name("generator.")
critic.update_parameters_name("critic.")
makes = nn.Adam(generator.trainable_params(), 1e-3, beta1=0.5)
judges = nn.Adam(critic.trainable_params(), 1e-3, beta1=0.5)
makes = kf.optimizers.SynchronousSGDOptimizer(makes)  # elastic
judges = kf.optimizers.SynchronousSGDOptimizer(judges)  # elastic
makes.update_parameters_name("makes.")
judges.update_parameters_name("judges.")


def judged(images):
    return critic(images).sum()


slope = ops.grad(judged)


def judged_loss(real, noise, mix):
    fakes = ops.stop_gradient(generator(noise))
    slopes = slope(mix * real + (1 - mix) * fakes)
    norm = ops.sqrt((slopes * slopes).sum(axis=1) + 1e-12)
    return critic(fakes).mean() - critic(real).mean() + PENALTY * ((norm - 1) ** 2).mean()


def made_loss(noise):
    return -critic(generator(noise)).mean()


judge_gradients = ms.value_and_grad(judged_loss, None, critic.trainable_params())
make_gradients = ms.value_and_grad(made_loss, None, generator.trainable_params())


@ms.jit
def critic_step(real, noise, mix):
    loss, gradients = judge_gradients(real, noise, mix)
    return ops.depend(loss, judges(gradients))


@ms.jit
def generator_step(noise):
    loss, gradients = make_gradients(noise)
    return ops.depend(loss, makes(gradients))


# stock: step = 0
training = kf.elastic.ElasticTraining(generator, critic, makes, judges, dataset=dataset)  # elastic
# stock: for _ in range(EPOCHS):
for _ in training.epochs(EPOCHS):  # elastic
    for real, noise, mix in dataset.create_tuple_iterator(num_epochs=1):
        critic_step(real, noise, mix)
        # stock: step += 1
        # stock: if step % CRITIC_STEPS == 0:
        if (training.step + 1) % CRITIC_STEPS == 0:  # elastic
            generator_step(noise)
        training.step_end()  # elastic

noise = ms.Tensor(np.random.default_rng(0).normal(size=(256, LATENT)), ms.float32)
print(f"figure: {float(critic(ms.Tensor(DIGITS)).mean() - critic(generator(noise)).mean()):.8f}")
