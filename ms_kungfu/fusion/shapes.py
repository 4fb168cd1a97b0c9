"""The numbers of elements of well-known models' gradients, in the order of the parameters."""

from __future__ import annotations


def _resnet50() -> list[int]:
    """He et al., "Deep Residual Learning for Image Recognition", 2015, table 1; convolutions without bias."""
    counts: list[int] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        counts.extend(
            (outputs * inputs * kernel * kernel, outputs, outputs)
        )  # the convolution and its batch normalisation

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
    """LeNet-5 for 28x28 images, as in examples/lenet-elastic."""
    return [6 * 25, 6, 16 * 6 * 25, 16, 120 * 256, 120, 84 * 120, 84, 10 * 84, 10]


def _bert_base() -> list[int]:
    """Devlin et al., "BERT", 2018: 12 layers of width 768 and 30522 words, without the heads of pre-training."""
    hidden, inner = 768, 3072
    norm = [hidden, hidden]
    dense = [hidden * hidden, hidden]
    layer = [*dense * 4, *norm, hidden * inner, inner, inner * hidden, hidden, *norm]
    return [30522 * hidden, 512 * hidden, 2 * hidden, *norm, *layer * 12, *dense]


def _vgg16() -> list[int]:
    """Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014, configuration D."""
    counts: list[int] = []
    inputs = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            counts += (width * inputs * 9, width)
            inputs = width
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        counts += (outputs * inputs, outputs)
    return counts


def _inception_v3() -> list[int]:
    """Szegedy et al., "Rethinking the Inception Architecture", 2015, without the auxiliary classifier.

    Widths that the paper doesn't specify are from its authors' TensorFlow model. The convolutions have no bias and are
    batch-normalised.
    """
    counts: list[int] = []

    def chain(inputs: int, *layers: tuple[int, int]) -> int:
        """Add consecutive convolutions, given as (outputs, kernel elements). Return the last number of outputs."""
        for outputs, kernel in layers:
            counts.extend((outputs * inputs * kernel, outputs, outputs))
            inputs = outputs
        return inputs

    def block(inputs: int, *branches: tuple[tuple[int, int], ...]) -> int:
        return sum(chain(inputs, *branch) for branch in branches)

    width = chain(3, (32, 9), (32, 9), (64, 9), (80, 1), (192, 9))
    for pooled in (32, 64, 64):  # figure 5
        width = block(width, ((64, 1),), ((48, 1), (64, 25)), ((64, 1), (96, 9), (96, 9)), ((pooled, 1),))
    width += block(width, ((384, 9),), ((64, 1), (96, 9), (96, 9)))
    for c in (128, 160, 160, 192):  # figure 6
        width = block(
            width, ((192, 1),), ((c, 1), (c, 7), (192, 7)), ((c, 1), (c, 7), (c, 7), (c, 7), (192, 7)), ((192, 1),)
        )
    width += block(width, ((192, 1), (320, 9)), ((192, 1), (192, 7), (192, 7), (192, 9)))
    for _ in range(2):  # figure 7: two branches end in two parallel convolutions, 1x3 and 3x1
        outputs = block(width, ((320, 1),), ((384, 1),))
        outputs += block(384, ((384, 3),), ((384, 3),)) - 384
        outputs += chain(width, (448, 1), (384, 9)) - 384
        outputs += block(384, ((384, 3),), ((384, 3),))
        width = outputs + block(width, ((192, 1),))
    return [*counts, 1000 * width, 1000]


GRADIENTS = {
    "lenet": _lenet(),
    "resnet50": _resnet50(),
    "vgg16": _vgg16(),
    "inception-v3": _inception_v3(),
    "bert-base": _bert_base(),
}
