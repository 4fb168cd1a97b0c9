"""What changes of membership need: an empty queue, and a broadcast straight into parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mindspore import Parameter
from mindspore.ops.primitive import _pynative_executor  # its location in every version

from ms_kungfu.ops._base import Collective, check_root
from ms_kungfu.ops.broadcast import KungFuBroadcast


class KungFuBroadcastInPlace(Collective):
    """Overwrite the inputs with rank `root`'s. For parameters only: another tensor's memory may serve elsewhere."""

    copies = True

    def __init__(self, root: int, name: str) -> None:
        super().__init__("KungFuBroadcastInPlace", name, root=check_root(root))
        self.add_prim_attr("side_effect_mem", True)


# One primitive for each (root, name): MindSpore keeps what it built for a primitive by the shapes of the call.
_primitive = functools.lru_cache(maxsize=64)(KungFuBroadcastInPlace)
_elsewhere = functools.lru_cache(maxsize=64)(KungFuBroadcast)


def wait_for_queue() -> None:
    """Wait until MindSpore has run what PyNative mode has queued.

    A change of membership while collectives are still in the queue would meet them at some ranks and
    not at others.

    Raises:
        Exception: the error of an operation in the queue that failed.
    """
    _pynative_executor.sync()


def broadcast_parameters(
    params: Sequence[Parameter], root: int = 0, name: str = "parameters", keep: bool = False
) -> None:
    """Overwrite every parameter with rank `root`'s, in place, in one operation for each dtype.

    With `keep` this worker takes part and leaves its own parameters as they are.

    Collective: all ranks pass parameters of the same shapes and dtypes in the same order, and call it between steps,
    outside of a graph. It works in GRAPH and in PyNative mode; compiled graphs stay valid and use the new values. It
    returns when it is done.
    """
    if not params:
        return
    for param in params:
        if param.has_init:
            param.init_data()
    (_elsewhere if keep else _primitive)(root, name)(tuple(params))
    wait_for_queue()
