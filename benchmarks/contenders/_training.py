"""The training steps of the benchmarks' networks, as ``Model.train`` builds them. Importing this loads MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from benchmarks.networks import NETWORKS
from ms_kungfu.optimizers import KungFuMomentum


def training_step(optimizer: str, network: str = "lenet") -> Any:
    """Return a step for the inputs and labels of ``networks.Samples``."""
    net = NETWORKS[network]()
    kind = KungFuMomentum if optimizer == "KungFuMomentum" else nn.Momentum
    loss = nn.WithLossCell(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    step = nn.TrainOneStepCell(loss, kind(net.trainable_params(), 0.01, 0.9))
    step.set_train()
    return step
