"""Primitives of the model store: save a model's parameters, or request a neighbour's parameters."""

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
    """Save a copy of a tuple of tensors under `record`, so that other workers can request it.

    The input is the tuple. The output is the version of the saved copy, int64 of shape (1,). The shapes
    and dtypes that are saved under one `record` can't change.

    Args:
        record: the name with which :class:`RequestModel` requests the tensors.

    Raises:
        TypeError: if the input isn't a tuple of tensors.
    """

    def __init__(self, record: str) -> None:
        super().__init__("KungFuSaveModel", ["x"], ["version"], record=record)
        # Because of the side effect, the primitive runs after the program's earlier writes to the parameters. A
        # dependency on an optimizer's result would have no effect, because the compiler treats the result as constant.
        self.add_prim_attr("side_effect_mem", True)

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        super()._outputs(*inputs)
        return [1], _INT64


class RequestModel(_OfTuple):
    """Request the latest tensors that a neighbour has saved under `record`.

    The input is a tuple of this worker's own tensors. The output is a tuple of the neighbour's tensors,
    followed by an int64 tensor of shape (2,), which contains the neighbour's rank and the version. If
    no neighbour has saved the record, the output is this worker's own tensors and (-1, 0).

    Args:
        record: the name with which :class:`SaveModel` saves the tensors.
        neighbour: ``"random"`` or ``"round-robin"``. With ``"random"``, each living worker that has
            saved the record is chosen with the same probability.
        seed: the seed of the random choice.
        prefetch: whether a background thread copies the neighbour's tensors as soon as this process
            has saved its own. The copy is then older.

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
