"""Images of ten classes, made on the spot: each class is a pattern, each image its pattern under noise."""

import mindspore.dataset as ds
import numpy as np


def images(count=1024, noise=2.0, seed=0):
    """Arrays ``(count, 1, 28, 28) float32`` and ``(count,) int32``, the same at every worker."""
    random = np.random.RandomState(seed)
    patterns = random.randn(10, 1, 28, 28)
    labels = np.arange(count) % 10
    return (patterns[labels] + noise * random.randn(count, 1, 28, 28)).astype(np.float32), labels.astype(np.int32)


def batches(batch_size, rank, size):
    """This worker's share, in batches of `batch_size`."""
    rows = list(zip(*images()))
    shard = ds.GeneratorDataset(rows, ["image", "label"], shuffle=False, num_shards=size, shard_id=rank)
    return shard.batch(batch_size, drop_remainder=True)
