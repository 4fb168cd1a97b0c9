"""SEED: a physics-informed network for Burgers' equation: derivatives of second order in a compiled step, and points of
the domain, the initial and the boundary condition side by side. MindSpore's data_sink isn't there on CPUs."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops

import ms_kungfu as kf  # elastic

EPOCHS, POINTS, VISCOSITY = 3, 384, 0.01 / np.pi
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)


def points(seed):
    """(x, t) in the domain, at the beginning and at the boundary."""
    draw = np.random.default_rng(seed)
    x, t = draw.uniform(-1, 1, (2, POINTS)), draw.uniform(0, 1, (2, POINTS))
    sides = draw.choice([-1.0, 1.0], POINTS)
    columns = (x[0], t[0]), (x[1], np.zeros(POINTS)), (sides, t[1])
    return tuple(np.stack(each, axis=1).astype(np.float32) for each in columns)


dataset = ds.NumpySlicesDataset(points(0), ["domain", "beginning", "boundary"], shuffle=False)
dataset = dataset.batch(32, drop_remainder=True)
dataset = kf.dataset.ElasticDataset(dataset, shuffle=False)  # elastic
model = nn.SequentialCell(nn.Dense(2, 20), nn.Tanh(), nn.Dense(20, 20), nn.Tanh(), nn.Dense(20, 1))
optimizer = nn.Adam(model.trainable_params(), 2e-3)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic


def total(xt):
    return model(xt).sum()


first = ops.grad(total)


def total_slope(xt):
    return first(xt)[:, 0].sum()


second = ops.grad(total_slope)


def get_loss(domain, beginning, boundary):
    u, slopes = model(domain)[:, 0], first(domain)
    residual = slopes[:, 1] + u * slopes[:, 0] - VISCOSITY * second(domain)[:, 0]
    start = model(beginning)[:, 0] + ops.sin(np.pi * beginning[:, 0])
    return (residual * residual).mean() + (start * start).mean() + (model(boundary) ** 2).mean()


gradient = ms.value_and_grad(get_loss, None, model.trainable_params())


@ms.jit
def train_step(domain, beginning, boundary):
    loss, gradients = gradient(domain, beginning, boundary)
    return ops.depend(loss, optimizer(gradients))


loss = None  # of a worker that joins when an epoch ends
training = kf.elastic.ElasticTraining(model, optimizer, dataset=dataset)  # elastic
# stock: for epoch in range(EPOCHS):
for epoch in training.epochs(EPOCHS):  # elastic
    model.set_train(True)
    for batch in dataset.create_tuple_iterator(num_epochs=1):
        loss = train_step(*batch)
        training.step_end()  # elastic
    model.set_train(False)
    print(f"epoch {epoch}: loss {loss}")

domain, beginning, _ = points(1)
values = [model(ms.Tensor(each)).asnumpy()[:, 0] for each in (domain, beginning)]
print(f"figure: {np.abs(values[0]).mean() + np.abs(values[1] + np.sin(np.pi * beginning[:, 0])).mean():.8f}")
