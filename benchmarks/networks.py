"""Networks for measuring and testing shards: LeNet-5, a small ResNet and a small Transformer, of MindSpore's layers.

They need nothing of ms_kungfu, so that a program without it can train the same (tests/fault/programs/plain.py).
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import initializer

Layer = Optional[Callable[[], Any]]

_WORDS, _LENGTH, _WIDTH = 32, 8, 16  # of the Transformer
_SCORES = 10


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
    """Pre-norm, as in Xiong et al. (2020)."""

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
    def __init__(self, dropout: Layer) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.places = ms.Parameter(initializer("normal", (_LENGTH, _WIDTH)), name="places")
        self.block = _Block(_WIDTH, 2, dropout)
        self.scores = nn.SequentialCell(nn.LayerNorm((_WIDTH,)), _MeanOver((1,)), nn.Dense(_WIDTH, _SCORES))

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
    return _Transformer(dropout)


NETWORKS: dict[str, Callable[..., Any]] = {"lenet": lenet, "resnet": resnet, "transformer": transformer}
"""By name. Each takes the function that makes its dropout layers (None: it has none) and gives ten scores a sample."""


class Samples:
    """`total` random samples for a network: indexable, of two columns, its input and an int32 label."""

    def __init__(self, network: str, total: int) -> None:
        random = np.random.default_rng(1)
        if network == "transformer":
            self.x = random.integers(0, _WORDS, (total, _LENGTH)).astype(np.int32)
        else:
            shape = (1, 28, 28) if network == "lenet" else (3, 8, 8)
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
