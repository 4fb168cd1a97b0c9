"""Residual networks (He et al., 2015) of bottleneck blocks, in plain mindspore.nn."""

from mindspore import nn
from mindspore.common.initializer import HeNormal, Zero

# Blocks in the four stages, by the number of layers; 14 is for machines with little time.
BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def convolution(channels, out_channels, kernel, stride=1):
    return nn.Conv2d(channels, out_channels, kernel, stride, pad_mode="same", weight_init=HeNormal(mode="fan_out"))


class Bottleneck(nn.Cell):
    """1x1 down, 3x3, 1x1 up, plus the input. If the shape changes, the input goes through a 1x1 convolution."""

    expansion = 4

    def __init__(self, channels, width, stride):
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = convolution(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, out_channels, 1)
        # The block starts as the identity function.
        self.bn3 = nn.BatchNorm2d(out_channels, gamma_init=Zero())
        self.relu = nn.ReLU()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.SequentialCell(
                convolution(channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
            )
        else:
            self.shortcut = nn.Identity()

    def construct(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Cell):
    """Return scores for images (N, 3, H, W), with H and W at least 32. `width`: number of channels at the start."""

    def __init__(self, depth=50, num_classes=10, width=64):
        super().__init__()
        self.stem = nn.SequentialCell(
            convolution(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, pad_mode="same")
        )
        channels, stages = width, []
        for stage, blocks in enumerate(BLOCKS[depth]):
            cells = []
            for block in range(blocks):
                cells.append(Bottleneck(channels, width * 2**stage, stride=2 if stage and not block else 1))
                channels = width * 2**stage * Bottleneck.expansion
            stages.append(nn.SequentialCell(*cells))
        self.stages = nn.SequentialCell(*stages)
        self.head = nn.Dense(channels, num_classes)

    def construct(self, x):
        x = self.stages(self.stem(x))
        return self.head(x.mean((2, 3)))
