"""The reduction of gradients, for optimizers and for training cells of one's own."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from ms_kungfu.ops import KungFuAllReduce, ReduceOp


class KungFuGradReducer(nn.Cell):
    """Reduce a tuple of gradients over all ranks, as ``nn.DistributedGradReducer`` does.

    Takes a tuple of tensors (gradients of any shapes and float dtypes) and returns the same with each one's mean over
    the ranks that took part, or its sum with ``mean=False``, with the same bits at every rank. One fused operation.

    Use it in a training cell with a plain optimizer of MindSpore, where more is to be done than an optimizer of
    ms_kungfu does: clipping after the reduction, accumulation over micro-batches, loss scaling of one's own::

        loss, grads = self.value_and_grad(*batch)
        grads = ops.clip_by_global_norm(self.reducer(grads))
        self.optimizer(grads)

    Not both: an optimizer of ms_kungfu would reduce again. `parameters` is taken for the likeness with
    ``nn.DistributedGradReducer`` and is not needed. Every rank brings the same gradients in the same order, under the
    same `name`.
    """

    def __init__(self, parameters: Any = None, mean: bool = True, name: str = "gradients") -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(mean, bool):
            raise TypeError(f"mean must be True (average) or False (sum), not {mean!r}")
        self.mean = mean
        self.all_reduce = KungFuAllReduce(ReduceOp.MEAN if mean else ReduceOp.SUM, name)

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.all_reduce(gradients)
