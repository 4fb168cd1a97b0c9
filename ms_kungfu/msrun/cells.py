"""The cells that a program has made, in its order, which is that of all workers."""

from __future__ import annotations

import weakref
from typing import Any, Callable

from mindspore import nn

_cells: list[weakref.ref[Any]] = []


def noting(init: Callable[..., None]) -> Callable[..., None]:
    """What stands in the place of ``nn.Cell.__init__``."""

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        if len(_cells) % 1024 == 1023:  # a program may make some in each step
            _cells[:] = [known for known in _cells if known() is not None]
        _cells.append(weakref.ref(self))

    return __init__


def living() -> list[Any]:
    """Those that are still there."""
    return [cell for cell in (known() for known in _cells) if cell is not None]


def updates() -> int:
    """By all of the program's optimizers so far."""
    return sum(
        int(cell.global_step.asnumpy()[0])
        for cell in living()
        if isinstance(cell, nn.Optimizer) and hasattr(cell, "global_step")
    )
