"""Dropout whose masks don't depend on the worker that generates them."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn

from ms_kungfu.ops import _dropout


class Dropout(nn.Cell):
    """``mindspore.nn.Dropout(p=...)`` with a mask that depends on the shard, not on the worker.

    In training, each element becomes 0 with probability `p`, and the other elements are divided by
    ``1 - p``. In evaluation (``set_train(False)``), the input is returned unchanged.

    In a step of an `ElasticDataset` with shards, four values determine the mask:

    - the dataset's seed;
    - the step;
    - the shard;
    - the number of masks that the program has already generated for the shard.

    So any worker that computes the shard drops the same elements, even if the shard is computed
    again. Two calls of the same cell drop different elements. Outside of a step with shards, three
    values determine the mask:

    - ``mindspore.get_seed()`` when the cell was created;
    - the worker's rank when the cell was created;
    - the number of masks that the process has already generated.

    If the worker's rank changes later, the masks don't depend on the new rank. Without a seed, the
    masks differ from run to run.

    The cell works on CPUs only. Don't use ``recompute`` in PyNative mode: MindSpore would compute the
    cell again in the backward pass, with a different mask.

    The random numbers come from Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2,
    3, SC 2011).

    Args:
        p: the probability that an element becomes 0, at least 0 and less than 1.

    Raises:
        TypeError: if `p` isn't a number.
        ValueError: if `p` isn't at least 0 and less than 1, or the device isn't a CPU.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, (float, int)):
            raise TypeError(f"p (the probability that an element is dropped) must be a number, not {p!r}")
        if not 0 <= p < 1:
            raise ValueError(
                f"p (the probability that an element is dropped) must be at least 0 and less than 1, not {p}"
            )
        target = ms.get_context("device_target")
        if target != "CPU":
            raise ValueError(
                f"ms_kungfu.nn.Dropout has no kernel for {target}, because shards are supported only on CPUs; "
                "use mindspore.nn.Dropout instead"
            )
        self.p = p
        self.dropout = _dropout.Dropout.of(p)

    def construct(self, x: Any) -> Any:
        """Drop random elements of a tensor.

        Args:
            x: a tensor of any shape, of float16, bfloat16, float32 or float64.

        Returns:
            A tensor of the same shape and dtype. In evaluation, this is `x` itself.
        """
        if not self.training or self.p == 0:
            return x
        return self.dropout(x)[0]

    def extend_repr(self) -> str:
        """Return the arguments for the cell's ``repr``."""
        return f"p={self.p}"
