"""The network of MindSpore's tutorial on communication fusion: a head and blocks of two dense layers."""

from mindspore import nn


class DenseLayer(nn.Cell):
    """A block of two dense layers."""

    def __init__(self, width, hidden):
        super().__init__()
        self.input_mapping = nn.Dense(width, hidden)
        self.output_mapping = nn.Dense(hidden, width)

    def construct(self, x):
        x = self.input_mapping(x)
        return self.output_mapping(x)


class Network(nn.Cell):
    """A network with `width` scores for each 28x28 image. The tutorial's sizes are the default."""

    def __init__(self, width=10, hidden=32):
        super().__init__()
        self.flatten = nn.Flatten()
        self.head = nn.Dense(28 * 28, width)
        self.layer1 = DenseLayer(width, hidden)
        self.layer2 = DenseLayer(width, hidden)
        self.layer3 = DenseLayer(width, hidden)

    def construct(self, x):
        x = self.flatten(x)
        x = self.head(x)
        x = self.layer1(x)
        x = self.layer2(x)
        return self.layer3(x)


class DeepNetwork(nn.Cell):
    """The same network with any number of blocks. The picture needs many gradients to fuse."""

    def __init__(self, blocks, width, hidden):
        super().__init__()
        self.flatten = nn.Flatten()
        self.head = nn.Dense(28 * 28, width)
        self.layers = nn.SequentialCell(*(DenseLayer(width, hidden) for _ in range(blocks)))

    def construct(self, x):
        return self.layers(self.head(self.flatten(x)))
