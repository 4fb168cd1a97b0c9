"""MNIST from the user's folder, or generated images of ten classes: each image is its class's pattern with noise."""

from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


def images(count=1024, noise=2.0, seed=0):
    """Return arrays ``(count, 1, 28, 28) float32`` and ``(count,) int32``, the same on each worker."""
    random = np.random.RandomState(seed)
    patterns = random.randn(10, 1, 28, 28)
    labels = np.arange(count) % 10
    return (patterns[labels] + noise * random.randn(count, 1, 28, 28)).astype(np.float32), labels.astype(np.int32)


def find(data_path):
    """Return the folder with MNIST's files: `data_path`, or its subfolder train."""
    folders = (Path(data_path), Path(data_path, "train"))
    missing = {folder: [name for name in NAMES if not (folder / name).is_file()] for folder in folders}
    folder = min(folders, key=lambda folder: len(missing[folder]))
    if not missing[folder]:
        return folder
    raise SystemExit(
        f"{folder} has no file {missing[folder][0]}; give the folder with MNIST's unpacked IDX files with --data-path "
        "(or DATA_PATH), or omit both to use generated images"
    )


def batches(batch_size, rank, size, data_path=None):
    """Return this worker's share of the data, in batches: MNIST as in the tutorial if its folder exists."""
    if data_path:
        shard = ds.MnistDataset(str(find(data_path)), "train", shuffle=False, num_shards=size, shard_id=rank)
        transforms = [
            ds.vision.Rescale(1 / 255, 0), ds.vision.Normalize((0.1307,), (0.3081,), is_hwc=True), ds.vision.HWC2CHW()
        ]  # fmt: skip
        shard = shard.map(transforms, "image").map(ds.transforms.TypeCast(ms.int32), "label")
    else:
        rows = list(zip(*images()))
        shard = ds.GeneratorDataset(rows, ["image", "label"], shuffle=False, num_shards=size, shard_id=rank)
    return shard.batch(batch_size, drop_remainder=True)
