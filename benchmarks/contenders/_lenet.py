"""LeNet-5 and its training step, as ``Model.train`` builds it. Importing this loads MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from benchmarks.networks import lenet
from ms_kungfu.optimizers import KungFuMomentum


def training_step(optimizer: str) -> Any:
    """Return the training step for ten scores for each image of shape (N, 1, 28, 28)."""
    net = lenet()
    kind = KungFuMomentum if optimizer == "KungFuMomentum" else nn.Momentum
    loss = nn.WithLossCell(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    step = nn.TrainOneStepCell(loss, kind(net.trainable_params(), 0.01, 0.9))
    step.set_train()
    return step
