"""The model store as primitives: save the parameters, take a neighbour's."""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype

from ms_kungfu.ops import _reparse
from ms_kungfu.ops._base import Primitive

NEIGHBOURS = ("random", "round-robin")


def _check_tuple(name: str, dtypes: Any) -> None:
    if not isinstance(dtypes, (tuple, list)):
        raise TypeError(f"{name} takes a tuple of tensors")


class SaveModel(Primitive):
    """Keep a copy of a tuple of tensors for the other workers, under `record`.

    Returns its version, int64 of shape (1,). A record keeps its shapes and dtypes.
    """

    def __init__(self, record: str) -> None:
        super().__init__("KungFuSaveModel", ["x"], ["version"], record=record)
        self.add_prim_attr("record", record)
        self.add_prim_attr("side_effect_io", True)
        # Puts it after what was written to the parameters before, in the order of the program; a dependency on what an
        # optimizer returns doesn't, as the compiler knows the value of that.
        self.add_prim_attr("side_effect_mem", True)

    def __infer__(self, x: dict[str, Any]) -> dict[str, Any]:
        _reparse.refuse()
        _check_tuple(self.name, x["dtype"])
        return {"shape": [1], "dtype": mstype.TensorType(mstype.int64), "value": None}


class RequestModel(Primitive):
    """The latest tensors that a neighbour has saved under `record`, for a tuple of as many of one's own.

    Returns them and, last, int64 of shape (2,): the neighbour's rank and the version, (-1, 0) and one's own tensors
    where nobody has any. `neighbour` is "random" (each of the others that live and have one is as likely as any other,
    by `seed`) or "round-robin". With `prefetch` the neighbour's are those from when this process last saved its own,
    copied in the background since.
    """

    def __init__(self, record: str, neighbour: str, seed: int, prefetch: bool) -> None:
        super().__init__(
            "KungFuRequestModel", ["x"], ["y"], record=record, neighbour=neighbour, seed=seed, prefetch=prefetch
        )
        for name, value in self.init_attrs.items():
            self.add_prim_attr(name, value)
        self.add_prim_attr("side_effect_io", True)

    def __infer__(self, x: dict[str, Any]) -> dict[str, Any]:
        _reparse.refuse()
        _check_tuple(self.name, x["dtype"])
        source = mstype.TensorType(mstype.int64)
        return {"shape": (*x["shape"], [2]), "dtype": (*x["dtype"], source), "value": None}
