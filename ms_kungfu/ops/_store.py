"""The model store as primitives: save the parameters, request a neighbour's."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops._base import Primitive

NEIGHBOURS = ("random", "round-robin")
_INT64 = mstype.TensorType(mstype.int64)


class _OfTuple(Primitive):
    """A primitive of a tuple of tensors."""

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        if not isinstance(inputs[0]["dtype"], (tuple, list)):
            raise TypeError(f"{self.name} takes a tuple of tensors")
        return inputs[0]["shape"], inputs[0]["dtype"]


class SaveModel(_OfTuple):
    """Keep a copy of a tuple of tensors for the other workers, under `record`.

    A call takes the tuple and returns its version, int64 of shape (1,). A record keeps its shapes and
    dtypes.

    Args:
        record: the name that :class:`RequestModel` asks for.

    Raises:
        TypeError: if the input is no tuple of tensors.
    """

    def __init__(self, record: str) -> None:
        super().__init__("KungFuSaveModel", ["x"], ["version"], record=record)
        # Puts it after earlier writes to the parameters, in the order of the program. A dependency on an optimizer's
        # result doesn't, as the compiler knows that value.
        self.add_prim_attr("side_effect_mem", True)

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        super()._outputs(*inputs)
        return [1], _INT64


class RequestModel(_OfTuple):
    """Request the latest tensors that a neighbour has saved under `record`.

    A call takes a tuple of as many tensors of this worker's own. It returns the neighbour's and, last,
    int64 of shape (2,): the neighbour's rank and the version. If no neighbour has saved any, it returns
    this worker's own tensors and (-1, 0).

    Args:
        record: the name that :class:`SaveModel` saves under.
        neighbour: ``"random"`` or ``"round-robin"``. Random: each of the other living workers that have
            saved one is as likely as any other.
        seed: of the random choice.
        prefetch: whether to return the neighbour's tensors from when this process last saved its own,
            copied in the background since.

    Raises:
        TypeError: if the input is no tuple of tensors.
    """

    def __init__(self, record: str, neighbour: str, seed: int, prefetch: bool) -> None:
        super().__init__(
            "KungFuRequestModel", ["x"], ["y"], record=record, neighbour=neighbour, seed=seed, prefetch=prefetch
        )

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shapes, dtypes = super()._outputs(*inputs)
        return (*shapes, [2]), (*dtypes, _INT64)
