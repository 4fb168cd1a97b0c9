"""Reduce sparse gradients (MindSpore's RowTensor), for example those of ``nn.EmbeddingLookup(sparse=True)``.

A sparse gradient contains some rows of a table. The ranks contribute different rows, and the number of rows varies, but
a compiled graph has fixed shapes. So a sparse gradient is reduced as a dense gradient, which has an extra column that
marks the rows that a rank contributes. The result is sparse again. It has exactly the rows that at least one rank
contributed, so that an optimizer such as LazyAdam doesn't change other rows.
"""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.ops import PrimitiveWithInfer, composite

from ms_kungfu.ops._base import is_undetermined

_dense = composite.MultitypeFuncGraph("dense")
_sparse = composite.MultitypeFuncGraph("sparse")


class AnyIsSparse(PrimitiveWithInfer):
    """Return whether a tuple of gradients may contain sparse ones. The compiler decides this without a kernel.

    If a gradient is sparse, the compiler doesn't know the type of any gradient when it first infers the types.
    """

    def __init__(self) -> None:
        super().__init__("KungFuAnyIsSparse")

    def __infer__(self, gradients: dict[str, Any]) -> dict[str, Any]:
        return {"shape": (), "dtype": mstype.bool_, "value": any(map(is_undetermined, gradients["dtype"]))}


@_dense.register("Tensor")
def _dense_of_tensor(gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return gradient


@_dense.register("RowTensor")
def _dense_of_rows(gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    rows = ops.reshape(gradient.values, (gradient.values.shape[0], -1))
    marked = ops.concat((rows, ops.ones_like(rows[:, :1])), 1)
    return ops.UnsortedSegmentSum()(marked, gradient.indices, gradient.dense_shape[0])


@_sparse.register("Tensor", "Tensor")
def _tensor_again(gradient, reduced):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return reduced


@_sparse.register("RowTensor", "Tensor")
def _rows_again(gradient, reduced):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Return each contributed row only once, because LazyAdam would update a repeated row several times."""
    indices = ops.reshape(ops.nonzero(reduced[:, -1] > 0), (-1,))
    values = ops.reshape(ops.gather(reduced[:, :-1], indices, 0), (-1, *gradient.dense_shape[1:]))
    return RowTensorInner(ops.cast(indices, gradient.indices.dtype), values, gradient.dense_shape)


class SparseReduction(nn.Cell):
    """Convert gradients for a reduction that only accepts dense gradients, and convert the results back."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = composite.HyperMap()
        self.is_needed = AnyIsSparse()

    def dense(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return each gradient as a dense tensor."""
        return self.map(_dense, gradients)

    def sparse(self, gradients, reduced):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Convert each reduced gradient back to its original type, Tensor or RowTensor."""
        return self.map(_sparse, gradients, reduced)
