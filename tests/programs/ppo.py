"""SEED: PPO on pendulums: each worker collects steps in its part of the environments, and all update by all of them."""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import ms_kungfu as kf  # elastic

ENVIRONMENTS, HORIZON, ITERATIONS, UPDATES, CLIP, DISCOUNT = 8, 8, 14, 2, 0.2, 0.95
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.PYNATIVE_MODE)


class Pendulum:
    """To be held upright by a torque; it begins at an angle and draws noise of its number and the iteration."""

    def __init__(self, number, iteration):
        self.draw = np.random.default_rng([number, iteration])
        self.angle, self.speed = self.draw.uniform(-1, 1, 2)

    def observe(self):
        return np.array([np.cos(self.angle), np.sin(self.angle), self.speed], np.float32)

    def step(self, torque):
        reward = -(self.angle**2 + 0.1 * self.speed**2 + 0.01 * torque**2)
        self.speed += 0.05 * (10 * np.sin(self.angle) + 3 * torque)
        self.angle += 0.05 * self.speed
        return reward


policy = nn.SequentialCell(nn.Dense(3, 16), nn.Tanh(), nn.Dense(16, 1))
values = nn.SequentialCell(nn.Dense(3, 16), nn.Tanh(), nn.Dense(16, 1))
policy.update_parameters_name("policy.")
values.update_parameters_name("values.")
network = nn.CellList([policy, values])
optimizer = nn.Adam(network.trainable_params(), 5e-3)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic


def loss_of(observations, actions, noise, advantages, returns):
    """The density of a normal distribution of variance 1, by what its old mean was exceeded by."""
    exceeded = actions - policy(observations)[:, 0]
    ratio = ops.exp((noise * noise - exceeded * exceeded) / 2)
    gain = ops.minimum(ratio * advantages, ops.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
    return ((values(observations)[:, 0] - returns) ** 2).mean() / 2 - gain


gradient = ms.value_and_grad(loss_of, None, network.trainable_params())


def collect(environments):
    """What an update needs, (time, environment) in one dimension, and the mean of the rewards."""
    rows = []
    for _ in range(HORIZON):
        observations = np.stack([each.observe() for each in environments])
        noise = np.array([each.draw.normal() for each in environments], np.float32)
        actions = policy(ms.Tensor(observations)).asnumpy()[:, 0] + noise
        rewards = [each.step(float(action)) for each, action in zip(environments, actions)]
        rows.append((observations, actions, noise, np.array(rewards, np.float32)))
    observations, actions, noise, rewards = (np.stack(each) for each in zip(*rows))
    returns, ahead = np.empty_like(rewards), np.zeros(len(environments), np.float32)
    for time in reversed(range(HORIZON)):
        ahead = returns[time] = rewards[time] + DISCOUNT * ahead
    advantages = returns - values(ms.Tensor(observations.reshape(-1, 3))).asnumpy().reshape(returns.shape)
    columns = observations, actions, noise, advantages / 10, returns
    return [ms.Tensor(each.reshape(HORIZON * len(environments), *each.shape[2:])) for each in columns], rewards.mean()


training = kf.elastic.ElasticTraining(network, optimizer)  # elastic
rank, size = 0, 1
# stock: for iteration in range(ITERATIONS):
for iteration in training.epochs(ITERATIONS):  # elastic
    rank, size = kf.current_rank(), kf.current_cluster_size()  # elastic
    columns, reward = collect([Pendulum(number, iteration) for number in range(ENVIRONMENTS)[rank::size]])
    for _ in range(UPDATES):
        _, gradients = gradient(*columns)
        optimizer(gradients)
    training.step_end()  # elastic
    print(f"iteration {iteration}: reward {reward}")

_, reward = collect([Pendulum(number, ITERATIONS) for number in range(ENVIRONMENTS)])
print(f"figure: {reward:.8f}")
