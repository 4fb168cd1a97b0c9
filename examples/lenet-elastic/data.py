"""Handwritten digits as MNIST IDX files: the user's folder, or the 1,797 real images of scikit-learn.

Without scikit-learn the example draws the same number of digits with a font, so that it needs only MindSpore.
"""

import os
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.dataset import MnistDataset, transforms, vision

NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def find_or_make(data_path, fallback):
    """Return the folder of the IDX files: `data_path` if given, else `fallback`, which is filled from scikit-learn.

    If scikit-learn isn't installed, return another folder next to `fallback`, with drawn digits.
    """
    if data_path:
        folder = Path(data_path)
        missing = [name for names in NAMES.values() for name in names if not (folder / name).is_file()]
        if missing:
            raise SystemExit(
                f"{folder} has no file {missing[0]}; give a folder with MNIST's four unpacked IDX files with "
                "--data-path (or DATA_PATH), or omit both to use scikit-learn's digits"
            )
        return folder
    folder, drawn = Path(fallback), Path(f"{fallback}-drawn")
    if _is_whole(folder):
        return folder
    try:
        write_digits(folder, *real_digits())
    except ModuleNotFoundError as error:
        if not _is_whole(drawn):
            print(
                f"the digits are drawn: there is no {error.name}; ./install-kungfu.sh --extras examples has real ones"
            )
            write_digits(drawn, *drawn_digits())
        return drawn
    return folder


def _is_whole(folder):
    return all((folder / name).is_file() for names in NAMES.values() for name in names)


def real_digits():
    """Return scikit-learn's digits, 8x8, enlarged to 28x28, and their labels."""
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.clip(zoom(digits.images, (1, 3, 3), order=1) * (255 / 16), 0, 255).astype(np.uint8)
    return np.pad(images, ((0, 0), (2, 2), (2, 2))), digits.target.astype(np.uint8)


def drawn_digits(count=1797):
    """Return digits in Pillow's font, each slightly rotated, stretched and moved, and their labels.

    The result is always the same.
    """
    from PIL import Image, ImageDraw

    random = np.random.RandomState(0)
    images, labels = [], np.arange(count, dtype=np.uint8) % 10
    for label in labels:
        glyph = Image.new("L", (8, 12))
        ImageDraw.Draw(glyph).text((1, 0), str(label), fill=255)
        big = glyph.resize(tuple(random.randint(16, 25, 2).tolist()), Image.BILINEAR).rotate(random.uniform(-15, 15))
        image = Image.new("L", (28, 28))
        image.paste(big, tuple(random.randint(1, 5, 2).tolist()))
        images.append(np.asarray(image))
    return np.stack(images), labels


def write_digits(folder, images, labels, n_train=1500):
    """Write a training set and a test set, split at random with a fixed seed."""
    order = np.random.RandomState(0).permutation(len(images))
    folder.mkdir(parents=True, exist_ok=True)
    for usage, chosen in (("train", order[:n_train]), ("test", order[n_train:])):
        for name, array in zip(NAMES[usage], (images[chosen], labels[chosen])):
            _write_idx(folder / name, array)


def _write_idx(path, array):
    """Write atomically: several workers may write the same file at once, and each finds a complete file.

    The temporary name doesn't contain "images", because MnistDataset would read any such file, even the unfinished file
    of a killed worker.
    """
    header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4").tobytes()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part.")
    with os.fdopen(handle, "wb") as file:
        file.write(header + array.tobytes())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def samples(folder, usage):
    """Return single samples ``image (1, 28, 28) float32, label () int32``, not batched."""
    digits = MnistDataset(str(folder), usage=usage, shuffle=False)
    to_input = [vision.Rescale(1 / 255, 0), vision.Normalize((0.1307,), (0.3081,), is_hwc=True), vision.HWC2CHW()]
    digits = digits.map(to_input, "image")
    return digits.map(transforms.TypeCast(ms.int32), "label")
