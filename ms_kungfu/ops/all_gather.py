"""The all-gather primitive."""

from __future__ import annotations

from typing import Any

from ms_kungfu import runtime
from ms_kungfu.ops._base import SizedCollective


class KungFuAllGather(SizedCollective):
    """Concatenate the tensors of all ranks along the first dimension, in the order of the ranks.

    A tensor of shape (n, ...) becomes (size * n, ...); a 0-d tensor is rejected. The input is a tensor
    or a tuple of tensors of any dtype. The shapes must be the same on all ranks. The gradient is a
    reduce-scatter with the operation "sum".

    A tuple is gathered in one operation per dtype. If the tuple is larger than MindSpore's
    ``comm_fusion`` limit for "allgather" (64 MB by default), it is split over several operations.
    The primitive reads the limit when it is created.

    The output's shape depends on the size of the cluster. Outside of a graph, a call adapts to a resize
    automatically. A graph that was compiled before a resize raises RuntimeError (``StaleClusterError:
    ...``) and must be built again.

    Args:
        name: the name that matches this rank's call with the other ranks' calls. Calls without a name
            are matched by their order.
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
