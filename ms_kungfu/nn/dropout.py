"""Dropout whose masks don't depend on the worker that draws them."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn

from ms_kungfu.ops import _dropout


class Dropout(nn.Cell):
    """``mindspore.nn.Dropout(p=...)``, with a mask that belongs to the shard.

    In training each element becomes 0 with probability `p`, and the others are divided by ``1 - p``. In
    evaluation (``set_train(False)``) the input is returned as it is.

    In a step of an `ElasticDataset` with shards the mask is a function of four things:

    - the dataset's seed;
    - the step;
    - the shard;
    - how many masks the program has drawn for the shard before.

    So any worker that computes the shard, however often, drops the same elements, and a cell that is
    called twice drops others. Elsewhere the mask is a function of three things:

    - ``mindspore.get_seed()`` and the rank, as they were when the cell was made;
    - how many masks the process has drawn before.

    Without a seed, masks differ from run to run.

    The cell works on CPUs only. A cell that MindSpore computes again in the backward pass
    (``recompute``, in PyNative mode) would draw another mask: leave that out.

    Source: Philox4x32-10 of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.

    Args:
        p: the probability of an element to become 0, at least 0 and less than 1.

    Raises:
        TypeError: if `p` isn't a number.
        ValueError: if `p` isn't at least 0 and less than 1, or the device isn't a CPU.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, (float, int)):
            raise TypeError(f"p is the probability of an element to be dropped, a number, not {p!r}")
        if not 0 <= p < 1:
            raise ValueError(f"p is the probability of an element to be dropped, at least 0 and less than 1, not {p}")
        target = ms.get_context("device_target")
        if target != "CPU":
            raise ValueError(
                f"ms_kungfu.nn.Dropout has a kernel for CPUs only so far, where shards are computed, and none for "
                f"{target}; use mindspore.nn.Dropout there"
            )
        self.p = p
        self.dropout = _dropout.Dropout.of(p)

    def construct(self, x: Any) -> Any:
        """Drop elements of a tensor.

        Args:
            x: of any shape, of float16, bfloat16, float32 or float64.

        Returns:
            A tensor of the same shape and dtype; `x` itself in evaluation.
        """
        if not self.training or self.p == 0:
            return x
        return self.dropout(x)[0]

    def extend_repr(self) -> str:
        """Return the arguments for the cell's text."""
        return f"p={self.p}"
