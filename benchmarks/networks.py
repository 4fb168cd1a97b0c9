"""Networks for measuring and testing: LeNet-5, ResNets and Transformers, of MindSpore's layers.

They don't use ms_kungfu, so a program without it can train the same networks (tests/fault/programs/plain.py).
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import initializer

Layer = Optional[Callable[[], Any]]

_WORDS, _LENGTH, _WIDTH = 32, 8, 16  # of the Transformer
_LONGER, _WIDER = 64, 128  # length and width of the Transformer with two blocks
_SCORES = 10
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # of ResNet-50: width, blocks, stride


class _Residual(nn.Cell):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.SequentialCell(
            nn.Conv2d(channels_in, channels, 3, stride), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.shortcut = nn.SequentialCell(nn.Conv2d(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))
        self.relu = nn.ReLU()

    def construct(self, x):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.relu(self.body(x) + self.shortcut(x))


class _Bottleneck(nn.Cell):
    """The bottleneck block of He et al. (2015), with the stride in the 3 x 3 convolution."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.body = nn.SequentialCell(
            nn.Conv2d(channels_in, width, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, channels, 1), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.shortcut = nn.SequentialCell()
        if channels_in != channels:
            self.shortcut = nn.SequentialCell(nn.Conv2d(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))
        self.relu = nn.ReLU()

    def construct(self, x):  # type: ignore[no-untyped-def]
        return self.relu(self.body(x) + self.shortcut(x))


class _MeanOver(nn.Cell):
    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def construct(self, x):  # type: ignore[no-untyped-def]
        return x.mean(self.axes)


class _Attention(nn.Cell):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.heads = heads
        self.scale = (width // heads) ** -0.5

    def construct(self, x):  # type: ignore[no-untyped-def]
        count, length, width = x.shape
        parts = self.project(x).reshape((count, length, 3, self.heads, width // self.heads)).transpose((2, 0, 3, 1, 4))
        weights = ops.softmax(ops.matmul(parts[0], parts[1].swapaxes(-1, -2)) * self.scale, -1)
        return self.out(ops.matmul(weights, parts[2]).transpose((0, 2, 1, 3)).reshape((count, length, width)))


class _Block(nn.Cell):
    """A Transformer block with pre-norm, as in Xiong et al. (2020)."""

    def __init__(self, width: int, heads: int, dropout: Layer) -> None:
        super().__init__()
        drop = [] if dropout is None else [dropout()]
        self.attention = nn.SequentialCell(nn.LayerNorm((width,)), _Attention(width, heads), *drop)
        self.feed_forward = nn.SequentialCell(
            nn.LayerNorm((width,)), nn.Dense(width, 2 * width), nn.ReLU(), nn.Dense(2 * width, width)
        )

    def construct(self, x):  # type: ignore[no-untyped-def]
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class _Transformer(nn.Cell):
    def __init__(self, length: int, width: int, heads: int, blocks: int, dropout: Layer) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.places = ms.Parameter(initializer("normal", (length, width)), name="places")
        made = [_Block(width, heads, dropout) for _ in range(blocks)]
        self.block = made[0] if blocks == 1 else nn.SequentialCell(*made)
        self.scores = nn.SequentialCell(nn.LayerNorm((width,)), _MeanOver((1,)), nn.Dense(width, _SCORES))

    def construct(self, x):  # type: ignore[no-untyped-def]
        return self.scores(self.block(self.words(x) + self.places))


def lenet(dropout: Layer = None) -> Any:
    """Make LeNet-5 for images (N, 1, 28, 28)."""
    return nn.SequentialCell(
        nn.Conv2d(1, 6, 5, pad_mode="valid", has_bias=True), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5, pad_mode="valid", has_bias=True), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Dense(256, 120), nn.ReLU(), *([] if dropout is None else [dropout()]),
        nn.Dense(120, 84), nn.ReLU(), nn.Dense(84, _SCORES),
    )  # fmt: skip


def resnet(dropout: Layer = None) -> Any:
    """Make two residual blocks with BatchNorm, for images (N, 3, 8, 8)."""
    return nn.SequentialCell(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), _Residual(8, 8, 1), _Residual(8, 16, 2),
        _MeanOver((2, 3)), *([] if dropout is None else [dropout()]), nn.Dense(16, _SCORES),
    )  # fmt: skip


def transformer(dropout: Layer = None) -> Any:
    """Make one block with two heads, for texts of eight words (N, 8), int32."""
    return _Transformer(_LENGTH, _WIDTH, 2, 1, dropout)


def resnet50(dropout: Layer = None) -> Any:
    """Make ResNet-50 with ImageNet's first layers, for images (N, 3, 32, 32)."""
    blocks, channels = [], 64
    for width, count, first_stride in _STAGES:
        for number in range(count):
            blocks.append(_Bottleneck(channels, width, first_stride if number == 0 else 1))
            channels = 4 * width
    return nn.SequentialCell(
        nn.Conv2d(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, "same"), *blocks,
        _MeanOver((2, 3)), *([] if dropout is None else [dropout()]), nn.Dense(channels, _SCORES),
    )  # fmt: skip


def transformer2(dropout: Layer = None) -> Any:
    """Make two blocks of width 128 with four heads, for texts of 64 words (N, 64), int32."""
    return _Transformer(_LONGER, _WIDER, 4, 2, dropout)


NETWORKS: dict[str, Callable[..., Any]] = {
    "lenet": lenet, "resnet": resnet, "transformer": transformer, "resnet50": resnet50, "transformer2": transformer2,
}  # fmt: skip
"""By name. Each takes the function that makes its dropout layers (None: it has none) and gives ten scores a sample."""


class Samples:
    """`total` random samples for a network, by index. Each has two columns: an input and an int32 label."""

    def __init__(self, network: str, total: int) -> None:
        random = np.random.default_rng(1)
        if network.startswith("transformer"):
            length = _LONGER if network == "transformer2" else _LENGTH
            self.x = random.integers(0, _WORDS, (total, length)).astype(np.int32)
        else:
            shape = {"lenet": (1, 28, 28), "resnet": (3, 8, 8), "resnet50": (3, 32, 32)}[network]
            self.x = random.standard_normal((total, *shape)).astype(np.float32)
        self.labels = random.integers(0, _SCORES, total).astype(np.int32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return self.x[number], self.labels[number]


class Loss(nn.Cell):
    """The mean cross entropy of scores (N, 10) for labels (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, scores, labels):  # type: ignore[no-untyped-def]
        return self.entropy(scores, labels)
