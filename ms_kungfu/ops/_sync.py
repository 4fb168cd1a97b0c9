"""Operations for cluster changes: wait for PyNative mode's queue, and broadcast directly into parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mindspore import Parameter
from mindspore.ops.primitive import _pynative_executor  # this import path works in every version of MindSpore

from ms_kungfu.ops._base import Collective, check_root
from ms_kungfu.ops.broadcast import KungFuBroadcast


class KungFuBroadcastInPlace(Collective):
    """Overwrite the inputs with rank `root`'s values.

    The inputs must be Parameters, because other tensors may share memory.
    """

    copies = True

    def __init__(self, root: int, name: str) -> None:
        super().__init__("KungFuBroadcastInPlace", name, root=check_root(root))
        self.add_prim_attr("side_effect_mem", True)


# There is one primitive for each (root, name), so that MindSpore can reuse its work for the same shapes.
_primitive = functools.lru_cache(maxsize=64)(KungFuBroadcastInPlace)
_elsewhere = functools.lru_cache(maxsize=64)(KungFuBroadcast)


def wait_for_queue() -> None:
    """Wait until MindSpore has run all operations that PyNative mode has queued.

    Without this wait, a change of the cluster could come before a queued collective on one rank and
    after that collective on another.

    Raises:
        Exception: the error of a queued operation that failed.
    """
    _pynative_executor.sync()


def broadcast_parameters(
    params: Sequence[Parameter], root: int = 0, name: str = "parameters", keep: bool = False
) -> None:
    """Overwrite every parameter with rank `root`'s value in place, in one operation per dtype.

    With `keep`, this worker takes part but keeps its own values.

    The function is a collective: all ranks must pass parameters of the same shapes and dtypes in the
    same order. Call it between steps and outside of a graph. It works in GRAPH and PyNative mode.
    Compiled graphs stay valid and use the new values. The function returns when all values are copied.
    """
    if not params:
        return
    for param in params:
        if param.has_init:
            param.init_data()
    (_elsewhere if keep else _primitive)(root, name)(tuple(params))
    wait_for_queue()
