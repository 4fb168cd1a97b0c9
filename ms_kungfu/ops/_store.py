"""The model store as primitives: save the parameters, or request a neighbour's parameters."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

NEIGHBOURS = ("random", "round-robin")
_INT64 = mstype.TensorType(mstype.int64)


class _OfTuple(Primitive):
    """A primitive whose input is a tuple of tensors."""

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        if not isinstance(inputs[0]["dtype"], (tuple, list)):
            raise TypeError(f"{self.name} requires a tuple of tensors")
        return inputs[0]["shape"], inputs[0]["dtype"]


class SaveModel(_OfTuple):
    """Save a copy of a tuple of tensors under `record`, for the other workers.

    The input is the tuple. The output is its version, int64 of shape (1,). The shapes and dtypes of a
    record can't change.

    Args:
        record: the name with which :class:`RequestModel` requests the tensors.

    Raises:
        TypeError: if the input isn't a tuple of tensors.
    """

    def __init__(self, record: str) -> None:
        super().__init__("KungFuSaveModel", ["x"], ["version"], record=record)
        # The side effect orders it after earlier writes to the parameters in the program. A dependency on an
        # optimizer's result wouldn't, because the compiler knows that value as a constant.
        self.add_prim_attr("side_effect_mem", True)

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        super()._outputs(*inputs)
        return [1], _INT64


class RequestModel(_OfTuple):
    """Request the latest tensors that a neighbour has saved under `record`.

    The input is a tuple of this worker's own tensors. The output is a tuple of the neighbour's tensors
    and, last, int64 of shape (2,): the neighbour's rank and the version. If no neighbour has saved any,
    the output is this worker's own tensors and (-1, 0).

    Args:
        record: the name with which :class:`SaveModel` saves the tensors.
        neighbour: ``"random"`` or ``"round-robin"``. Random chooses among the living workers that have
            saved the record, each with the same probability.
        seed: seed of the random choice.
        prefetch: whether to return the neighbour's tensors as of this process's last save. They are
            copied in the background.

    Raises:
        TypeError: if the input isn't a tuple of tensors.
    """

    def __init__(self, record: str, neighbour: str, seed: int, prefetch: bool) -> None:
        super().__init__(
            "KungFuRequestModel", ["x"], ["y"], record=record, neighbour=neighbour, seed=seed, prefetch=prefetch
        )

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shapes, dtypes = super()._outputs(*inputs)
        return (*shapes, [2]), (*dtypes, _INT64)
