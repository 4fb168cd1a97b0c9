"""Combine a network's outputs for the parts of a batch into the outputs for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np


def as_one(parts: Sequence[tuple[int, Any]]) -> Any:
    """Return a network's outputs for the whole batch; None if the outputs for the parts can't be combined.

    Args:
        parts: for each part, the number of its samples, which is at least 1, and the network's output for the part. An
            output is a tensor, or a tuple or list of outputs.

    Outputs are combined by these rules:

    - Tensors whose first dimension is the number of samples are concatenated along this dimension, in the order of the
      parts.
    - Single floating-point numbers count as means over the samples, like a loss (``reduction="mean"``). The result is
      their mean, weighted by the number of samples in each part and computed in float64.
    - If an output is the same for all parts, it is returned unchanged.
    """
    sizes = [samples for samples, _ in parts]
    values = [value for _, value in parts]
    first = values[0]
    if isinstance(first, (tuple, list)):
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            return None
        joined = [as_one(list(zip(sizes, column))) for column in zip(*values)]
        return None if any(one is None for one in joined) else type(first)(joined)
    if not all(isinstance(value, ms.Tensor) and value.dtype == first.dtype for value in values):
        return None
    # NumPy has no bfloat16, but float32 can represent all of its values.
    arrays = [(v.astype(ms.float32) if v.dtype == ms.bfloat16 else v).asnumpy() for v in values]
    if all(a.ndim and len(a) == n and a.shape[1:] == arrays[0].shape[1:] for a, n in zip(arrays, sizes)):
        return ms.Tensor(np.concatenate(arrays), first.dtype)
    if arrays[0].ndim == 0 and arrays[0].dtype.kind == "f":
        mean = np.average(np.array(arrays, np.float64), weights=sizes)
        return ms.Tensor(np.asarray(mean, arrays[0].dtype), first.dtype)
    if all(np.array_equal(a, arrays[0]) for a in arrays):
        return first
    return None
