"""Track the cells that a program has created. A program creates cells in the same order on all workers."""

from __future__ import annotations

import weakref
import zlib
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from ms_kungfu.trained import inventory

_cells: list[weakref.ref[Any]] = []


def noting(init: Callable[..., None]) -> Callable[..., None]:
    """Return the replacement for ``nn.Cell.__init__``, which records the cell."""

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        if len(_cells) % 1024 == 1023:  # drop dead references, because a program may create cells in each step
            _cells[:] = [known for known in _cells if known() is not None]
        _cells.append(weakref.ref(self))

    return __init__


def living() -> list[Any]:
    """Return the cells that still exist."""
    return [cell for cell in (known() for known in _cells) if cell is not None]


def has_optimizers() -> bool:
    """Return whether one of the program's cells is an optimizer."""
    return any(isinstance(cell, nn.Optimizer) or inventory.is_grouped(cell) for cell in living())


def updates() -> int:
    """Return the number of updates that the program's optimizers have counted."""
    counts = [_count_of(cell) for cell in living()]
    return sum(int(count.asnumpy().reshape(-1)[0]) for count in counts if count is not None)


def trained_by_groups() -> int:
    """Return a checksum of the weights that optimizers with ``param_groups`` train; 0 if there are no such optimizers.

    Some of these optimizers don't count their updates (``experimental.optim.SGD``), but an update changes the checksum.
    """
    groups = [group for cell in living() if inventory.is_grouped(cell) for group in cell.param_groups]
    found = 0
    for parameter in (parameter for group in groups for parameter in group["params"]):
        # NumPy has no bfloat16, but float32 can represent all of its values.
        values = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
        found = zlib.crc32(values.asnumpy().tobytes(), found)
    return found


def _count_of(cell: Any) -> Any:
    """Return the Parameter in which an optimizer counts its updates; None if the cell has no such Parameter."""
    if isinstance(cell, nn.Optimizer):
        return getattr(cell, "global_step", None)
    if inventory.is_grouped(cell):
        return getattr(cell, "state_step", getattr(cell, "step_t", None))
    return None
