"""Sparse gradients, such as those of ``nn.EmbeddingLookup(sparse=True)``: rows of a table, as MindSpore's RowTensor.

The ranks bring different rows, and in a changing cluster different numbers of them, while a compiled graph has fixed
shapes. So a sparse gradient is reduced as a dense one, with a column that says which rows the rank brings. The result
is sparse again, of all rows that a rank has brought: an optimizer such as LazyAdam leaves the others as they are.
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
    """Return whether a tuple of gradients may have sparse ones. The compiler answers, and no kernel runs.

    If a gradient is sparse, the compiler knows no gradient's type when it first comes here.
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
    """Return the rows that a rank has brought, each once: LazyAdam updates a row for each time that it comes."""
    indices = ops.reshape(ops.nonzero(reduced[:, -1] > 0), (-1,))
    values = ops.reshape(ops.gather(reduced[:, :-1], indices, 0), (-1, *gradient.dense_shape[1:]))
    return RowTensorInner(ops.cast(indices, gradient.indices.dtype), values, gradient.dense_shape)


class SparseReduction(nn.Cell):
    """A reduction of dense gradients, for a tuple that may have sparse ones."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = composite.HyperMap()
        self.is_needed = AnyIsSparse()

    def dense(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return each gradient as a tensor."""
        return self.map(_dense, gradients)

    def sparse(self, gradients, reduced):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return each reduced gradient as a tensor or as rows, as it was before."""
        return self.map(_sparse, gradients, reduced)
