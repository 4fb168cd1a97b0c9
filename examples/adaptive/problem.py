"""A problem with known gradient noise: a quadratic, with normal noise on every sample's gradient."""

import mindspore as ms
import numpy as np
from mindspore import nn

DIMENSION = 100_000
COVARIANCE_TRACE = 16.0  # of one sample's gradient
START_LOSS = 0.25


class Quadratic(nn.Cell):
    """Half the squared distance from `theta` to a sample. Its mean over many samples is |theta|^2 / 2 plus a constant.

    A sample's gradient is theta - x. With x from N(0, COVARIANCE_TRACE / DIMENSION), the noise scale is
    COVARIANCE_TRACE / |theta|^2. So a good gradient needs more samples the closer theta is to the minimum.
    """

    def __init__(self):
        super().__init__()
        theta = np.full(DIMENSION, np.sqrt(2 * START_LOSS / DIMENSION))
        self.theta = ms.Parameter(ms.Tensor(theta, ms.float32), name="theta")

    def construct(self, x):
        return 0.5 * ((self.theta - x) ** 2).sum()


def loss(net):
    """Return the loss over all data, without noise."""
    theta = net.theta.asnumpy()
    return 0.5 * float(np.dot(theta, theta))


def noise_scale(loss):
    """Return the true noise scale, in samples."""
    return COVARIANCE_TRACE / (2 * loss)


def target_loss(noise_scale):
    """Return the loss at which the noise scale is this large."""
    return COVARIANCE_TRACE / (2 * noise_scale)


def batch_mean(random, samples):
    """Return the mean of `samples` random samples. The gradient of their mean loss depends only on this mean."""
    spread = np.float32(np.sqrt(COVARIANCE_TRACE / DIMENSION / samples))
    return ms.Tensor(random.standard_normal(DIMENSION, dtype=np.float32) * spread)
