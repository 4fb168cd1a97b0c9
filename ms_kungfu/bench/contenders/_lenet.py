"""LeNet-5 and its training step, as ``Model.train`` builds it. Importing this loads MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import nn


class _LeNet5(nn.Cell):
    """Ten scores for each image of shape (N, 1, 28, 28)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode="valid", has_bias=True)
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid", has_bias=True)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2, 2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(256, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, 10)

    def construct(self, x):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.fc1(self.flatten(x)))
        return self.fc3(self.relu(self.fc2(x)))


def training_step(optimizer: str) -> Any:
    from ms_kungfu.optimizers import KungFuMomentum

    net = _LeNet5()
    kind = KungFuMomentum if optimizer == "KungFuMomentum" else nn.Momentum
    loss = nn.WithLossCell(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    step = nn.TrainOneStepCell(loss, kind(net.trainable_params(), 0.01, 0.9))
    step.set_train()
    return step
