"""Elements of each gradient of well-known models, in the order of their parameters."""

from __future__ import annotations


def _resnet50() -> list[int]:
    """He et al., "Deep Residual Learning for Image Recognition", 2015, table 1; convolutions without bias."""
    counts: list[int] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        counts.extend((outputs * inputs * kernel * kernel, outputs, outputs))  # and its batch normalisation

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*counts, 1000 * inputs, 1000]


def _lenet() -> list[int]:
    """LeNet-5 for 28x28 images, as examples/lenet-elastic has it."""
    return [6 * 25, 6, 16 * 6 * 25, 16, 120 * 256, 120, 84 * 120, 84, 10 * 84, 10]


def _bert_base() -> list[int]:
    """Devlin et al., "BERT", 2018: 12 layers of 768, 30522 words; without the heads of pre-training."""
    hidden, inner = 768, 3072
    norm = [hidden, hidden]
    dense = [hidden * hidden, hidden]
    layer = [*dense * 4, *norm, hidden * inner, inner, inner * hidden, hidden, *norm]
    return [30522 * hidden, 512 * hidden, 2 * hidden, *norm, *layer * 12, *dense]


GRADIENTS = {"lenet": _lenet(), "resnet50": _resnet50(), "bert-base": _bert_base()}
