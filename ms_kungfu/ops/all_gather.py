"""The all-gather primitive."""

from __future__ import annotations

from typing import Any

from ms_kungfu import runtime
from ms_kungfu.ops._base import SizedCollective


class KungFuAllGather(SizedCollective):
    """Concatenate the tensors of all ranks along the first dimension, in the order of the ranks.

    A tensor of shape (n, ...) comes out as (size * n, ...); a 0-d tensor is rejected. A call takes a
    tensor or a tuple of tensors, of any dtype; the shapes must be the same at all ranks. The gradient
    is a reduce-scatter of the sum.

    A tuple is one operation a dtype. It is several if it holds more than MindSpore's ``comm_fusion``
    sets for "allgather" when the primitive is made (64 MB by default).

    The output's shape depends on the size of the cluster. A call outside a graph follows a resize by
    itself. A graph that was compiled before it raises RuntimeError (``StaleClusterError: ...``) and has
    to be built again.

    Args:
        name: matches the call with those of the other ranks; calls without one are matched by their
            order.
    """

    copies = True

    def __init__(self, name: str | None = None) -> None:
        super().__init__("KungFuAllGather", name, "allgather")

    def output_shape(self, shape: list[Any]) -> list[Any]:
        """Return the shape of the output for one input tensor.

        Args:
            shape: the input's shape.

        Returns:
            The output's shape, whose first dimension is multiplied by the number of ranks.

        Raises:
            ValueError: for a 0-d tensor.
        """
        if not shape:
            raise ValueError(f"{self.name} can't gather a 0-d tensor; reshape it to (1,) first")
        return [shape[0] * runtime.current_cluster_size(), *shape[1:]]
