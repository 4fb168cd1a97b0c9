"""CIFAR-10 in its binary format: the user's folder, or generated images in the same format."""

import os
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.dataset import Cifar10Dataset, transforms, vision

TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
IMAGES = 10_000  # in each file, as MindSpore requires


def find_or_make(data_path, fallback):
    """Return the folder with the .bin files: `data_path` if given, else `fallback`.

    At first use `fallback` is filled with generated images: one file for training and one for testing.
    """
    if data_path:
        folder = Path(data_path)
        missing = [name for name in (*TRAIN, TEST) if not (folder / name).is_file()]
        if missing:
            raise SystemExit(
                f"{folder} has no file {missing[0]}; give the folder cifar-10-batches-bin of CIFAR-10's binary version "
                "by --data-path (or DATA_PATH), or omit both to use generated images"
            )
        return folder
    folder = Path(fallback)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((TRAIN[0], TEST)):
        if not (folder / name).is_file():
            write(folder / name, *generate(IMAGES, seed))
    return folder


def generate(samples, seed):
    """Return images of ten distinct classes: noisy stripes with a direction and colour for each class.

    The images are uint8 of shape (samples, 3, 32, 32), and the labels uint8 of shape (samples,).
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, samples).astype(np.uint8)
    angle = labels * np.float32(np.pi / 10)
    y, x = (np.mgrid[:32, :32] / 32).astype(np.float32)
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    stripes = np.sin(2 * np.pi * (4 * along + random.random((samples, 1, 1), np.float32)))
    colour = np.stack([np.cos(2 * angle), np.sin(2 * angle), np.cos(4 * angle)], axis=1)[:, :, None, None]
    images = 128 + 30 * stripes[:, None] + 30 * colour + 30 * random.standard_normal((samples, 3, 32, 32), np.float32)
    return np.clip(images, 0, 255).astype(np.uint8), labels


def write(path, images, labels):
    """Write each image as one byte of label and 3072 bytes of red, green and blue.

    The write is atomic, because several workers may write at once.
    """
    rows = np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(rows.tobytes())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def samples(folder, usage, image_size, **shard):
    """Return single samples ``image (3, image_size, image_size) float32, label () int32``, not batched.

    `shard`: num_shards and shard_id, if each worker reads its own part of the data.
    """
    images = Cifar10Dataset(str(folder), usage=usage, shuffle=usage == "train" and bool(shard), **shard)
    steps = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip()] if usage == "train" else []
    if image_size != 32:
        steps.append(vision.Resize((image_size, image_size)))
    steps += [
        vision.Rescale(1 / 255, 0),
        vision.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), is_hwc=True),
        vision.HWC2CHW(),
    ]
    return images.map(steps, "image").map(transforms.TypeCast(ms.int32), "label")
